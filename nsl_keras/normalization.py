"""Batch norms that normalize by the statistics of the batch at hand, where asked to.

Few-shot learners run a network in inference mode, but for its batch norms, which normalize
by the images of an episode. `normalizing_by_batch` asks for that, for a while.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor, at_least_float32, fused_batch_normalization


@dataclasses.dataclass(frozen=True)
class _Request:
    """What `normalizing_by_batch` asks for, and which layers were called since."""

    second_order: bool
    once: bool
    called: set[int] = dataclasses.field(default_factory=set)


_request: contextvars.ContextVar[_Request | None] = contextvars.ContextVar(
    "normalizing_by_batch", default=None
)


@contextlib.contextmanager
def normalizing_by_batch(second_order: bool = True, once: bool = False) -> Iterator[None]:
    """Lets trainable batch norms normalize by the statistics of the batch they get.

    The statistics take the place of the moving ones, whole: enter it within a
    `keras.StatelessScope`, where they are found, and which stores nothing. It reaches
    the `BatchNormalization` of this module, wherever it is called, and those of Keras
    for which a `NormalizationByBatch` stands.

    Args:
        second_order: bool, whether gradients of gradients may be taken. Without, one
            fused operation computes what it can.
        once: bool, whether a layer that is called a second time raises: the moving
            statistics hold those of one call.
    """
    token = _request.set(_Request(second_order, once))
    try:
        yield
    finally:
        _request.reset(token)


class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` that heeds `normalizing_by_batch`."""

    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        request = _request.get()
        if request is None or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        return _normalized(request, self, super().call, inputs, mask)


class NormalizationByBatch(keras.layers.Layer):
    """Stands for a batch norm of Keras, with its variables, and heeds the request.

    Args:
        normalization: A built `keras.layers.BatchNormalization`.
    """

    def __init__(self, normalization: keras.layers.BatchNormalization) -> None:
        super().__init__(name=normalization.name, dtype=normalization.dtype_policy)
        self.normalization = normalization
        self.supports_masking = True

    def call(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        request = _request.get()
        if request is None or not self.normalization.trainable:
            return self.normalization(inputs, training=False, mask=mask)
        return _normalized(request, self.normalization, self.normalization, inputs, mask)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return input_shape


def _normalized(
    request: _Request,
    layer: keras.layers.BatchNormalization,
    infer: Callable[..., Tensor],
    inputs: Tensor,
    mask: Any,
) -> Tensor:
    """Returns what a batch norm makes of a batch by the batch's own statistics.

    On TensorFlow the training mode of Keras counts the mean as a constant in the variance
    (`tf.nn.moments`): right for gradients, wrong for the gradients of gradients.

    Args:
        request: What was asked for.
        layer: The batch norm.
        infer: What applies it in inference mode.
        inputs: Its inputs.
        mask: Their mask, which must be `None`.
    """
    if request.once and id(layer) in request.called:
        raise ValueError(called_twice(layer))
    request.called.add(id(layer))
    if mask is not None:
        raise ValueError(
            "Batch norms of `model` must not have masked inputs. "
            f"Received: layer {layer.name!r} with mask={mask!r}"
        )
    values = at_least_float32(inputs)
    rank = len(values.shape)
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]
    float32 = keras.backend.standardize_dtype(inputs.dtype) == "float32"
    if not request.second_order and float32 and axes == [0, 1, 2]:
        channels = (values.shape[-1],)
        outputs, mean, variance = fused_batch_normalization(
            values,
            ops.convert_to_tensor(layer.gamma) if layer.scale else ops.ones(channels),
            ops.convert_to_tensor(layer.beta) if layer.center else ops.zeros(channels),
            layer.epsilon,
        )
        layer.moving_mean.assign(mean)
        layer.moving_variance.assign(variance)
        return outputs
    mean = ops.mean(values, axes, keepdims=True)
    layer.moving_mean.assign(ops.reshape(mean, (-1,)))
    layer.moving_variance.assign(ops.mean(ops.square(values - mean), axes))
    return infer(inputs, training=False)


def called_twice(layer: keras.layers.Layer) -> str:
    """Returns the error for a batch norm with more than one set of statistics."""
    return (
        '`batch_normalization` "support" needs one set of statistics for each batch norm '
        "of `model`, called once. Received: layer "
        f"{layer.name!r}, which is called more often"
    )
