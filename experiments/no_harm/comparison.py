"""A method beside its baseline in a cell of the do-no-harm matrix."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scipy import stats  # Comes with scikit-learn.

from experiments.common import tables
from experiments.no_harm.data import DATASETS
from experiments.no_harm.methods import COMPARED, Method
from experiments.no_harm.networks import NETWORKS

#: Inference may be so far below training after an epoch, in points, or as far as the plain
#: network's and a point more.
LARGEST_GAP = 3.0
GAP_ABOVE_PLAIN = 1.0
#: Epochs at the end whose mean hides what a single epoch does to moving statistics.
LAST_EPOCHS = 3


class Comparison(NamedTuple):
    """Records of a method in a cell, a seed each, beside its baseline's of these seeds."""

    dataset: str
    network: str
    method: str
    found: list[dict]
    baseline: list[dict]

    @property
    def title(self) -> str:
        return f"{DATASETS[self.dataset].title} {NETWORKS[self.network].title}"

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.found]

    def differences(self, epochs: int = 1) -> list[float]:
        """Test accuracy above the baseline's, in points, by seed: the last epochs' mean."""
        pairs = zip(self.found, self.baseline, strict=True)
        return [test_accuracy(run, epochs) - test_accuracy(b, epochs) for run, b in pairs]

    def difference(self, epochs: int = 1) -> float:
        return statistics.mean(self.differences(epochs))

    def half_width(self, epochs: int = 1) -> float:
        """Half the width of the mean's 95 % interval (paired t); infinite for one seed."""
        differences = self.differences(epochs)
        count = len(differences)
        if count < 2:
            return math.inf
        quantile = float(stats.t.ppf(0.975, count - 1))
        return quantile * statistics.stdev(differences) / math.sqrt(count)

    def interval(self, epochs: int = 1) -> str:
        pair = self.difference(epochs), self.half_width(epochs)
        return tables.spread(*pair, "seeds", len(self.seeds), "+")

    @property
    def has_large_gap(self) -> bool:
        baseline = mean_gap(self.baseline)
        return mean_gap(self.found) > max(LARGEST_GAP, baseline + GAP_ABOVE_PLAIN)

    @property
    def step_times(self) -> list[float]:
        """Times of a step over the baseline's."""
        # Runs of two commands may be of machines of different speed.
        return [
            run["seconds_per_step"] / other["seconds_per_step"]
            for run, other in zip(self.found, self.baseline, strict=True)
            if run["command"] == other["command"]
        ]


def test_accuracy(run: dict, epochs: int = 1) -> float:
    return 100 * statistics.mean(run["test_accuracy"][-epochs:])


def mean_gap(found: list[dict], epoch: str = "first_epoch") -> float:
    """Accuracy in training mode above that in inference mode, in points."""
    modes = [run["by_mode"][epoch] for run in found]
    return 100 * statistics.mean(each["training"] - each["inference"] for each in modes)


def compare(
    found: list[dict],
    methods: Mapping[str, Method] = COMPARED,
    datasets: Iterable[str] = DATASETS,
    networks: Iterable[str] = NETWORKS,
) -> list[Comparison]:
    """Returns every method in every cell where there are runs of it and its baseline."""
    cells: dict[tuple, dict[int, list[dict]]] = {}
    for run in found:
        cell = cells.setdefault((run["dataset"], run["network"], run["method"]), {})
        cell.setdefault(run["seed"], []).append(run)
    comparisons = []
    for dataset, network, name in itertools.product(datasets, networks, methods):
        own = cells.get((dataset, network, name), {})
        baseline = cells.get((dataset, network, methods[name].baseline), {})
        runs = [own[seed][-1] for seed in sorted(own.keys() & baseline)]
        pairs = []
        for run in runs:
            # Of several commits that of the run counts; if there is none, the last.
            several = baseline[run["seed"]]
            same = [each for each in several if each.get("commit") == run.get("commit")]
            pairs.append((same or several)[-1])
        tables.require_comparable(runs, pairs)
        if runs:
            comparisons.append(Comparison(dataset, network, name, runs, pairs))
    return comparisons
