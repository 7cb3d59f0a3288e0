"""Checks of data and losses that the models of this package share.

Arrays are checked on the host, before `fit` and `evaluate` begin. Other data sets are
checked inside the step where the backend can: TensorFlow in eager mode and in graphs. XLA
drops assertions and JAX has none under `jit`; there `fit` stops at the first loss that is
not finite.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import ReplicatedSteps, Tensor, assert_in_graph


class NonFiniteLossError(ArithmeticError):
    """The training loss became NaN or infinite.

    XLA and JAX cannot check data inside a step, so that bad inputs or a diverging run
    show first in the loss. `fit` raises this error after the batch where it happens.

    Example:

    >>> import nsl_keras
    >>> raise nsl_keras.NonFiniteLossError("The loss became nan in batch 3 of epoch 1.")
    Traceback (most recent call last):
        ...
    nsl_keras.training.checks.NonFiniteLossError: The loss became nan in batch 3 of epoch 1.
    """


class StopAtNonFiniteLoss(keras.callbacks.Callback):
    """Raises `NonFiniteLossError` after a batch that leaves the loss non-finite."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    @classmethod
    def added_to(cls, callbacks: Any, model: keras.Model) -> Any:
        """Returns the callbacks given to `fit`, in any form it takes, and this one."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            # A new one: the given one may serve another `fit`.
            return keras.callbacks.CallbackList(
                [*callbacks.callbacks, cls()], model=model, **callbacks.params
            )
        return [*keras.tree.flatten(callbacks or []), cls()]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NonFiniteLossError(
                f"The loss became {float(loss)} in batch {batch + 1} of epoch "
                f"{self.epoch + 1}. Check inputs and sample weights for NaN and "
                "infinities, and the labels for numbers outside the classes, or lower the "
                "learning rate."
            )


class CheckedModel(ReplicatedSteps):
    """Base of the models whose `fit` and `evaluate` check their data.

    A subclass writes `_check_data`, for arrays on the host, and calls `check` in its
    steps, for all other data.

    Attributes:
        task: `"classification"`, with labels that are checked in the loss; or
            `"regression"`.
    """

    task: str = "classification"

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
        arguments = arguments_by_name(keras.Model.fit, args, kwargs)
        self._check_data(arguments.get("x"), arguments.get("y"))
        validation_data = arguments.get("validation_data")
        if isinstance(validation_data, (tuple, list)):
            self._check_data(*validation_data[:2])
        arguments["callbacks"] = StopAtNonFiniteLoss.added_to(
            arguments.get("callbacks"), self
        )
        return super().fit(**arguments)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_by_name(keras.Model.evaluate, args, kwargs)
        self._check_data(arguments.get("x"), arguments.get("y"))
        return super().evaluate(**arguments)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Tensor:
        """Returns the loss: NaN for labels that are no classes, where nothing raises."""
        if self.task == "regression":
            return super().compute_loss(x, y, y_pred, sample_weight, training=training)
        y_pred, added = _checked_labels(y_pred, y)
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        return loss + ops.cast(added, loss.dtype)


#: Whether a step of a model is under way, whose data `check` looks at.
_checking: contextvars.ContextVar[bool] = contextvars.ContextVar("checking", default=False)


@contextlib.contextmanager
def checking_data() -> Iterator[None]:
    """Lets `check` assert: what a step does, and an exported graph does not."""
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def is_checking() -> bool:
    """Whether `check` asserts here."""
    return _checking.get()


def check(tensor: Tensor, condition: Tensor, *message: Any) -> Tensor:
    """Returns `tensor`, which within `checking_data()` waits for a check of `condition`.

    Args:
        tensor: What depends on the check.
        condition: Boolean scalar.
        *message: Strings, numbers and tensors that the error shows one by one.

    Raises:
        tf.errors.InvalidArgumentError: If `condition` is false.
    """
    return assert_in_graph(tensor, condition, *message) if _checking.get() else tensor


def check_finite(tensor: Tensor, name: str) -> Tensor:
    """Returns a tensor that waits for a check that it holds no NaN and no infinity."""
    if not keras.backend.is_float_dtype(tensor.dtype):
        return tensor
    return check(tensor, ops.all(ops.isfinite(tensor)), f"`{name}` must be finite.")


def valid_labels(y: Tensor, num_classes: int, axes: int = 1) -> tuple[Tensor, str]:
    """Returns which labels are classes, or rows of probabilities, and what they must be.

    Args:
        y: Tensor of class numbers, with `axes` axes or one more of size 1; or with one
            more of size `num_classes`, or of unknown size, of probabilities.
        num_classes: Number of classes.
        axes: Number of axes before that of the classes.

    Returns:
        A boolean tensor of `axes` axes, and the demand as a sentence of an error.
    """
    if not keras.backend.is_float_dtype(y.dtype):
        y = ops.cast(y, "int32")  # Booleans have no order on TensorFlow.
    # Class numbers have one axis less, or a last axis of known size 1: losses demand it.
    if len(y.shape) == axes + 1 and y.shape[-1] in (num_classes, None) and num_classes > 1:
        sums = ops.sum(ops.cast(y, "float32"), axis=-1)
        near = ops.abs(sums - 1) <= validation.SUM_TOLERANCE
        return ops.all(y >= 0, axis=-1) & near, (
            "Each row of `y` must be a probability distribution over the "
            f"{num_classes} classes; multi-label targets are not supported."
        )
    valid = (y >= 0) & (y < num_classes)
    if keras.backend.is_float_dtype(y.dtype):
        valid &= ops.equal(y, ops.floor(y))  # A loss would take 0.5 for class 0.
    if len(y.shape) > axes:
        valid = ops.all(valid, axis=-1)
    return valid, f"`y` must hold classes 0 to {num_classes - 1}."


def _checked_labels(logits: Tensor, y: Any) -> tuple[Tensor, Tensor]:
    """Returns logits that wait for a check of the labels, and what to add to their loss.

    That is 0, or NaN for labels outside the classes: what a compiled step, in which no
    check can run, shows them by. Some losses would give them 0.

    Args:
        logits: Tensor of shape `(..., classes)`.
        y: Labels as of `valid_labels`, or `None`.
    """
    added = ops.zeros((), logits.dtype)
    if y is None or getattr(y.shape, "rank", 0) is None:  # Of a graph that saw several.
        return logits, added
    axes = len(logits.shape) - 1
    if len(y.shape) - axes not in (0, 1):  # Losses refuse it.
        return logits, added
    valid, demand = valid_labels(y, logits.shape[-1], axes)
    all_valid = ops.all(valid)
    return check(logits, all_valid, demand), ops.where(all_valid, added, float("nan"))


def finite_examples(inputs: Any) -> Tensor | None:
    """Returns which examples of a batch hold neither NaN nor an infinity.

    Args:
        inputs: Tensor whose first axis is the batch, or a structure of them.

    Returns:
        Boolean tensor of shape `(batch,)`; `None` if no input is a floating-point number.
    """
    finite = None
    for each in keras.tree.flatten(inputs):
        if not keras.backend.is_float_dtype(each.dtype):
            continue
        here = ops.all(ops.isfinite(each), axis=tuple(range(1, len(each.shape))))
        finite = here if finite is None else ops.logical_and(finite, here)
    return finite


def mark_non_finite(outputs: Any, finite: Tensor | None) -> Any:
    """Returns outputs with NaN, or -1 where they are signed integers, for bad examples.

    Compiled graphs lose NaNs, in a ReLU for example: an example with NaN inputs would get
    a class.

    Args:
        outputs: Tensor whose first axis is the batch, or a structure of them.
        finite: Which examples keep their outputs, from `finite_examples`.
    """
    if finite is None:
        return outputs

    def mark(output: Tensor) -> Tensor:
        dtype = keras.backend.standardize_dtype(output.dtype)
        if keras.backend.is_float_dtype(dtype):
            number = float("nan")
        elif dtype.startswith("int"):
            number = -1
        else:
            return output
        keep = ops.reshape(finite, (-1, *(1 for _ in output.shape[1:])))
        return ops.where(keep, output, ops.cast(number, dtype))

    return keras.tree.map_structure(mark, outputs)


def loss_of_logits(loss: Any) -> None:
    """Raises if a loss, its name, or one of several takes probabilities."""
    for each in keras.tree.flatten(loss):
        if _takes_probabilities(keras.losses.get(each)):
            raise ValueError(
                "`loss` must take logits: pass for example "
                "keras.losses.SparseCategoricalCrossentropy(from_logits=True). "
                f"Received: loss={loss!r}"
            )


def _takes_probabilities(loss: Any) -> bool:
    if isinstance(loss, keras.losses.KLDivergence) or loss is keras.losses.kl_divergence:
        return True
    if getattr(loss, "from_logits", None) is False:
        return True
    if isinstance(loss, keras.losses.Loss):
        return loss.get_config().get("from_logits") is False
    try:
        argument = inspect.signature(loss).parameters.get("from_logits")
    except (TypeError, ValueError):  # Of what has no signature nothing is known.
        return False
    return argument is not None and argument.default is False


def require_logits(model: keras.layers.Layer, argument: str) -> None:
    """Raises if a layer or model ends in a softmax or sigmoid.

    Args:
        model: A layer, or a model that is built.
        argument: What the message calls it.
    """
    last: Any = model
    if rewiring.is_graph(model):
        called = rewiring.calls(model)
        last = called[-1].layer if called else model
    elif isinstance(model, keras.Model) and model.layers:
        last = model.layers[-1]
    squashing = (keras.activations.softmax, keras.activations.sigmoid)
    if (
        isinstance(last, keras.layers.Softmax)
        or getattr(last, "activation", None) in squashing
        # The functions of `keras.ops` are operations without a public class.
        or type(last).__name__ in ("Softmax", "Sigmoid")
    ):
        raise ValueError(
            f"`{argument}` must return logits, without a softmax or sigmoid at its end. "
            f"Received: {argument}={model.name!r} ending in {last.name!r}"
        )


def arguments_by_name(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a bound call to `method` by name."""
    bound = inspect.signature(method).bind(None, *args, **kwargs)
    arguments = dict(bound.arguments)
    arguments.pop("self")
    return {**arguments.pop("kwargs", {}), **arguments}
