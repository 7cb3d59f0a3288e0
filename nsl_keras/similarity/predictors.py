"""Recipes for the small networks that predict the `M` of a dynamic layer from its input.

A recipe is data. A layer asks it for a `keras.Sequential` that fits its `LayerContext`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np

from nsl_keras import configs, validation
from nsl_keras.normalization import BatchNormalization
from nsl_keras.similarity import sphere

#: The minimum hidden width that is derived from the layer's width.
LEAST_WIDTH = 8

Layers: TypeAlias = list[keras.layers.Layer]


class FloatDense(keras.layers.Dense):
    """A dense layer inside another layer; `Model.quantize` skips both.

    Otherwise a quantized model could not be reloaded, because the enclosing layer makes
    this one anew with its own dtype.
    """

    quantize = keras.layers.Layer.quantize


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What a predictor network must know about its layer.

    Attributes:
        input_shape: Shape of the layer's input, or of the vectors that `M` multiplies.
        identity_parameters: The parameters of the identity `M`.
        width: Number of outputs of the plain layer at a position.
        is_diagonal: Whether `M` is diagonal.
        geometry: `kernel_size`, `strides`, `padding`, `dilation_rate` and `data_format` of
            a convolution; `None` for layers of vectors.
        kernel_regularizer: Regularizer of the layer's kernel.
        dtype: The layer's dtype policy.
        is_depthwise: Whether the layer convolves each channel by itself.
    """

    input_shape: tuple[Any, ...]
    identity_parameters: np.ndarray
    width: int
    is_diagonal: bool
    geometry: Any
    kernel_regularizer: Any
    dtype: Any
    is_depthwise: bool

    @property
    def outputs(self) -> int:
        """The number of parameters of `M`."""
        return self.identity_parameters.size

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return 0 if self.geometry is None else len(self.geometry["kernel_size"])

    @property
    def in_blocks(self) -> bool:
        """Whether blocks of positions can share a prediction."""
        return self.rank > 0 and max(self.geometry["dilation_rate"]) == 1

    @property
    def channel_axis(self) -> int:
        """The axis of the channels, in the input and in the prediction."""
        first = self.rank and self.geometry["data_format"] == "channels_first"
        return 1 if first else -1

    def layer(
        self,
        name: str,
        width: int,
        geometry: dict[str, Any],
        normalize: str | None = None,
        **options: Any,
    ) -> keras.layers.Layer:
        """Returns a convolution or dense layer; `normalize` makes it compare by angle."""
        kind = f"Conv{self.rank}D" if self.rank else "Dense"
        make: Any = FloatDense if kind == "Dense" else getattr(keras.layers, kind)
        if normalize is not None:
            make = partial(getattr(sphere, f"Sphere{kind}"), normalize=normalize)
        return make(
            width,
            **geometry,
            **{"use_bias": False, "kernel_regularizer": self.kernel_regularizer, **options},
            dtype=self.dtype,
            name=name,
        )

    def sequential(self, layers: Layers, name: str) -> keras.Sequential:
        """Returns a network on the layer's input, of any sizes, built."""
        network = keras.Sequential(layers, name=name)
        network.dtype_policy = self.dtype  # Else it would cast to the global policy.
        network.supports_masking = True  # Its layers do; else Keras warns of a mask.
        shape: list[Any] = [None] * len(self.input_shape)
        shape[self.channel_axis] = self.input_shape[self.channel_axis]
        network.build(tuple(shape))
        return network


#: For each kind: `normalize` of the hidden and of the output layer, and whether a batch
#: norm follows each of them if `M` is not diagonal. If `M` is diagonal, one always does.
KINDS: dict[str, tuple[str | None, str | None, bool, bool]] = {
    "sphere": ("input", None, False, False),
    "full_sphere": ("both", "both", True, True),
    "cnn": (None, None, False, True),
}


@keras.saving.register_keras_serializable("nsl_keras")
@dataclasses.dataclass(frozen=True, eq=False)
class SimilarityPredictor:
    """Recipe for the network that predicts the `M` of a dynamic layer.

    The network consists of two convolutions or, for vectors, of two dense layers. From the
    layer's input `x` it predicts, for every output position or block of positions, how the
    parameters of `M(x)` differ from the identity's. If `M` is diagonal, `kind` chooses:

        "sphere":       SphereConv(H, input norm) -> BN -> ReLU -> Conv(T) -> BN
        "full_sphere":  SphereConv(H) -> BN -> ReLU -> SphereConv(T) -> BN
        "cnn":          Conv(H) -> BN -> ReLU -> Conv(T) -> BN

    Other similarities use no batch norms, except one after the output of `"cnn"` and two in
    `"full_sphere"`. Only `"full_sphere"` with `batch_normalization=False` and
    `start="published"` keeps its predictions within [-1, 1], as in Section 3.3.1 of the
    paper.

    The first layer has the convolution's kernel size, strides, padding and dilation; the
    second has stride 1 and `"same"` (in causal layers `"causal"`). In depthwise layers a
    1x1 bottleneck of 8 filters comes first, and the second layer has the convolution's
    geometry, except with `start="published"` or `output_kernel_size`.

    A recipe has no weights: each layer that you pass it to makes its own network,
    `layer.bilinear_form.network`, whose kernels have the regularizer of the layer's kernel.

    Args:
        kind: `"sphere"`, `"full_sphere"`, `"cnn"`, or a function of the recipe and the
            `LayerContext` that returns a list of layers. The recipe's methods `hidden` and
            `output` make the layers above; anything may stand between them. If the function
            makes another recipe, give that recipe
            `downsampling=recipe.block_side(context)`. Register the function with
            `keras.saving.register_keras_serializable` to save models.
        width: int or `None`, the width of the hidden layer. `None` is half the layer's
            width, at least 8 and at most the authors' 64 (diagonal) or 128 (all others);
            with `start="published"` it is the authors' width.
        output_kernel_size: int, tuple, or `None` for the kernel size of the convolution.
        downsampling: int or `None`, the side of the blocks of positions that share one
            prediction; it multiplies the network's strides. Must be 1 for vectors and,
            unless the predictor is shared, in dilated convolutions. `None` is 1 in these
            cases, for a diagonal `M`, a function as `kind` and `start="published"`;
            otherwise it is 2.
        pooled: bool, whether to predict one `M` per example, the mean of all predictions.
        batch_normalization: `None` for the batch norms above (none in recurrent cells and
            shared predictors, which do not fit one set of moving statistics); `True` for
            both, `False` for none; or a dictionary of arguments of
            `nsl_keras.layers.BatchNormalization` for the default batch norms; `start` sets
            gamma and beta of the last one. The default momentum is 0.9, because weights
            that change fast need young averages.
        residual: bool. With `True`, as in the authors' code, the network returns the
            difference from the identity's parameters. With `False`, as in Appendix A of the
            paper, it returns the parameters themselves, which start at the identity, or
            with `start="published"` near zero.
        start: With `"identity"`, the layer equals the plain layer until the first training
            step, because the scale of the last batch norm or, without one, the last kernel
            starts at zero; `"full_sphere"` then needs batch norms. With `"published"`, as
            in the authors' code, that scale starts at one and the last kernel at He's
            normal times 0.001, so `M` starts near the identity; batch norms have the fixed
            momentum 0.999, so their moving statistics need thousands of steps.

    Raises:
        ValueError: For arguments outside these ranges; when a layer is built, for `pooled`
            or `output_kernel_size` without positions, `downsampling` without positions or
            with dilation, or `pooled` in a causal convolution.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> narrow = nsl_keras.predictors.SimilarityPredictor(width=8)
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(16, 3, predictor=narrow)
    >>> tuple(layer(keras.ops.ones((2, 9, 9, 4))).shape)
    (2, 7, 7, 16)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and Appendix A.
        Batch norms and the plain second convolution of `"sphere"` follow the authors' code;
        predictors of vectors are an addition.
    """

    kind: str | Callable[[SimilarityPredictor, LayerContext], Layers] = "sphere"
    width: int | None = None
    output_kernel_size: Any = None
    downsampling: int | None = None
    pooled: bool = False
    batch_normalization: bool | dict[str, Any] | None = None
    residual: bool = True
    start: str = "identity"

    def __post_init__(self) -> None:
        if not callable(self.kind):
            validation.one_of(self.kind, KINDS, "kind")
        validation.optional(validation.positive_integer, self.width, "width")
        validation.optional(validation.positive_integer, self.downsampling, "downsampling")
        if isinstance(self.output_kernel_size, int):
            validation.positive_integer(self.output_kernel_size, "output_kernel_size")
        validation.one_of(self.start, ("identity", "published"), "start")
        for name in ("pooled", "residual"):
            validation.boolean(getattr(self, name), name)
        norms = self.batch_normalization
        fits = norms is None or isinstance(norms, (bool, dict))
        demand = "True, False, None, or a dictionary of arguments"
        validation.require(fits, "batch_normalization", demand, norms)

    def make_network(self, context: LayerContext) -> keras.Sequential:
        """Returns a new network for a layer, built."""
        fits = context.rank or not (self.pooled or self.output_kernel_size)
        demand = "without `pooled` and `output_kernel_size`, except in convolutions"
        validation.require(fits, "predictor", demand, self)
        fits = self.block_side(context) == 1 or context.in_blocks
        demand = "without `downsampling`, except in convolutions without dilation"
        validation.require(fits, "predictor", demand, self)
        if isinstance(self.kind, str):
            first, second, *norms = KINDS[self.kind]
            after_first, after_second = (context.is_diagonal or norm for norm in norms)
            layers = [
                *self.hidden(context, first, after_first),
                keras.layers.ReLU(dtype=context.dtype, name="relu"),
                *self.output(context, second, after_second),
            ]
        else:
            layers = self.kind(self, context)
        if self.pooled:
            fits = context.geometry["padding"] != "causal"
            demand = "not pooled in a causal layer, which must not look ahead"
            validation.require(fits, "predictor", demand, self)
            pooling = getattr(keras.layers, f"GlobalAveragePooling{context.rank}D")
            options = {"dtype": context.dtype, "name": "pooling"}
            layers.append(pooling(context.geometry["data_format"], **options))
        return context.sequential(layers, "predictor")

    def hidden(
        self,
        context: LayerContext,
        normalize: str | None = None,
        batch_normalized: bool = False,
    ) -> Layers:
        """Returns a layer from the input to the hidden width, and its batch norm if any.

        Args:
            context: The layer whose `M` is predicted.
            normalize: As in `SphereConv2D`; `None` makes a plain layer.
            batch_normalized: bool, whether a batch norm follows unless the recipe's
                `batch_normalization` decides.
        """
        width, (geometry, _) = self.hidden_width(context), self._geometries(context)
        start = {"kernel_initializer": small_normal(0.1)}
        return [
            context.layer("hidden", width, geometry, normalize, **start),
            *self._batch_norms(context, "hidden", batch_normalized),
        ]

    def hidden_width(self, context: LayerContext) -> int:
        """Returns the width of the hidden layer: `width`, or the default for the layer."""
        authors = 64 if context.is_diagonal else 128
        half = min(max(context.width // 2, LEAST_WIDTH), authors)
        own = LEAST_WIDTH if self._has_bottleneck(context) else half
        return self.width or (authors if self.start == "published" else own)

    def block_side(self, context: LayerContext) -> int:
        """Returns the side of a block: `downsampling`, or the default for the layer."""
        alone = context.is_diagonal or not context.in_blocks
        own = 1 if alone or callable(self.kind) or self.start == "published" else 2
        return self.downsampling or own

    def output(
        self,
        context: LayerContext,
        normalize: str | None = None,
        batch_normalized: bool = False,
    ) -> Layers:
        """Returns a layer to the parameters of `M`, and its batch norm; see `hidden`."""
        _, geometry = self._geometries(context)
        published = self.start == "published"
        # Where the outputs start: at zero, or at the identity itself.
        is_shifted = not (published or self.residual)
        shift: Any = "zeros"
        if is_shifted:
            shift = keras.initializers.Constant(context.identity_parameters.reshape(-1))
        scale = "ones" if published else "zeros"
        start = {"gamma_initializer": scale, "beta_initializer": shift}
        norms = self._batch_norms(context, "output", batch_normalized, **start)
        # From zero, the cosine with a kernel would be large after the first step.
        fits = published or norms or normalize in (None, "input")
        demand = "with `start='published'` or a batch norm, if its output is by angle"
        validation.require(fits, "predictor", demand, self)
        kernel = small_normal(0.001) if published or norms else "zeros"
        options = {"kernel_initializer": kernel, "bias_initializer": shift}
        options["use_bias"] = is_shifted and not norms
        output = context.layer("output", context.outputs, geometry, normalize, **options)
        return [output, *norms]

    def _has_bottleneck(self, context: LayerContext) -> bool:
        given = self.start == "published" or self.output_kernel_size is not None
        return context.is_depthwise and not given

    def _geometries(self, context: LayerContext) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the geometries of the first and the second layer."""
        geometry = context.geometry
        if geometry is None:
            return {}, {}
        block = self.block_side(context)
        own = {**geometry, "strides": tuple(block * each for each in geometry["strides"])}
        other = {
            "kernel_size": self.output_kernel_size or geometry["kernel_size"],
            "padding": "causal" if geometry["padding"] == "causal" else "same",
            "data_format": geometry["data_format"],
        }
        if self._has_bottleneck(context):
            return {**other, "kernel_size": 1}, own
        return own, other

    def _batch_norms(
        self, context: LayerContext, after: str, by_default: bool, **initializers: Any
    ) -> Layers:
        wanted = self.batch_normalization
        if not (wanted if isinstance(wanted, bool) else by_default):
            return []
        options: dict[str, Any] = {"momentum": 0.9}
        if self.start == "published":
            options = {"momentum": 0.999, "momentum_warmup": False}
        if isinstance(wanted, dict):
            options |= wanted
        options |= {"axis": context.channel_axis, "dtype": context.dtype, **initializers}
        return [BatchNormalization(**options, name=f"{after}_normalization")]

    def without_batch_norms(self) -> SimilarityPredictor:
        """Returns the recipe without default batch norms; explicit ones stay."""
        if self.batch_normalization is not None:
            return self
        return dataclasses.replace(self, batch_normalization=False)

    def get_config(self) -> dict[str, Any]:
        return {**vars(self), "kind": keras.saving.serialize_keras_object(self.kind)}

    from_config = classmethod(configs.from_arguments)


def small_normal(scale: float) -> keras.initializers.Initializer:
    """He's normal initializer times `scale`; the authors use 0.1 and 0.001."""
    return keras.initializers.VarianceScaling(
        2.0 * scale**2, mode="fan_in", distribution="untruncated_normal"
    )


#: The dynamic forms that use a predictor that is a layer.
forms_of: Any = weakref.WeakKeyDictionary()


class LiveId(int):
    """The id of a predictor in a config that has not been in a file.

    Keras shares objects of one id while it loads a file. If it copies layers one by one, as
    in `keras.models.clone_model`, each layer would get a predictor of its own.
    """

    #: How many layers use the predictor.
    layers = 1


def get(identifier: Any) -> SimilarityPredictor | keras.layers.Layer | None:
    """Returns a predictor by the name of its kind, from its serialized form, or unchanged.

    Args:
        identifier: `None`, the name of a kind, a dictionary from
            `keras.saving.serialize_keras_object`, a `SimilarityPredictor`, or a layer;
            anything else raises a ValueError that lists the names.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.predictors.get("cnn").kind
    'cnn'
    """
    if isinstance(identifier, dict):
        layers = getattr(identifier.get("shared_object_id"), "layers", 1)
        demand = "the predictor of one layer, unless the model is copied by save and load"
        validation.require(layers == 1, "predictor", demand, f"one of {layers} layers")
    kinds = {name: partial(SimilarityPredictor, name) for name in KINDS}
    allowed = (SimilarityPredictor, keras.layers.Layer, type(None))
    others = "a `SimilarityPredictor`, a layer or None"
    return configs.named(identifier, "predictor", kinds, allowed, others)
