"""iFiLM: scales and shifts feature maps per example, from a small dictionary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras import graphs, nesting, validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.copying import copied
from nsl_keras.neighborhoods.key_metrics import Cosine
from nsl_keras.normalization import BatchNormalization, turn_batch_norm
from nsl_keras.turning import turned_into


@keras.saving.register_keras_serializable("nsl_keras")
class InstanceFiLM(keras.layers.Layer):
    """Instance-wise feature modulation: `y = (1 + w G) a + w B` per channel.

    The spatial mean `g` of an example's feature map is looked up in a small dictionary,

        w = softmax_j(sharpness * cos(g, k_j)),

    and the weights mix the scales `G` and shifts `B` of the entries. The layer starts as
    the identity. Place it after a batch norm.

    Args:
        dictionary_size: int, the number of entries.
        sharpness: float above 0, the initial inverse temperature.
        learn_sharpness: bool, whether to train this factor.
        residual: bool; if false, the layer is `y = (w G) a + w B`, and `G` starts at 1.
        axis: int, the channel axis: -1, or 1 for `data_format="channels_first"`.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        mask: Boolean tensor of shape `(batch, steps)`, for sequences with channels last:
            the mean omits masked steps. The mask is passed on.

    Input shape:
        `(batch, ..., channels)`, or `(batch, channels, ...)` with `axis=1`.

    Output shape:
        Same as the input.

    Raises:
        ValueError: If `dictionary_size` or `sharpness` is not above 0, or the number of
            channels is unknown at build.

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
        self.learn_sharpness = validation.boolean(learn_sharpness, "learn_sharpness")
        self.residual = validation.boolean(residual, "residual")
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
        inputs = ops.convert_to_tensor(inputs, self.compute_dtype, sparse=False)
        axes = range(1, len(inputs.shape))
        space = tuple(axis for axis in axes if axis != self.axis % len(inputs.shape))
        queries = at_least_float32(inputs)
        if space:
            queries = _mean(queries, space, mask if self.axis < 0 else None)
        weights = ops.softmax(self.learned_sharpness * Cosine()(queries, self.keys))
        # MN Eq. (4): iFiLM. The paper adds no 1 to the scales.
        scale = ops.matmul(weights, self.scales) + float(self.residual)
        both = scale, ops.matmul(weights, self.shifts)
        scale, shift = (ops.expand_dims(ops.cast(x, inputs.dtype), space) for x in both)
        return scale * inputs + shift

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "dictionary_size": self.dictionary_size,
            "sharpness": self.sharpness,
            "learn_sharpness": self.learn_sharpness,
            "residual": self.residual,
            "axis": self.axis,
        }


def _mean(inputs: Tensor, space: tuple[int, ...], mask: Tensor | None) -> Tensor:
    if mask is None:
        return ops.mean(inputs, axis=space)
    ones = [1] * (len(inputs.shape) - len(mask.shape))
    kept = ops.reshape(ops.cast(mask, inputs.dtype), (*ops.shape(mask), *ones))
    kept = ops.broadcast_to(kept, ops.shape(inputs))
    return ops.sum(kept * inputs, axis=space) / ops.maximum(ops.sum(kept, axis=space), 1)


@keras.saving.register_keras_serializable("nsl_keras")
class ModulatedBatchNormalization(nesting.KeepsFrozen, BatchNormalization):
    """Batch norm with an `InstanceFiLM`, its attribute `film`; see `convert.add_film`.

    Args:
        Same as `BatchNormalization`, plus:
        film_options: Dictionary of arguments of `InstanceFiLM` except `axis`, or `None`.

    Raises:
        ValueError: See both layers; at build, if `axis` is neither the last axis nor the
            one after the batch axis.

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.2.
    """

    def __init__(self, *args: Any, film_options: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.film_options = film_options

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.build_film(input_shape)

    def build_film(self, input_shape: tuple[int | None, ...]) -> None:
        axis = self.axis % len(input_shape)
        axis = -1 if axis == len(input_shape) - 1 else axis
        options = {"axis": axis, "dtype": self.dtype_policy, "name": "film"}
        self.film = InstanceFiLM(**{**(self.film_options or {}), **options})
        self.film.build(input_shape)

    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self.film(super().call(inputs, training=training, mask=mask), mask=mask)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "film_options": self.film_options}


def add_film(
    model: keras.Model,
    where: str | Callable[[keras.layers.Layer], Any] = "all",
    **kwargs: Any,
) -> keras.Model:
    """Returns a copy of a model with an `InstanceFiLM` after each batch norm.

    Batch norms become `ModulatedBatchNormalization`, also in nested models and
    `keras.layers.TimeDistributed`. The copy starts with the weights and exactly the outputs
    of `model`, and keeps its graph, names, flags and shared layers. It is not compiled.

    Args:
        model: A built functional or Sequential model, or a `MetaNeighborhoodModel` with
            such a backbone, which is converted.
        where: `"all"` batch norms, as in the paper; `"last"` for the last one of the graph;
            or a function from a batch norm to a bool. Batch norms inside predictors and
            subclassed models do not count.
        **kwargs: Arguments of `InstanceFiLM` except `axis`.

    Returns:
        A model of the class of `model`.

    Raises:
        ValueError: If `model` is subclassed or not built, `where` chooses no batch norms
            without iFiLM, or a batch norm's axis is neither axis 1 nor the last axis.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> plain = nsl_keras.backbones.convnet4((16, 16, 3))
    >>> model = nsl_keras.convert.add_film(plain, where="last")
    >>> images = keras.random.normal((2, 16, 16, 3), seed=0)
    >>> bool(keras.ops.all(model(images) == plain(images)))
    True
    >>> [layer.name for layer in model.layers if hasattr(layer, "film")]
    ['layer_3_normalization']

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.2.
    """
    if not callable(where):
        validation.one_of(where, ("all", "last"), "where")
    graphs.graph_of(model)  # Raises for a model without a graph.
    copy = copied(model)
    graph = graphs.graph_of(copy)
    kinds = (keras.layers.BatchNormalization, BatchNormalization)
    chosen: list[Any] = [each for each in graphs.layers(graph) if type(each) in kinds]
    if callable(where):
        chosen = [*filter(where, chosen)]
    elif where == "last":
        chosen = chosen[-1:]
    demand = f"a choice of one or more batch norms of {model.name!r}"
    validation.require(chosen, "where", demand, where)
    for layer in chosen:
        turn_batch_norm(layer)  # Ours has all that the modulated one needs.
        with turned_into(layer, ModulatedBatchNormalization) as input_shape:
            layer.film_options = kwargs
            layer.build_film(input_shape)
    # An iFiLM trains even if its batch norm, or the whole model, is frozen.
    nesting.unfreeze_containers(graph, chosen)
    return copy
