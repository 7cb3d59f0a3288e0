"""Checks of data and losses that the models of this package share.

Arrays are checked once, on the host, before `fit` and `evaluate` begin; of a generator or a
`keras.utils.PyDataset`, the first batch. Other batches, and all batches of `tf.data`, are
not read in advance: bad values in them make the loss non-finite, and `fit` stops there.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import types
from typing import Any

import keras
import numpy as np

from nsl_keras import configs, nesting
from nsl_keras.backend import ReplicatedModel


class NonFiniteLossError(ArithmeticError):
    """The training loss became NaN or infinite.

    `fit` raises this error when bad inputs or a diverging run make the loss non-finite,
    unless its callbacks include `keras.callbacks.TerminateOnNaN`, which raises nothing.

    Example:

    >>> import nsl_keras
    >>> raise nsl_keras.NonFiniteLossError("The loss became nan by batch 3 of epoch 1.")
    Traceback (most recent call last):
        ...
    nsl_keras.training.checks.NonFiniteLossError: The loss became nan by batch 3 of epoch 1.
    """


class StopAtNonFiniteLoss(keras.callbacks.Callback):
    """Raises `NonFiniteLossError` after a batch that leaves the loss non-finite.

    `keras.callbacks.TerminateOnNaN` does not raise in Keras 3.10, and waits for each batch.
    """

    #: On JAX, Keras then reads the losses in threads of its own while training runs on. It
    #: raises their errors before the epoch ends: no callback saves a spoiled state.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras reports the mean of the epoch so far, in which NaN stays.
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NonFiniteLossError(
                f"The loss became {float(loss)} by batch {batch + 1} of epoch "
                f"{self.epoch + 1}. Check inputs and sample weights for NaN and "
                "infinities, and the labels for numbers outside the classes, or lower the "
                "learning rate."
            )


FIT = inspect.signature(keras.Model.fit)
_EVALUATE = inspect.signature(keras.Model.evaluate)


class CheckedModel(nesting.KeepsFrozen, ReplicatedModel):
    """Base of the models that check their data in `fit` and `evaluate`."""

    def _check_data(self, x: Any, y: Any = None) -> None:
        """Raises for bad arrays; ignores data sets and generators."""
        raise NotImplementedError

    from_config = classmethod(configs.from_arguments)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        # Keras requires this of models that override `compile`.
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **options: Any) -> Any:
        given = FIT.bind(self, *args, **options).arguments
        given["x"] = self._checked(given.get("x"), given.get("y"))
        held_out = given.get("validation_data")
        if isinstance(held_out, (tuple, list)):
            self._checked(*held_out[:2])
        else:
            given["validation_data"] = self._checked(held_out)
        callbacks = keras.tree.flatten(given.get("callbacks") or [])
        gentle = keras.callbacks.TerminateOnNaN  # The caller stops training in another way.
        if not any(isinstance(each, gentle) for each in callbacks):
            callbacks.append(StopAtNonFiniteLoss())
        given["callbacks"] = callbacks
        del given["self"]
        return super().fit(**given)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **options: Any) -> Any:
        bound = _EVALUATE.bind(self, *args, **options)
        given = bound.arguments
        given["x"] = self._checked(given.get("x"), given.get("y"))
        return super().evaluate(*bound.args[1:], **bound.kwargs)

    def _checked(self, x: Any, y: Any = None) -> Any:
        """Checks arrays or the first batch, except ignored targets, and returns `x`.

        It checks targets of zero weight too: Keras multiplies them, and NaN times 0 is NaN.
        """
        if isinstance(x, types.GeneratorType):
            batches = [*itertools.islice(x, 1)]
            x = (each for each in itertools.chain(batches, x))
        else:
            batches = [x[0] if isinstance(x, keras.utils.PyDataset) else (x, y)]
        for batch in batches:
            inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
            self._check_data(inputs, self._without_ignored(targets))
        return x

    def _without_ignored(self, y: Any) -> Any:
        """Returns targets of one output, with class 0 for those that a loss ignores."""
        if isinstance(y, (list, tuple)) and len(y) == 1 and np.ndim(y[0]):
            (y,) = y  # Of one output, as Keras allows.
        if hasattr(y, "__array__"):
            for loss in keras.tree.flatten(self.loss):
                ignored = getattr(loss, "ignore_class", None)
                y = y if ignored is None else np.where(np.asarray(y) == ignored, 0, y)
        return y


def loss_of_logits(loss: Any) -> None:
    """Raises if a loss, or one of several losses, expects probabilities."""
    for each in keras.tree.flatten(loss):
        if each is not None and _expects_probabilities(keras.losses.get(each)):
            raise ValueError(
                "`loss` must take logits, as "
                "keras.losses.SparseCategoricalCrossentropy(from_logits=True) does. "
                f"Received: loss={loss!r}"
            )


def _expects_probabilities(loss: Any) -> bool:
    argument = inspect.signature(loss).parameters.get("from_logits")
    return getattr(loss, "from_logits", argument and argument.default) is False
