"""Checks of data and losses that the models of this package share.

Arrays are checked once, on the host, before `fit` and `evaluate` begin; of a generator or a
`keras.utils.PyDataset`, the first batch. Other batches, and all batches of `tf.data`, are
not read in advance: bad values in them make the loss non-finite, and `fit` stops there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from nsl_keras import configs, nesting
from nsl_keras.backend import ReplicatedModel
from nsl_keras.training.data import is_in_memory


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
    """Raises `NonFiniteLossError` after a batch that leaves the loss non-finite."""

    #: On JAX, Keras then reads the losses in threads of its own while training runs on. It
    #: raises their errors before the epoch ends: no callback saves a spoiled state.
    async_safe = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras reports the mean of the epoch so far, in which NaN stays.
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            epoch = len(self.model.history.epoch) + 1
            raise NonFiniteLossError(
                f"The loss became {float(loss)} by batch {batch + 1} of epoch {epoch}. "
                "Check inputs and sample weights for NaN and infinities, and the labels "
                "for numbers outside the classes, or lower the learning rate."
            )


FIT = inspect.signature(keras.Model.fit)


class CheckedModel(nesting.KeepsFrozen, ReplicatedModel):
    """Base of the models that check their data in `fit` and `evaluate`."""

    #: Whether the outputs are logits of classes, and not numbers of a regression.
    classifies: bool

    def _check_data(self, x: Any, y: Any = None) -> None:
        """Raises for bad arrays."""
        raise NotImplementedError

    from_config = classmethod(configs.from_arguments)

    def compile(
        self, optimizer: Any = "rmsprop", loss: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Configures training, as in Keras; the loss of a classifier must take logits."""
        if self.classifies:
            loss_of_logits(loss)
        super().compile(optimizer, loss, *args, **kwargs)

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
            given["callbacks"] = [*callbacks, StopAtNonFiniteLoss()]
        del given["self"]
        return super().fit(**given)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **options: Any) -> Any:
        return super().evaluate(self._checked(x, y), y, *args, **options)

    def _checked(self, x: Any, y: Any = None) -> Any:
        """Returns `x`, checked: the first batch of a `PyDataset` when Keras draws it.

        Targets of zero weight are checked too: NaN times 0 is NaN.
        """

        def check(batch: Any) -> None:
            inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
            if is_in_memory(inputs):
                self._check_data(inputs, self._without_ignored(targets))

        if isinstance(x, keras.utils.PyDataset):
            return _FirstChecked(x, check)
        if isinstance(x, types.GeneratorType):
            for batch in (first := [*itertools.islice(x, 1)]):
                check(batch)
            return (batch for batch in itertools.chain(first, x))
        check((x, y))
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


class _FirstChecked(keras.utils.PyDataset):
    """A data set whose first batch is checked when Keras draws it."""

    def __init__(
        self, batches: keras.utils.PyDataset, check: Callable[[Any], None]
    ) -> None:
        super().__init__(
            batches.workers, batches.use_multiprocessing, batches.max_queue_size
        )
        self.batches = batches
        self.check: Any = check
        # Keras calls them between epochs.
        self.on_epoch_begin = batches.on_epoch_begin
        self.on_epoch_end = batches.on_epoch_end

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "check": None}  # Other processes draw later batches.

    @property
    def num_batches(self) -> int | None:
        return self.batches.num_batches

    def __getitem__(self, index: int) -> Any:
        batch = self.batches[index]
        check, self.check = self.check, None
        if check is not None:
            check(batch)
        return batch


def loss_of_logits(loss: Any) -> None:
    """Raises if a loss, or one of several losses, does not take logits.

    A loss with the argument `from_logits` says so itself. Any other loss of Keras takes
    logits if it pulls up the logit of the true class wherever this is negative and the
    smallest, and pulls up no other logit by more. Hinge losses and distances between logits
    and one-hot labels do, for example `MeanSquaredError`; losses of probabilities are flat,
    NaN or misleading there. Losses that are not Keras's own are not asked.
    """
    for each in keras.tree.flatten(loss):
        if each is not None and not _takes_logits(keras.losses.get(each)):
            raise ValueError(
                "`loss` must take logits, as "
                "keras.losses.SparseCategoricalCrossentropy(from_logits=True) does. "
                f"Received: loss={loss!r}"
            )


def _takes_logits(loss: Any) -> bool:
    argument = inspect.signature(loss).parameters.get("from_logits")
    says = getattr(loss, "from_logits", argument and argument.default)
    known = vars(keras.losses).values()
    if says is not None or (type(loss) not in known and loss not in known):
        return says is not False
    for logits in ([-3.0, -1.0, -2.0], [-3.0, 2.0, 1.5]):
        larger = [_value_of(loss, logits + 0.5 * row) for row in np.eye(3)]
        gain, *others = _value_of(loss, np.array(logits)) - np.array(larger)
        if not (gain > 0 and max(others) <= gain + 1e-4):  # NaN compares as false.
            return False
    return True


def _value_of(loss: Any, logits: np.ndarray) -> float:
    """Returns the loss of one example of class 0; NaN if there is none."""
    for label in (np.eye(1, 3), np.zeros(1)):  # One-hot, or an integer.
        with contextlib.suppress(ValueError, TypeError):
            return float(keras.ops.sum(loss(label, logits[None].astype("float32"))))
    return math.nan
