"""The temperature that calibrates an adapted classifier's probabilities."""

from __future__ import annotations

import numpy as np

from nsl_keras import validation

#: A support set is held out in at most this many parts.
_MOST_PARTS = 5

#: `smoothing` for examples that were adapted to, chosen on validation classes.
SEEN = 0.08


def held_out_parts(labels: np.ndarray) -> list[np.ndarray]:
    """Returns masks of the parts of a support set that are held out in turn.

    Each class spreads evenly over at most five parts. A single example is never held out.
    """
    order, counts = np.zeros((2, len(labels)), int)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order[members], counts[members] = np.arange(len(members)), len(members)
    parts = [(order % _MOST_PARTS == part) & (counts > 1) for part in range(_MOST_PARTS)]
    return [part for part in parts if part.any()]


def fitted_temperature(
    logits: np.ndarray, labels: np.ndarray, smoothing: float | None = None
) -> float:
    """Returns the temperature that minimizes the cross-entropy of `logits / temperature`.

    The target of the true class is `1 - smoothing`, so that a few right answers do not give
    certainty; `None` is Platt's (1999) for held-out examples. The search has steps of 2 %.
    """
    validation.require_finite(logits, "logits")
    smoothing = 1 / (len(labels) + 2) if smoothing is None else smoothing
    logits = logits.astype("float64")
    spread = np.mean(np.std(logits, axis=1))
    if not spread:
        return 1.0  # The logits know nothing.
    examples, classes = logits.shape
    targets = np.full(logits.shape, smoothing / (classes - 1))
    targets[np.arange(examples), labels] = 1 - smoothing
    temperatures = spread * np.geomspace(1e-3, 1e3, 601)

    def loss(temperature: float) -> float:
        scaled = logits / temperature
        normalizer = np.logaddexp.reduce(scaled, axis=1)
        return float(np.mean(normalizer - np.sum(targets * scaled, axis=1)))

    return float(temperatures[np.argmin([*map(loss, temperatures)])])
