"""Accuracies over many episodes, with their interval, and paired differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np

from nsl_keras import validation
from nsl_keras.few_shot.episodes import Episode, EpisodeSampler
from nsl_keras.training.checks import NonFiniteLossError

#: A model that scores `(support examples, support labels, query examples)`, or any callable
#: from a batch of episodes to logits of shape `(episodes, queries, ways)`.
Learner: TypeAlias = keras.Model | Callable[[Episode], Any]


class _OverEpisodes:
    """One number per episode, with their mean and its interval."""

    _numbers: Any

    @property
    def mean(self) -> float:
        """The mean over the episodes."""
        return float(np.mean(self._numbers))

    @property
    def half_width(self) -> float:
        """Half the width of the mean's 95 % interval, `1.96 * std / sqrt(episodes)`."""
        return float(1.96 * np.std(self._numbers, ddof=1) / np.sqrt(len(self._numbers)))

    def _described(self, sign: str, what: str) -> str:
        percent = f"{100 * self.mean:{sign}.2f} ± {100 * self.half_width:.2f} %"
        return f"{percent} ({len(self._numbers)} {what})"


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation(_OverEpisodes):
    """Accuracies of a learner over episodes `start`, `start + 1`, ... of a sampler.

    Attributes:
        accuracies: Array of shape `(episodes,)`, the fractions of correct queries.
        start: int, the index of the first episode.
        batch_normalization: The policy that the learner's batch norms followed, or `None`.
        sampler: str, the sampler's `fingerprint`; `None` if it is not known.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> print(few_shot.Evaluation(np.array([0.6, 0.4, 0.8, 0.2])))
    50.00 ± 25.30 % (4 episodes)
    """

    accuracies: np.ndarray
    start: int = 0
    batch_normalization: str | None = None
    sampler: str | None = None
    _numbers = property(lambda self: self.accuracies)

    def __str__(self) -> str:
        policy = self.batch_normalization
        statistics = f", batch normalization {policy!r}" if policy else ""
        return self._described("", f"episodes{statistics}")


@dataclasses.dataclass(frozen=True, eq=False)
class Difference(_OverEpisodes):
    """Per-episode accuracy difference between two learners.

    Attributes:
        differences: Array of shape `(episodes,)`, first minus second.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> print(few_shot.Difference(np.array([0.1, 0.1, 0.1, 0.14])))
    +11.00 ± 1.96 % (4 paired episodes)
    """

    differences: np.ndarray
    _numbers = property(lambda self: self.differences)

    def __str__(self) -> str:
        return self._described("+", "paired episodes")


def evaluate(
    learner: Learner,
    sampler: EpisodeSampler,
    episodes: int = 600,
    batch_size: int = 4,
    start: int = 0,
    verbose: int | str = "auto",
) -> Evaluation:
    """Returns a learner's accuracy on the queries of many episodes.

    The papers evaluate on 600 episodes of 15 queries per class. Equal samplers draw equal
    episodes, so that `compare` can compare learners in pairs.

    Args:
        learner: A learner of this package, or any callable from a batched `Episode` to
            logits of shape `(batch, queries, ways)`.
        sampler: `EpisodeSampler` of the test classes.
        episodes: int, the number of episodes, at least 2.
        batch_size: int, the number of episodes given to the learner at once.
        start: int, the index of the first episode.
        verbose: Same as in `keras.Model.evaluate`.

    Raises:
        ValueError: For numbers outside these ranges, or logits of another shape.
        NonFiniteLossError: If the logits of an episode are not finite.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.random.default_rng(0).normal(size=(120, 4, 4, 1))
    >>> sampler = few_shot.EpisodeSampler(images, np.arange(120) // 20, shots=2)
    >>> def guess(episode):
    ...     return np.zeros((*episode.query_labels.shape, 5))
    >>> print(few_shot.evaluate(guess, sampler, episodes=8, verbose=0))
    20.00 ± 0.00 % (8 episodes)
    """
    is_sampler = isinstance(sampler, EpisodeSampler)
    validation.require(is_sampler, "sampler", "an `EpisodeSampler`", sampler)
    validation.require(callable(learner), "learner", "a learner or a function", learner)
    episodes = validation.positive_integer(episodes, "episodes")
    validation.require(episodes > 1, "episodes", "at least 2", episodes)
    batch_size = min(validation.positive_integer(batch_size, "batch_size"), episodes)
    start = validation.non_negative_integer(start, "start")
    accuracies = []
    firsts = range(start, start + episodes, batch_size)
    progress = keras.utils.Progbar(len(firsts), verbose=1 if verbose == "auto" else verbose)
    for first in firsts:
        batch = sampler.episodes(min(batch_size, start + episodes - first), start=first)
        logits = _logits(learner, batch, batch_size)
        expected = (*batch.query_labels.shape, sampler.ways)
        demand = f"a learner that returns logits of shape {expected}"
        validation.require(logits.shape == expected, "learner", demand, logits.shape)
        finite = np.isfinite(logits).all(axis=(1, 2))
        if not finite.all():
            raise NonFiniteLossError(
                f"The logits of episode {first + int(np.argmin(finite))} are not finite."
            )
        right = np.argmax(logits, axis=-1) == batch.query_labels
        accuracies.append(np.mean(right, axis=-1))
        progress.add(1)
    policy = getattr(learner, "effective_batch_normalization", None)
    return Evaluation(np.concatenate(accuracies), start, policy, sampler.fingerprint)


def _logits(learner: Learner, batch: Episode, size: int) -> np.ndarray:
    """Returns the logits of a batch, filled up so that the learner compiles once."""
    count = len(batch.query_labels)
    filled = Episode(*(each[np.minimum(np.arange(size), count - 1)] for each in batch))
    if isinstance(learner, keras.Model):
        # Not `predict_on_batch`, which under a strategy runs on every replica.
        return learner.predict(filled[:3], batch_size=size, verbose=0)[:count]
    return keras.ops.convert_to_numpy(learner(filled))[:count]


def compare(first: Evaluation, second: Evaluation) -> Difference:
    """Returns the difference of two learners' accuracies, first minus second, by episode.

    Its interval is narrower than the accuracies' own, because episodes vary less in pairs.

    Args:
        first: `Evaluation` of one learner.
        second: `Evaluation` of another learner.

    Raises:
        ValueError: If the learners were evaluated on different episodes.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> better, worse = map(few_shot.Evaluation, np.array([[0.9, 0.5], [0.8, 0.4]]))
    >>> print(few_shot.compare(better, worse))
    +10.00 ± 0.00 % (2 paired episodes)
    """
    described = [
        (each.start, each.accuracies.shape, each.sampler) for each in (first, second)
    ]
    demand = (
        "an evaluation of the same episodes as `first`, with equal images, labels, ways, "
        "shots, queries and seed"
    )
    validation.require(described[0] == described[1], "second", demand, described)
    return Difference(first.accuracies - second.accuracies)
