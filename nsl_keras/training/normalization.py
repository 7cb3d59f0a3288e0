"""Batch norms whose moving statistics are unbiased, and that normalize by batch on request.

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

from nsl_keras import validation
from nsl_keras.backend import (
    Tensor,
    at_least_float32,
    fused_batch_normalization,
    on_all_replicas,
)
from nsl_keras.inheritance import StandsOnKeras

#: Over how many examples the moving statistics are at least, once there are as many.
SHORTEST_WINDOW = 32.0

#: Which part of the examples so far they are over, where that is more.
PART_OF_EXAMPLES = 1 / 512

#: A number of examples after which every momentum has its own window.
SETTLED = 1e12


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


@keras.saving.register_keras_serializable("nsl_keras")
class BatchNormalization(StandsOnKeras, keras.layers.BatchNormalization):
    """Batch norm whose moving statistics are unbiased from the first training step on.

    Keras's moving statistics start at mean 0 and variance 1, and hold `momentum^t` of that
    after `t` steps: with the momentum 0.99 a third after 100 steps, and inference is far
    below training for as long. Then they lag: weights move fast in the first hundreds of
    steps, and an average over a hundred steps is one of other weights. Here the statistics
    `s_t` of a batch of `n_t` examples, after `N` examples before it, count by

        moving_t = (1 - r_t) moving_{t-1} + r_t s_t,
        r_t = max(1 - momentum, n_t / (n_t + max(N / 512, min(N, 32))))

    The first step replaces the start values whole. Then the average is over the last batch
    and a window of about 32 examples before it, or a 512th of all before it, where that is
    more; a batch of a few examples counts little, and so does one with little outside its
    mask. After some `512 / (1 - momentum)` steps
    the average is Keras's. Outputs in training are those of
    `keras.layers.BatchNormalization` from the start.
    `nsl_keras.convert.fold` makes a plain `keras.layers.BatchNormalization` of it.

    Args:
        Those of `keras.layers.BatchNormalization`, and:
        momentum_warmup: bool; `False` for Keras's moving statistics.

    Call arguments:
        Those of `keras.layers.BatchNormalization`.

    Input shape:
        Any, with a known size of `axis`.

    Output shape:
        That of the input.

    Raises:
        ValueError: If `momentum` is not in [0, 1), or for `renorm=True`, at construction.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.BatchNormalization()
    >>> _ = layer(10 + keras.random.normal((256, 3), seed=0), training=True)
    >>> bool(keras.ops.all(layer.moving_mean > 9))
    True

    Reference:
        Shamir and Zhang, Stochastic Gradient Descent for Non-smooth Optimization (ICML
        2013), Section 4: polynomial-decay averaging, here with `eta = 511` and a least
        window. Neither of the two papers that this package implements speaks of it; their
        authors' code has fixed momenta. Why 32 and 512:
        `python -m benchmarks.moving_statistics` and docs/results.md.
    """

    def __init__(self, *args: Any, momentum_warmup: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        validation.fraction(self.momentum, "momentum")
        validation.non_negative_number(self.epsilon, "epsilon")
        self.momentum_warmup = validation.boolean(momentum_warmup, "momentum_warmup")
        if getattr(self, "renorm", False):
            raise ValueError(
                "`renorm` must be False: take `keras.layers.BatchNormalization` for batch "
                "renormalization. Received: renorm=True"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        if self.momentum_warmup:
            #: How many examples were trained on. Float: it saturates, an int overflows.
            self.seen_examples = self.add_weight(
                name="seen_examples",
                shape=(),
                dtype="float32",
                initializer="zeros",
                trainable=False,
                autocast=False,
            )

    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        request = _request.get()
        if request is not None and self.trainable:
            return _normalized(request, self, super().call, inputs, mask)
        if not (training and self.trainable and self.momentum_warmup):
            return super().call(inputs, training=training, mask=mask)
        statistics = (self.moving_mean, self.moving_variance)
        # Keras goes a part `1 - momentum` of the way to the batch's statistics: from zero,
        # where that tells them exactly. From 1 a small variance would be rounded away.
        state = [(each, ops.convert_to_tensor(each)) for each in self.variables]
        zeros = [ops.zeros_like(ops.convert_to_tensor(each)) for each in statistics]
        state += zip(statistics, zeros, strict=True)
        with keras.StatelessScope(state, initialize_variables=False) as scope:
            outputs = super().call(inputs, training=True, mask=mask)
        of_batch = [scope.get_current_value(each) for each in statistics]
        mean, variance = (each / (1 - self.momentum) for each in of_batch)
        examples: Any = ops.shape(inputs)[0]
        if mask is not None:
            # Padding tells nothing: an example counts by its steps that are none.
            share = ops.cast(mask, "float32")
            if len(share.shape) > 1:
                share = ops.mean(share, axis=tuple(range(1, len(share.shape))))
            examples = ops.sum(share)
        move_statistics(self, mean, variance, examples)
        return outputs

    def load_own_variables(self, store: Any) -> None:
        """Loads the weights; statistics of Keras's layer count as settled."""
        if self.momentum_warmup and len(store.keys()) == len(self.weights) - 1:
            kept = list(store.keys())
            store = {**{key: store[key] for key in kept}, str(len(kept)): SETTLED}
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "momentum_warmup": self.momentum_warmup}

    def fold(self) -> keras.layers.BatchNormalization:
        """Returns a `keras.layers.BatchNormalization` that computes the same.

        This layer stays as it is, and the two share no weights.

        Raises:
            ValueError: If the layer is not built yet.
        """
        validation.built(self, "fold")
        config = self.get_config()
        del config["momentum_warmup"]
        plain = keras.layers.BatchNormalization.from_config(config)
        plain.build(self.get_build_config()["input_shape"])
        # Copies: on JAX the two would share buffers, which a training step donates.
        plain.set_weights(self.get_weights()[: len(plain.weights)])
        return plain


def move_statistics(
    layer: keras.layers.BatchNormalization, mean: Tensor, variance: Tensor, examples: Any
) -> None:
    """Moves a layer's moving statistics towards those of a batch, as training does.

    Args:
        layer: A built batch norm.
        mean: Mean of the batch.
        variance: Its variance.
        examples: How many examples they are of, on this replica.
    """
    rate: Any = 1 - layer.momentum
    told: Any = True
    if _warms_up(layer):
        count = on_all_replicas(examples)
        seen = ops.convert_to_tensor(layer.seen_examples)
        window = ops.maximum(PART_OF_EXAMPLES * seen, ops.minimum(seen, SHORTEST_WINDOW))
        told = count > 0  # No example at all moves nothing, and divides by nothing.
        rate = ops.maximum(rate, count / ops.where(told, count + window, 1.0))
        layer.seen_examples.assign(seen + count)
    for stored, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        old = ops.convert_to_tensor(stored)
        weight = ops.cast(rate, old.dtype)
        moved = (1 - weight) * old + weight * ops.cast(new, old.dtype)
        stored.assign(ops.where(told, moved, old))


def telling_statistics(
    layer: keras.layers.BatchNormalization,
) -> tuple[list[tuple[Any, Tensor]], float]:
    """Returns a state in which a training step tells the statistics of its batch.

    Args:
        layer: A built batch norm.

    Returns:
        `(state, share)`: pairs for a `keras.StatelessScope`, and what the layer's moving
        statistics are after the step, as a share of the batch's.
    """
    variables, share = [layer.moving_mean, layer.moving_variance], 1 - layer.momentum
    if _warms_up(layer):
        variables, share = [*variables, layer.seen_examples], 1.0
    values = [ops.zeros_like(ops.convert_to_tensor(each)) for each in variables]
    return list(zip(variables, values, strict=True)), share


def _warms_up(layer: keras.layers.BatchNormalization) -> bool:
    return isinstance(layer, BatchNormalization) and layer.momentum_warmup


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
