"""Batch norms without initialization bias, which can normalize by batch in inference too.

`convert_batch_norms` converts Keras's layers. Learners of `few_shot` normalize by episode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import graphs, validation
from nsl_keras.backend import Tensor, at_least_float32, replicas_in_sync, wide_dtype
from nsl_keras.copying import copied
from nsl_keras.turning import Foldable

#: Minimum averaging window, in examples.
SHORTEST_WINDOW = 32.0

#: Averaging window as a fraction of all examples so far, if that is larger.
PART_OF_EXAMPLES = 1 / 512


@contextlib.contextmanager
def normalizing_by_batch(layers: Sequence[BatchNormalization]) -> Iterator[None]:
    """Makes batch norms normalize by their batch in the context, in inference too.

    Each assigns the mean and variance of its batch to its moving statistics. Enter a
    `keras.StatelessScope` around it: the layers do not change then, and gradients run
    through the scope's values of these variables.
    """
    for layer in layers:
        layer.batches_left = 1
    try:
        yield
    finally:
        for layer in layers:
            layer.batches_left = None


@keras.saving.register_keras_serializable("nsl_keras")
class BatchNormalization(Foldable, keras.layers.BatchNormalization):
    """Batch norm whose moving statistics have no initialization bias.

    Keras's moving statistics start at mean 0 and variance 1, of which a share `momentum^t`
    remains after `t` steps. Until it fades, inference can be less accurate than training.
    This layer averages statistics `s_t` of `n_t` examples, after `N` earlier examples, by

        moving_t = (1 - r_t) moving_{t-1} + r_t s_t,
        r_t = max(1 - momentum, n_t / (n_t + max(N / 512, min(N, 32))))

    The first step replaces the start. From then on the average covers the last batch and
    about 32 examples before it, or a 512th of all examples if that is more; after about
    `512 / (1 - momentum)` steps it equals Keras's. An example counts by its fraction of
    unmasked steps. In training the outputs equal those of Keras's layer, into which
    `nsl_keras.convert.fold` converts this one. Few-shot learners that normalize by episode
    need this layer.

    Args:
        Same as `keras.layers.BatchNormalization`, plus:
        momentum_warmup: bool; `False` uses Keras's moving statistics.

    Input shape:
        Any, with a known size of `axis`.

    Output shape:
        Same as the input.

    Raises:
        ValueError: If `momentum` is not in [0, 1), or for `renorm=True`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.BatchNormalization()
    >>> _ = layer(10 + keras.random.normal((256, 3), seed=0), training=True)
    >>> bool(keras.ops.all(layer.moving_mean > 9))
    True

    Reference:
        Polynomial-decay averaging: Shamir and Zhang, Stochastic Gradient Descent for
        Non-smooth Optimization (ICML 2013), Section 4.
    """

    plain = keras.layers.BatchNormalization
    own_attributes = ("momentum_warmup", "seen_examples")
    #: How many batches the layer may normalize by; `None` outside `normalizing_by_batch`.
    batches_left: int | None = None

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        *,
        momentum_warmup: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(axis, momentum, epsilon, **kwargs)
        validation.fraction(self.momentum, "momentum")
        validation.non_negative_number(self.epsilon, "epsilon")
        self.momentum_warmup = validation.boolean(momentum_warmup, "momentum_warmup")
        _require_no_renorm(self)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        if self.momentum_warmup:
            #: The number of examples trained on. A float saturates, an int would overflow.
            options: dict[str, Any] = {"trainable": False, "autocast": False}
            self.seen_examples = self.add_weight(
                (), "zeros", "float32", name="seen_examples", **options
            )

    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self.batches_left is not None:
            self._measure(inputs, mask)
            return super().call(inputs, training=False)
        if not (training and self.trainable and self.momentum_warmup):
            return super().call(inputs, training=training, mask=mask)
        # Keras moves the statistics by `1 - momentum` toward those of the batch. From
        # zero, a division gives them back; from 1 a small variance would be rounded away.
        state = [(each, ops.convert_to_tensor(each)) for each in self.variables]
        moving = (self.moving_mean, self.moving_variance)
        state += [(each, ops.zeros_like(ops.convert_to_tensor(each))) for each in moving]
        with keras.StatelessScope(state, initialize_variables=False) as scope:
            outputs = super().call(inputs, training=True, mask=mask)
        mean, variance = (
            scope.get_current_value(each) / (1 - self.momentum) for each in moving
        )
        examples: Any = ops.shape(inputs)[0]
        if mask is not None:
            steps = ops.cast(mask, "float32")
            examples = ops.sum(ops.mean(steps, axis=tuple(range(1, len(steps.shape)))))
        move_statistics(self, mean, variance, examples)
        return outputs

    def _measure(self, inputs: Tensor, mask: Any) -> None:
        demand = "called once in a model, without a mask, to normalize by episode"
        received = "several calls" if mask is None else mask
        validation.require(self.batches_left and mask is None, self.name, demand, received)
        self.batches_left = 0
        inputs = at_least_float32(inputs)
        # Written out: `tf.nn.moments` counts the mean as a constant in the variance, which
        # is right for gradients, and wrong for gradients of gradients.
        rank = len(inputs.shape)
        axes = [each for each in range(rank) if each != self.axis % rank]
        centers = ops.mean(inputs, axes, keepdims=True)
        self.moving_mean.assign(ops.squeeze(centers, axes))
        self.moving_variance.assign(ops.mean(ops.square(inputs - centers), axes))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "momentum_warmup": self.momentum_warmup}


def convert_batch_norms(model: keras.Model) -> keras.Model:
    """Returns a copy of a model with this package's batch norms in place of Keras's.

    The copy computes and trains like the model, and shares no weights with it. Few-shot
    learners with `batch_normalization="support"` or `"transductive"` need it.

    Args:
        model: A built functional or Sequential model. It is not changed.

    Raises:
        ValueError: If the model is subclassed or not built, a layer cannot be made from
            its config, or a batch norm renormalizes.

    Example:

    >>> import keras
    >>> from nsl_keras import convert
    >>> network = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization()])
    >>> type(convert.convert_batch_norms(network).layers[0]).__module__
    'nsl_keras.normalization'
    """
    graphs.graph_of(model)
    copy = copied(model)
    for layer in graphs.layers(graphs.graph_of(copy)):
        turn_batch_norm(layer)
    return copy


def turn_batch_norm(layer: Any) -> None:
    """Turns a built batch norm of Keras into this package's, with Keras's statistics."""
    if type(layer) is keras.layers.BatchNormalization:
        _require_no_renorm(layer)
        layer.__class__ = BatchNormalization
        layer.momentum_warmup = False


def _require_no_renorm(layer: Any) -> None:
    renorm = getattr(layer, "renorm", False)
    demand = "False: use `keras.layers.BatchNormalization` for batch renormalization"
    validation.require(not renorm, "renorm", demand, renorm)


def move_statistics(
    layer: BatchNormalization, mean: Tensor, variance: Tensor, examples: Any
) -> None:
    """Moves a layer's moving statistics toward those of a batch, as training does."""
    dtype = wide_dtype(layer.moving_mean.dtype)
    # Not `ops.cast`, which rounds a Python number to float32 first.
    rate = ops.convert_to_tensor(1 - layer.momentum, dtype)
    some: Any = True
    if layer.momentum_warmup:
        count = ops.cast(examples, "float32") * replicas_in_sync()
        seen = ops.convert_to_tensor(layer.seen_examples)
        window = ops.maximum(PART_OF_EXAMPLES * seen, ops.minimum(seen, SHORTEST_WINDOW))
        some = count > 0
        total = ops.cast(ops.where(some, count + window, 1.0), dtype)
        # No initialization bias: the rate of the first examples is 1.
        rate = ops.maximum(rate, ops.cast(count, dtype) / total)
        layer.seen_examples.assign(seen + count)
    for stored, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        old = ops.convert_to_tensor(stored)
        share = ops.cast(rate, old.dtype)
        moved = (1 - share) * old + share * ops.cast(new, old.dtype)
        stored.assign(ops.where(some, moved, old))
