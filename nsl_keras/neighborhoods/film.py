"""iFiLM: scales and shifts feature maps per example, from a small dictionary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras import configs, nesting, rewiring, validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods.key_metrics import Cosine


@keras.saving.register_keras_serializable("nsl_keras")
class InstanceFiLM(keras.layers.Layer):
    """Instance-wise feature modulation: `y = (1 + w G) a + w B` per channel.

    The spatial mean `g` of an example's feature map is looked up in a small dictionary,

        w = softmax_j(sharpness * cos(g, k_j)),

    and the weights mix the scales `G` and shifts `B` of the entries. The layer starts as
    the identity. Place it after a batch norm.

    Args:
        dictionary_size: int, the number of entries.
        sharpness: float above 0, the initial value of the factor in front of the cosine:
            an inverse temperature.
        learn_sharpness: bool, whether to train this factor.
        residual: bool; if false, the layer is `y = (w G) a + w B`, and `G` starts at 1.
        axis: int, the channel axis: -1, or 1 for `data_format="channels_first"`.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Feature maps.
        mask: Boolean tensor of shape `(batch, steps)`, for sequences with channels last:
            the mean omits masked steps. The mask is passed on.

    Input shape:
        `(batch, ..., channels)`, or `(batch, channels, ...)` with `axis=1`, with any
        number of spatial axes.

    Output shape:
        Same as the input.

    Raises:
        ValueError: If `dictionary_size` or `sharpness` is not positive, or the number
            of channels is unknown at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.InstanceFiLM(10)
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 16))).shape)
    (2, 8, 8, 16)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.2, Eq. (4), which is
        `residual=False, learn_sharpness=False`. The defaults follow the authors' code.
    """

    def __init__(
        self,
        dictionary_size: int = 10,
        sharpness: float = 5.0,
        learn_sharpness: bool = True,
        residual: bool = True,
        axis: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dictionary_size = validation.positive_integer(
            dictionary_size, "dictionary_size"
        )
        self.sharpness = validation.positive_number(sharpness, "sharpness")
        self.learn_sharpness = learn_sharpness
        self.residual = residual
        self.axis = validation.one_of(axis, (-1, 1), "axis")
        # Made here, not in `build`, for the seed that is set when the layer is made.
        self._key_initializer = keras.initializers.RandomNormal()
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        channels = validation.known_axis(input_shape, self.axis, "channel axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={self.axis: channels})
        add = functools.partial(self.add_weight, autocast=False)
        shape = (self.dictionary_size, channels)
        self.keys = add(shape, self._key_initializer, name="keys")
        self.scales = add(shape, "zeros" if self.residual else "ones", name="scales")
        self.shifts = add(shape, "zeros", name="shifts")
        start = keras.initializers.Constant(self.sharpness)
        self.learned_sharpness = add(
            (), start, name="sharpness", trainable=self.learn_sharpness
        )

    def call(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        inputs = ops.convert_to_tensor(inputs, sparse=False)
        rank = len(inputs.shape)
        channel_axis = self.axis % rank
        space = tuple(axis for axis in range(1, rank) if axis != channel_axis)
        if not keras.backend.is_float_dtype(inputs.dtype):
            inputs = ops.cast(inputs, self.compute_dtype)
        queries = at_least_float32(inputs)
        if space:
            queries = _mean(queries, space, mask if self.axis < 0 else None)
        weights = ops.softmax(self.learned_sharpness * Cosine()(queries, self.keys))
        per_channel = [-1, *(1 for _ in inputs.shape[1:])]
        per_channel[channel_axis] = inputs.shape[channel_axis]
        # MN Eq. (4): iFiLM. The paper adds nothing to the scales.
        scale = ops.reshape(ops.matmul(weights, self.scales) + self.residual, per_channel)
        shift = ops.reshape(ops.matmul(weights, self.shifts), per_channel)
        scale, shift = ops.cast(scale, inputs.dtype), ops.cast(shift, inputs.dtype)
        return scale * inputs + shift

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **configs.arguments_of(self, InstanceFiLM)}


def _mean(inputs: Tensor, space: tuple[int, ...], mask: Tensor | None) -> Tensor:
    if mask is None:
        return ops.mean(inputs, axis=space)
    ones = [1] * (len(inputs.shape) - len(mask.shape))
    kept = ops.reshape(ops.cast(mask, inputs.dtype), (*ops.shape(mask), *ones))
    kept = ops.broadcast_to(kept, ops.shape(inputs))
    return ops.sum(kept * inputs, axis=space) / ops.maximum(ops.sum(kept, axis=space), 1)


@rewiring.reaching_backbones
def add_film(
    model: keras.Model,
    where: str | Callable[[keras.layers.Layer], Any] = "all",
    dictionary_size: int = 10,
) -> keras.Model:
    """Returns a copy of a model with an `InstanceFiLM` layer after each batch norm.

    The copy has the weights of `model` and, before training, exactly its outputs: every
    `InstanceFiLM` starts as the identity. This includes layers in nested models and
    `keras.layers.TimeDistributed`. Names, dtype policies, trainable flags and shared layers
    stay; a layer that is called several times gets one shared iFiLM. The copy is not
    compiled, and `model` does not change.

    Args:
        model: A built functional or Sequential model, or a `MetaNeighborhoodModel` with
            such a backbone, which is converted.
        where: `"all"` places iFiLM after every batch norm, as in the paper, and `"last"`
            only after the last batch norm of the graph. A function from a layer to a bool
            chooses the layers that iFiLM follows. Batch norms inside predictors and
            subclassed models do not count.
        dictionary_size: int, the number of entries of each iFiLM.

    Returns:
        A `keras.Model`, Sequential if `model` is. The iFiLM after layer `name` is named
        `{name}_film`.

    Raises:
        ValueError: If `model` is subclassed or not built, or contains iFiLM already; if
            `where` chooses no layers, or a layer with several outputs; or for a batch norm
            over an axis that is neither the first nor the last after the batch axis.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> plain = nsl_keras.backbones.convnet4((16, 16, 3))
    >>> model = nsl_keras.convert.add_film(plain, where="last")
    >>> images = keras.random.normal((2, 16, 16, 3), seed=0)
    >>> bool(keras.ops.all(model(images) == plain(images)))
    True
    >>> [layer.name for layer in model.layers if "film" in layer.name]
    ['layer_3_normalization_film']

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.2.
    """
    dictionary_size = validation.positive_integer(dictionary_size, "dictionary_size")
    calls = rewiring.calls(model)
    for layer in (call.layer for call in calls):
        if any(
            isinstance(each, InstanceFiLM) for each in (layer, *nesting.sublayers(layer))
        ):
            raise ValueError(
                "`model` must not contain iFiLM yet; choose all its places in one call. "
                f"Received: model {model.name!r}, with iFiLM in {layer.name!r}"
            )
    chosen = _chosen(model, calls, where)
    axes = {id(call.layer): _channel_axis(call, calls) for call in chosen}
    names = {call.layer.name for call in calls}

    def replace(layer: keras.layers.Layer) -> list[keras.layers.Layer] | None:
        if id(layer) not in axes:
            return None
        film = InstanceFiLM(
            dictionary_size,
            axis=axes[id(layer)],
            dtype=layer.dtype_policy,
            name=rewiring.unused_name(f"{layer.name}_film", names),
        )
        return [layer, film]

    return rewiring.rebuild(model, replace)


def _chosen(
    model: keras.Model, calls: list[rewiring.Call], where: Any
) -> list[rewiring.Call]:
    """Returns the calls of the layers that an iFiLM follows."""
    if not callable(where):
        validation.one_of(where, ("all", "last"), "where")
    chooses = where if callable(where) else _is_norm
    chosen = [
        call
        for call in calls
        if isinstance(call.layer, keras.layers.Layer) and chooses(call.layer)
    ]
    if where == "last":
        chosen = chosen[-1:]
    if not chosen:
        raise ValueError(
            '`where` must choose layers: "all" or "last" of the batch norms, or a function '
            f"of a layer. Received: where={where!r}, which chooses none of {model.name!r}"
        )
    for call in chosen:
        if len(call.output_shapes) != 1 or len(call.output_shapes[0]) < 2:
            raise ValueError(
                "`where` must choose layers with one output of at least two axes. "
                f"Received: {call.layer.name!r} with outputs of shapes "
                f"{list(call.output_shapes)}"
            )
    return chosen


def _is_norm(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization)


def _channel_axis(call: rewiring.Call, calls: list[rewiring.Call]) -> int:
    """Returns the channel axis of a call's outputs, 1 or -1.

    A layer that names none, such as an activation, takes the axis of layers of its rank.
    """
    rank, own = len(call.output_shapes[0]), _stated_axis(call)
    alike = [each for each in calls if len(each.output_shapes[0]) == rank]
    stated = map(_stated_axis, [call] if own else alike)
    found = {axis for axis in stated if axis is not None}
    if len(found) > 1:
        raise ValueError(
            "`where` must choose layers whose channel axis is known: batch norms, layers "
            "with a `data_format`, or any in a model of one data format. "
            f"Received: {call.layer.name!r} in a model of both"
        )
    return found.pop() if found else -1


def _stated_axis(call: rewiring.Call) -> int | None:
    """Returns the channel axis that a layer itself names, 1 or -1, or `None`."""
    layer, rank = call.layer, len(call.output_shapes[0])
    if not _is_norm(layer):
        axes = {"channels_first": 1, "channels_last": -1}
        return axes.get(getattr(layer, "data_format", "")) if rank > 2 else None
    axis = layer.axis % rank
    if axis not in (1, rank - 1):
        raise ValueError(
            "Batch norms must be over the last axis or the one after the batch axis. "
            f"Received: {layer.name!r} with axis={layer.axis} for {rank} axes"
        )
    return -1 if axis == rank - 1 else 1
