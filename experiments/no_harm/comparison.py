"""A method beside its baseline in a cell of the do-no-harm matrix, from files of runs."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import stats  # Comes with scikit-learn.

from experiments.no_harm.data import DATASETS
from experiments.no_harm.methods import COMPARED
from experiments.no_harm.networks import NETWORKS

#: Inference may be so far below training after an epoch, in points, or as far as the plain
#: network's and a point more.
LARGEST_GAP = 3.0
GAP_ABOVE_PLAIN = 1.0
#: Inference with the moving statistics that training left, and with statistics that are
#: estimated anew: what training mode is compared with.
MOVING, ESTIMATED = "inference", "estimated"
#: An interval that is wider to either side, in points, asks for more seeds.
WIDEST = 2.0
#: Epochs at the end whose mean hides what a single epoch does to moving statistics.
LAST_EPOCHS = 3
#: How often seeds are drawn to see what chance does.
DRAWS = 10_000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A method in a cell, beside its baseline with the same seeds.

    Attributes:
        dataset: Name of the image set.
        network: Name of the network.
        method: Name of the method.
        found: Records of the method, a seed each.
        baseline: Records of its baseline, with the same seeds.
    """

    dataset: str
    network: str
    method: str
    found: list[dict]
    baseline: list[dict]

    @property
    def title(self) -> str:
        """What the cell is called."""
        return f"{DATASETS[self.dataset].title} {NETWORKS[self.network].title}"

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return [run["seed"] for run in self.found]

    @property
    def differences(self) -> list[float]:
        """Test accuracy above the baseline's, in points, by seed."""
        pairs = zip(self.found, self.baseline, strict=True)
        return [test_accuracy(run) - test_accuracy(other) for run, other in pairs]

    @property
    def difference(self) -> float:
        """The mean difference."""
        return statistics.mean(self.differences)

    @property
    def differences_of_last_epochs(self) -> list[float]:
        """Mean test accuracy of the last epochs above the baseline's, by seed."""
        pairs = zip(self.found, self.baseline, strict=True)
        return [
            test_accuracy(run, LAST_EPOCHS) - test_accuracy(other, LAST_EPOCHS)
            for run, other in pairs
        ]

    @property
    def difference_of_last_epochs(self) -> float:
        """The mean difference of the mean accuracies after the last epochs."""
        return statistics.mean(self.differences_of_last_epochs)

    @property
    def half_width(self) -> float:
        """Half the width of the mean's 95 % interval (paired t); infinite for one seed."""
        return half_width(self.differences)

    @property
    def is_wide(self) -> bool:
        """Whether the interval is too wide to judge by."""
        return self.half_width > WIDEST

    def has_large_gap(self, inference: str = MOVING) -> bool:
        """Whether the gap after an epoch is larger than what passes."""
        own, baseline = (
            mean_gap(each, inference=inference) for each in (self.found, self.baseline)
        )
        return bool(_is_large(own, baseline))

    @property
    def chance_of_a_large_gap(self) -> float:
        """How often the baseline's gap would be too large beside that of other seeds.

        Both are means of as many of its seeds, drawn with replacement.
        """
        gaps = [mean_gap([run]) for run in self.baseline]
        draws = np.random.default_rng(0).choice(gaps, (2, DRAWS, len(gaps)))
        return float(_is_large(*draws.mean(-1)).mean())

    def gap_differences(self, inference: str = MOVING) -> list[float]:
        """The gap after an epoch above the baseline's, in points, by seed."""
        pairs = zip(self.found, self.baseline, strict=True)
        return [
            mean_gap([run], inference=inference) - mean_gap([other], inference=inference)
            for run, other in pairs
        ]

    @property
    def step_time(self) -> float | None:
        """Time of a step over the baseline's, `None` if that is not known.

        Only seeds whose two runs one command made count: those of two commands may be of
        machines of different speed.
        """
        ratios = [
            run["seconds_per_step"] / other["seconds_per_step"]
            for run, other in zip(self.found, self.baseline, strict=True)
            if run["command"] == other["command"]
        ]
        return statistics.median(ratios) if ratios else None


def test_accuracy(run: dict, epochs: int = 1) -> float:
    """The mean accuracy after the last epochs, in percent."""
    return 100 * statistics.mean(run["test_accuracy"][-epochs:])


def half_width(differences: list[float]) -> float:
    """Half the width of a mean's 95 % interval (t); infinite for one difference."""
    count = len(differences)
    if count < 2:
        return math.inf
    quantile = float(stats.t.ppf(0.975, count - 1))
    return quantile * statistics.stdev(differences) / math.sqrt(count)


def mean_accuracy(found: Iterable[dict], mode: str, epoch: str = "first_epoch") -> float:
    """Accuracy on training images in a mode, in percent."""
    return 100 * statistics.mean(run["by_mode"][epoch][mode] for run in found)


def mean_gap(
    found: list[dict], epoch: str = "first_epoch", inference: str = MOVING
) -> float:
    """Accuracy in training mode above that in inference mode, in points."""
    return mean_accuracy(found, "training", epoch) - mean_accuracy(found, inference, epoch)


def _is_large(gap: Any, baseline: Any) -> Any:
    return gap > np.maximum(LARGEST_GAP, baseline + GAP_ABOVE_PLAIN)


def compare(found: list[dict]) -> list[Comparison]:
    """Returns every method in every cell where there are runs of it and its baseline."""
    by_key: dict[tuple, dict[int, dict]] = {}
    for run in found:
        key = run["dataset"], run["network"], run["method"]
        by_key.setdefault(key, {})[run["seed"]] = run
    comparisons = []
    for dataset in DATASETS:
        for network in NETWORKS:
            for name, method in COMPARED.items():
                own = by_key.get((dataset, network, name), {})
                baseline = by_key.get((dataset, network, method.baseline), {})
                seeds = sorted(set(own) & set(baseline))
                if seeds:
                    made = [own[seed] for seed in seeds], [baseline[seed] for seed in seeds]
                    comparisons.append(Comparison(dataset, network, name, *made))
    return comparisons


def of_method(comparisons: Iterable[Comparison], method: str) -> list[Comparison]:
    """The cells of a method."""
    return [each for each in comparisons if each.method == method]
