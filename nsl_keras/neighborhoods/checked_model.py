"""Training that looks at its data before it begins, and stops where the loss is lost."""

from __future__ import annotations

import functools
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.neighborhoods.non_finite_loss import StopAtNonFiniteLoss


class CheckedModel(keras.Model):
    """Base of the models whose `fit` and `evaluate` check arrays on the host.

    XLA and JAX cannot check data inside a step: `fit` stops at the first loss that is not
    finite. A subclass writes `_check_data`.
    """

    def _check_data(self, x: Any, y: Any = None) -> None:
        """Raises for bad arrays; data sets and generators are left to the step."""
        raise NotImplementedError

    def compile_from_config(self, config: dict[str, Any]) -> None:
        # Keras leaves this to models that have a `compile` of their own.
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        arguments = validation.arguments_by_name(keras.Model.fit, args, kwargs)
        self._check_data(arguments.get("x"), arguments.get("y"))
        validation_data = arguments.get("validation_data")
        if isinstance(validation_data, (tuple, list)):
            self._check_data(*validation_data[:2])
        arguments["callbacks"] = StopAtNonFiniteLoss.added_to(arguments.get("callbacks"))
        return super().fit(**arguments)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        arguments = validation.arguments_by_name(keras.Model.evaluate, args, kwargs)
        self._check_data(arguments.get("x"), arguments.get("y"))
        return super().evaluate(**arguments)
