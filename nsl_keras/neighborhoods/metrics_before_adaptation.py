"""The compiled metrics once more, for the head before it adapts."""

from __future__ import annotations

from typing import Any

import keras

PREFIX = "unadapted_"


class MetricsBeforeAdaptation:
    """Copies of the compiled metrics, named `unadapted_...`.

    They are made at the first update, when the targets' shape tells which accuracy
    `"accuracy"` means. A plain object, so that Keras does not track its metrics as state
    of a model that is already built.
    """

    def __init__(self, metrics: Any = None, weighted_metrics: Any = None) -> None:
        self._compiled = [
            [metric for metric in keras.tree.flatten([given or []]) if metric]
            for given in (metrics, weighted_metrics)
        ]
        self._copies: list[list[keras.metrics.Metric]] | None = None

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The copies made so far."""
        return [metric for group in self._copies or [] for metric in group]

    def update_state(self, targets: Any, unadapted: Any, sample_weight: Any) -> None:
        """Adds a batch of predictions made before adaptation.

        Raises:
            ValueError: For a compiled metric that cannot be copied.
        """
        if self._copies is None:
            self._copies = [
                [_copy(metric, targets) for metric in group] for group in self._compiled
            ]
        plain, weighted = self._copies
        for metric in plain:
            metric.update_state(targets, unadapted)
        for metric in weighted:
            metric.update_state(targets, unadapted, sample_weight=sample_weight)


def _copy(metric: Any, targets: Any) -> keras.metrics.Metric:
    if metric in ("accuracy", "acc"):
        sparse = len(targets.shape) < 2 or targets.shape[-1] == 1
        kind = (
            keras.metrics.SparseCategoricalAccuracy
            if sparse
            else keras.metrics.CategoricalAccuracy
        )
        return kind(name=PREFIX + metric)
    if metric in ("crossentropy", "ce"):
        raise ValueError(
            "`metrics` must not hold 'crossentropy', which expects probabilities where "
            "the model gives logits. Pass "
            "keras.metrics.SparseCategoricalCrossentropy(from_logits=True). "
            f"Received: metrics containing {metric!r}"
        )
    resolved = keras.metrics.get(metric)
    if not isinstance(resolved, keras.metrics.Metric):
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", "fn")
        return keras.metrics.MeanMetricWrapper(resolved, name=PREFIX + name)
    # Keras reports a metric given by name, "mae" say, under that name.
    name = metric if isinstance(metric, str) else resolved.name
    try:
        config = {**resolved.get_config(), "name": PREFIX + name}
        return type(resolved).from_config(config)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            "`metrics` must be metrics with a config, so that they can be kept before "
            f"adaptation too. Received: {resolved!r}"
        ) from error
