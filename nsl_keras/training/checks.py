"""Checks of data and losses that the models of this package share.

Arrays, and the first batch of a `keras.utils.PyDataset`, are checked on the host before
`fit` and `evaluate` begin. Other data is not read in advance: bad values in it make the
loss non-finite, and `fit` stops there.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import keras
import numpy as np

from nsl_keras import configs, nesting, validation
from nsl_keras.backend import ReplicatedModel
from nsl_keras.training.data import is_in_memory


class NonFiniteLossError(ArithmeticError):
    """`fit` raises this when bad inputs or a diverging run make the loss NaN or infinite.

    It does not if its callbacks include `keras.callbacks.TerminateOnNaN`.

    Example:

    >>> import nsl_keras
    >>> raise nsl_keras.NonFiniteLossError("The loss became nan by batch 3 of epoch 1.")
    Traceback (most recent call last):
        ...
    nsl_keras.training.checks.NonFiniteLossError: The loss became nan by batch 3 of epoch 1.
    """


class StopAtNonFiniteLoss(keras.callbacks.Callback):
    """Raises `NonFiniteLossError` after a batch that leaves the loss non-finite."""

    #: On JAX, Keras then reads the losses in threads of its own while training runs on. It
    #: raises their errors before the epoch ends: no callback saves a spoiled state.
    async_safe = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch + 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras reports the mean of the epoch so far, in which NaN stays.
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NonFiniteLossError(
                f"The loss became {float(loss)} by batch {batch + 1} of epoch "
                f"{self.epoch}. "
                "Check inputs and sample weights for NaN and infinities, and the labels "
                "for numbers outside the classes, or lower the learning rate."
            )


_FIT = inspect.signature(keras.Model.fit)


class CheckedModel(nesting.KeepsFrozen, ReplicatedModel):
    """Base of the models that check their data in `fit` and `evaluate`."""

    #: Whether the outputs are logits of classes, and not numbers of a regression.
    classifies: bool
    #: Whether `fit` takes `class_weight`.
    weighs_classes = True

    def _check_data(self, x: Any, y: Any = None) -> None:
        """Raises for bad arrays."""
        raise NotImplementedError

    from_config = classmethod(configs.from_arguments)

    def compile(
        self, optimizer: Any = "rmsprop", loss: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Configures training, as in Keras; the loss of a classifier must take logits."""
        if self.classifies:
            require_logits_loss(loss)
        super().compile(optimizer, loss, *args, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        # Keras requires this of models that override `compile`.
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **options: Any) -> Any:
        given = _FIT.bind(self, *args, **options).arguments
        weights = given.get("class_weight")
        demand = (
            "None: the classes of episodes are numbered anew. Pass `sample_weight`, with a "
            "weight for each episode or query"
        )
        fits = self.weighs_classes or not weights
        validation.require(fits, "class_weight", demand, weights)
        given["x"] = self._checked(given.get("x"), given.get("y"))
        held_out = given.get("validation_data")
        if isinstance(held_out, (tuple, list)):
            given["validation_data"] = (self._checked(*held_out[:2]), *held_out[1:])
        else:
            self._checked(held_out)
        callbacks = keras.tree.flatten(given.get("callbacks") or [])
        gentle = keras.callbacks.TerminateOnNaN  # The caller stops training in another way.
        if not any(isinstance(each, gentle) for each in callbacks):
            given["callbacks"] = [*callbacks, StopAtNonFiniteLoss()]
        del given["self"]
        return super().fit(**given)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **options: Any) -> Any:
        epoch = getattr(x, "epoch", None)
        found = super().evaluate(self._checked(x, y), y, *args, **options)
        if epoch is not None:  # In each epoch of `fit`, validation sees the same examples.
            x.epoch = epoch
        return found

    def _checked(self, x: Any, y: Any = None) -> Any:
        """Returns `x`, checked: arrays, or the first batch of a `PyDataset`.

        Targets of zero weight are checked too: NaN times 0 is NaN.
        """
        first: Any = x[0] if isinstance(x, keras.utils.PyDataset) else (x, y)
        inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(first)
        if is_in_memory(inputs):
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


def require_logits_loss(loss: Any) -> None:
    """Raises if a loss, or one of several losses, does not take logits.

    A loss with the argument `from_logits` says so itself. Keras's other losses are refused:
    most take probabilities, of which logits make a flat, NaN or misleading loss.
    """
    for each in keras.tree.flatten(loss):
        if each is not None and not _takes_logits(keras.losses.get(each)):
            raise ValueError(
                "`loss` must take logits, as "
                "keras.losses.SparseCategoricalCrossentropy(from_logits=True) does. A loss "
                "that takes any numbers, such as a hinge, must be called in a function of "
                f"your own. Received: loss={loss!r}"
            )


def _takes_logits(loss: Any) -> bool:
    argument = inspect.signature(loss).parameters.get("from_logits")
    says = getattr(loss, "from_logits", argument and argument.default)
    known = vars(keras.losses).values()
    is_own = loss not in known and type(loss) not in known
    return is_own if says is None else bool(says)
