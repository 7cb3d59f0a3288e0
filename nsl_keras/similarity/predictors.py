"""Small networks that predict the similarity matrix of a dynamic layer from its input.

A *kind* names the network: a function that returns its layers. `SimilarityPredictor` makes
them convolutions, at the positions that the layer served stands at;
`DenseSimilarityPredictor` makes them dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor
from nsl_keras.normalization import BatchNormalization
from nsl_keras.registry import Names
from nsl_keras.similarity import matrices
from nsl_keras.similarity.sphere import (
    SphereConv1D,
    SphereConv2D,
    SphereConv3D,
    SphereDense,
)

_SPHERE = {1: SphereConv1D, 2: SphereConv2D, 3: SphereConv3D}
_PLAIN = {1: keras.layers.Conv1D, 2: keras.layers.Conv2D, 3: keras.layers.Conv3D}

#: The least width of a hidden layer that follows its layer's.
LEAST_WIDTH = 8

#: Where `M` starts: at the identity, or near it as the authors' code does.
STARTS = ("identity", "published")

Network = Callable[["Predictor"], list[keras.layers.Layer]]
Shape = tuple[int | None, ...]

#: The networks of the predictors that layers make from a name.
KINDS = Names("predictor")


def register(name: str) -> Callable[[Network], Network]:
    """Returns a decorator that gives a predictor's network a name.

    Layers then take the name as `predictor=`, and predictors as `kind=`. The function is
    given the predictor and returns its layers, called one after the other. Each becomes an
    attribute of the predictor under its own name. It may make them with these methods, or
    in any other way:

    * `predictor.hidden(normalize, batch_normalized)`: a convolution or dense layer to the
      hidden width, and a batch norm if `batch_normalized` and nothing else was asked for;
      the layer goes by angle, with the norms `"both"`, `"input"` or `"kernel"`, or is plain
      for `None`;
    * `predictor.output(normalize, batch_normalized)`: the same to the `predictor.outputs`
      parameters of `M`, which starts at zero with `start="identity"`.

    Each returns a list of layers. A prediction must stand at each position of the layer
    served, or, with `downsampling`, at one for each block of them. The name goes into saved
    models; a process that loads one must have registered it.

    Args:
        name: The name.

    Raises:
        ValueError: If the name is taken by another function.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> @nsl_keras.predictors.register("tanh")
    ... def tanh(predictor):
    ...     activation = keras.layers.Activation("tanh", name="tanh")
    ...     return [*predictor.hidden("input"), activation, *predictor.output(None)]
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, predictor="tanh")
    >>> tuple(layer(keras.ops.ones((1, 8, 8, 2))).shape)
    (1, 6, 6, 4)
    """
    return KINDS.register(name)


@register("sphere")
def _sphere(predictor: Predictor) -> list[keras.layers.Layer]:
    normalized = predictor.similarity.predictor_batch_normalization
    return _with_relu(
        predictor, predictor.hidden("input", normalized), predictor.output(None, normalized)
    )


@register("full_sphere")
def _full_sphere(predictor: Predictor) -> list[keras.layers.Layer]:
    return _with_relu(
        predictor, predictor.hidden("both", True), predictor.output("both", True)
    )


@register("mlp")
@register("cnn")
def _plain(predictor: Predictor) -> list[keras.layers.Layer]:
    normalized = predictor.similarity.predictor_batch_normalization
    return _with_relu(
        predictor, predictor.hidden(None, normalized), predictor.output(None, True)
    )


def _with_relu(
    predictor: Predictor,
    hidden: list[keras.layers.Layer],
    output: list[keras.layers.Layer],
) -> list[keras.layers.Layer]:
    relu = keras.layers.ReLU(name="hidden_relu", dtype=predictor.dtype_policy)
    return [*hidden, relu, *output]


def get(
    identifier: Any, predictor: type[keras.layers.Layer] | None = None, **kwargs: Any
) -> keras.layers.Layer | None:
    """Returns a predictor by the name of its kind, from its serialized form, or as it is.

    Args:
        identifier: `None`, the name of a kind, a dictionary from
            `keras.saving.serialize_keras_object`, or a layer.
        predictor: The class that a name makes, `None` for `SimilarityPredictor`.
        **kwargs: Arguments of that class besides `kind`.

    Returns:
        A layer, or `None`.

    Raises:
        ValueError: If the name is unknown; the message lists the known ones.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.predictors.get("sphere", hidden_filters=16).hidden_filters
    16
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if identifier is None or isinstance(identifier, keras.layers.Layer):
        return identifier
    if not isinstance(identifier, str) or identifier not in KINDS:
        raise ValueError(
            f"`predictor` must be None, one of {', '.join(map(repr, KINDS))}, or a layer. "
            f"Received: predictor={identifier!r}"
        )
    return (predictor or SimilarityPredictor)(kind=identifier, name="predictor", **kwargs)


def published(
    kind: str = "sphere", similarity: Any = "diagonal", **kwargs: Any
) -> SimilarityPredictor:
    """Returns a predictor as the authors of Neural Similarity Learning have it.

    It has 64 hidden filters for the diagonal similarity and 128 for others, a scale of one
    at the last batch norm, and batch norms of the fixed momentum 0.999, whose moving
    statistics need thousands of steps.

    Args:
        kind: `"sphere"`, `"full_sphere"` or `"cnn"`.
        similarity: Name or `Similarity`, as in the layer served.
        **kwargs: Arguments of `SimilarityPredictor`, in place of those above too.

    Returns:
        A `SimilarityPredictor`.

    Example:

    >>> import nsl_keras
    >>> predictor = nsl_keras.predictors.published(similarity="unconstrained")
    >>> predictor.hidden_filters, predictor.momentum, predictor.start
    (128, 0.999, 'published')

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and the
        authors' code.
    """
    similarity = matrices.get(similarity)
    settings = {
        "hidden_filters": similarity.predictor_filters,
        "momentum": 0.999,
        "momentum_warmup": False,
        "start": "published",
        **kwargs,
    }
    return SimilarityPredictor(kind=kind, similarity=similarity, **settings)


def small_normal(scale: float) -> keras.initializers.Initializer:
    """He's normal initializer times `scale`; the authors use 0.1 and 0.001."""
    return keras.initializers.VarianceScaling(
        2.0 * scale**2, mode="fan_in", distribution="untruncated_normal"
    )


class Scale(keras.layers.Layer):
    """Private: multiplies every channel with a weight of its own, at first zero."""

    def __init__(self, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.axis = axis

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        shape: list[int | None] = [1] * len(input_shape)
        shape[self.axis] = input_shape[self.axis]
        self.scale = self.add_weight(name="scale", shape=shape, initializer="zeros")

    def call(self, inputs: Tensor) -> Tensor:
        return inputs * ops.cast(self.scale, inputs.dtype)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return tuple(input_shape)


class Predictor(keras.layers.Layer):
    """Private base: the arguments of all predictors, and their network."""

    #: Whether one predictor may serve several layers, with an adaptation for each.
    serves_several = False
    # What becomes of a prediction: `SimilarityPredictor` has arguments of these names.
    pooled = False
    downsampling = 1
    hidden_normalization: Any = None
    output_normalization: Any = None
    #: The argument that holds the hidden width.
    _width: str
    #: `None` until the layer that is served has been built.
    similarity: Any
    kernel_size: Any

    def __init__(
        self,
        *,
        kind: str,
        similarity: Any,
        batch_normalization: bool | None,
        momentum: float,
        momentum_warmup: bool,
        epsilon: float,
        synchronized: bool,
        hidden_kernel_initializer: Any,
        output_kernel_initializer: Any,
        start: str,
        kernel_regularizer: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.kind = validation.one_of(kind, KINDS, "kind")
        self.similarity = _unless_none(matrices.get, similarity)
        self.batch_normalization = validation.one_of(
            batch_normalization, (None, True, False), "batch_normalization"
        )
        self.momentum = validation.fraction(momentum, "momentum")
        self.momentum_warmup = validation.boolean(momentum_warmup, "momentum_warmup")
        self.epsilon = validation.positive_number(epsilon, "epsilon")
        self.synchronized = validation.boolean(synchronized, "synchronized")
        self.hidden_kernel_initializer = keras.initializers.get(
            hidden_kernel_initializer or small_normal(0.1)
        )
        self.output_kernel_initializer = keras.initializers.get(output_kernel_initializer)
        self.start = validation.one_of(start, STARTS, "start")
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self._dtype_is_given = kwargs.get("dtype") is not None
        self._served: str | None = None
        if self.similarity is not None and self.similarity.static_only:
            raise ValueError(
                "`similarity` must be one that can be predicted. "
                f"Received: similarity={type(self.similarity).__name__!r}"
            )

    def serve(self, layer: keras.layers.Layer) -> keras.layers.Layer | None:
        """Takes what is left `None` from the layer whose `M` is to be predicted.

        The layer calls it once, when it is built.

        Returns:
            The layer's own adaptation of its input to this predictor; `None` for none.

        Raises:
            ValueError: If the predictor serves another layer, and is none for several, or
                does not fit the layer. It then is as before, and may serve another one.
        """
        if self._served is not None and not self.serves_several:
            raise ValueError(
                "`predictor` must be an object for each layer, or one "
                "`SharedSimilarityPredictor` for all. Received: a predictor that serves "
                f"layer {self._served!r}, given to layer {layer.name!r}"
            )
        for name, value in self._geometry(layer).items():
            setattr(self, name, value)
        self._served = layer.name
        if not (self._dtype_is_given or self.built):
            self.dtype_policy = layer.dtype_policy
        self.similarity = self.similarity or layer.similarity
        if getattr(self, self._width) is None:
            width = min(max(layer.plain_width // 2, LEAST_WIDTH), self._published_width)
            setattr(self, self._width, width)
        return None

    @property
    def _published_width(self) -> int:
        return int(self.similarity.predictor_filters)

    def copied_for(self, layer: keras.layers.Layer) -> Predictor:
        """Returns a predictor with the same arguments, for a layer that it fits.

        Raises:
            ValueError: If the predictor serves a layer: what it took from that one would
                be given to the other.
        """
        if self._served is not None:
            raise ValueError(
                "`predictor` must serve no layer yet where each layer gets one like it. "
                f"Received: a predictor that serves layer {self._served!r}"
            )
        config = self.get_config()
        if not self._dtype_is_given:
            config["dtype"] = layer.dtype_policy
        return type(self).from_config(config)

    def _geometry(self, layer: keras.layers.Layer) -> dict[str, Any]:
        """Returns what the predictor takes from a layer, once all of it is checked."""
        raise NotImplementedError

    def _equal(self, layer: keras.layers.Layer, *names: str) -> dict[str, Any]:
        """Returns the layer's values of what is `None` here; the rest must equal them."""
        taken = {}
        for name in names:
            if not hasattr(layer, name):
                raise ValueError(
                    "`predictor` must be a `SimilarityPredictor` in a convolution and a "
                    "`DenseSimilarityPredictor` in layers with `block_size`. Received: "
                    f"a {type(self).__name__} in a {type(layer).__name__}"
                )
            own, of_layer = getattr(self, name), getattr(layer, name)
            if own is None:
                taken[name] = of_layer
            elif own != of_layer:
                raise ValueError(
                    f"`predictor` must have {name}={of_layer!r}, as the layer, or None. "
                    f"Received: predictor.{name}={own!r}"
                )
        return taken

    def _build_network(self, taps: int, kernel_size: tuple[int, ...], shape: Any) -> None:
        """Makes and builds the layers of the kind, each an attribute under its name."""
        self.similarity = self.similarity or matrices.get("diagonal")
        if getattr(self, self._width) is None:  # Of a predictor without a layer.
            setattr(self, self._width, self._published_width)
        structure = self.similarity.for_kernel_size(kernel_size)
        #: The number of parameters of `M`.
        self.outputs = math.prod(structure.parameter_shape(taps))
        layers = KINDS[self.kind](self)
        self._network = tuple(layer.name for layer in layers)
        for layer in layers:
            setattr(self, layer.name, layer)
            layer.build(shape)
            shape = tuple(layer.compute_output_shape(shape))

    def hidden(
        self, normalize: str | None = None, batch_normalized: bool = False
    ) -> list[keras.layers.Layer]:
        """Returns a layer from the input to the hidden width, and its batch norm if any."""
        initializer = self.hidden_kernel_initializer
        layers = [self._layer("hidden", normalize, initializer)]
        if self._normalizes(batch_normalized):
            layers.append(self._normalization("hidden", "ones"))
        return layers

    def output(
        self, normalize: str | None = None, batch_normalized: bool = False
    ) -> list[keras.layers.Layer]:
        """Returns a layer to the parameters of `M`, and what scales them if anything."""
        initializer = self.output_kernel_initializer or small_normal(0.001)
        if self.start == "published":
            scales = [self._normalization("output", "ones")]
            scales = scales if self._normalizes(batch_normalized) else []
        elif self._normalizes(batch_normalized):
            scales = [self._normalization("output", "zeros")]
        elif normalize in ("both", "kernel"):
            # A cosine with a kernel of zeros would be large after the first step.
            scales = [
                Scale(self._channel_axis, dtype=self.dtype_policy, name="output_scale")
            ]
        else:
            scales = []
            initializer = self.output_kernel_initializer or keras.initializers.Zeros()
        return [self._layer("output", normalize, initializer), *scales]

    def _layer(
        self, place: str, normalize: str | None, initializer: keras.initializers.Initializer
    ) -> keras.layers.Layer:
        """Returns the layer of a place; by angle, or plain."""
        raise NotImplementedError

    @property
    def _channel_axis(self) -> int:
        return 1 if getattr(self, "data_format", None) == "channels_first" else -1

    def _normalizes(self, by_default: bool) -> bool:
        wanted = self.batch_normalization
        return by_default if wanted is None else wanted

    def _normalization(self, place: str, gamma_initializer: str) -> keras.layers.Layer:
        return BatchNormalization(
            axis=self._channel_axis,
            momentum=self.momentum,
            momentum_warmup=self.momentum_warmup,
            epsilon=self.epsilon,
            gamma_initializer=gamma_initializer,
            synchronized=self.synchronized,
            dtype=self.dtype_policy,
            name=f"{place}_normalization",
        )

    def _options(
        self, name: str, initializer: keras.initializers.Initializer
    ) -> dict[str, Any]:
        return {
            "use_bias": False,
            "kernel_initializer": initializer,
            "kernel_regularizer": self.kernel_regularizer,
            "dtype": self.dtype_policy,
            "name": name,
        }

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        outputs = inputs
        for name in self._network:
            # Keras hands `training` on to the batch norms.
            outputs = getattr(self, name)(outputs)
        if self.pooled:
            return self._pool(outputs)
        if self.downsampling > 1:
            return self._at_every_position(outputs, ops.shape(inputs))
        return outputs

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Predictor:
        if "start" not in config:  # Of a file from before widths followed the layer's.
            config = {"start": "published", **config}
            if config.get(cls._width) is None:
                similarity = matrices.get(config.get("similarity") or "diagonal")
                config[cls._width] = similarity.predictor_filters
        return cls(**config)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "kind": self.kind,
            "similarity": _unless_none(matrices.serialize, self.similarity),
            "batch_normalization": self.batch_normalization,
            "momentum": self.momentum,
            "momentum_warmup": self.momentum_warmup,
            "epsilon": self.epsilon,
            "synchronized": self.synchronized,
            "hidden_kernel_initializer": keras.initializers.serialize(
                self.hidden_kernel_initializer
            ),
            "output_kernel_initializer": keras.initializers.serialize(
                self.output_kernel_initializer
            ),
            "start": self.start,
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


@keras.saving.register_keras_serializable("nsl_keras")
class SimilarityPredictor(Predictor):
    """Predicts, at every output position of a convolution, what `M` adds to the identity.

    Two layers with the kernel size of the convolution they serve. By `kind`, for the
    diagonal similarity (`T` outputs, the number of taps):

        "sphere":       SphereConv(H, input norm) -> BN -> ReLU -> Conv(T) -> BN
        "full_sphere":  SphereConv(H) -> BN -> ReLU -> SphereConv(T) -> BN
        "cnn":          Conv(H) -> BN -> ReLU -> Conv(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others there is no batch norm,
    except after the output of `"cnn"` and in `"full_sphere"`, which has both.

    The first layer has the strides, padding and dilation of the convolution, the second
    stride 1 and `"same"` (`"causal"` in a causal predictor), so that the prediction has
    exactly the output's positions. With `downsampling=b` the first layer has `b` times the
    strides, and position `p` takes the prediction at `p // b`.

    What is left `None` of the geometry is taken from the layer that is served, when that
    is built: `predictor=SimilarityPredictor(momentum=0.9)`.

    Args:
        kernel_size: int or tuple of 1, 2 or 3 ints, as in the convolution served; an int
            is a square 2D kernel. `None` for that of the layer served, as in `similarity`,
            `strides`, `padding`, `data_format`, `dilation_rate` and `dtype`; of a predictor
            that is used without a layer it must be given.
        kind: `"sphere"`, `"full_sphere"`, `"cnn"` (`"mlp"` is the same), or a name of your
            own from `nsl_keras.predictors.register`. Plain convolutions diverge without
            the normalized output, the paper finds.
        similarity: Name or `Similarity` whose parameters are predicted;
            `"diagonal"` without a layer.
        hidden_filters: int or `None`, the width of the hidden layer; `None` is half the
            filters of the layer served, at least 8, and at most the authors' 64 for the
            diagonal similarity and 128 for others.
        strides: int or tuple of ints; 1 without a layer.
        padding: `"valid"`, `"same"` or, in 1D, `"causal"`; `"valid"` without a layer.
        data_format: `"channels_last"` or `"channels_first"`;
            `keras.config.image_data_format()` without a layer.
        dilation_rate: int or tuple of ints; 1 without a layer.
        pooled: bool, whether to predict one `M` per example, the mean of what is predicted
            at its positions, instead of one per position.
        downsampling: int, the side of the blocks of positions that share one `M`: with 2,
            `M` is predicted once for each block of 2x2 positions of an image, by a first
            layer of twice the strides; 1 for one at each position, as in the paper. Blocks
            begin at the first position, and those at the end may be smaller. Where
            `downsampling` times the strides exceeds the kernel size, some pixels are seen
            by no prediction.
        batch_normalization: bool or `None`: `False` for no batch norm at all; `True` for
            both; `None` for those named above.
        momentum: float in [0, 1), momentum of the batch norms (the authors: 0.999).
        momentum_warmup: bool, whether the batch norms' moving statistics are unbiased from
            the first step on, as in `nsl_keras.layers.BatchNormalization`; `False` for the
            fixed momentum of the authors.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1, as in the authors' code.
        output_kernel_initializer: Initializer of the second kernel; `None` is that of
            `start`.
        start: `"identity"`: `M` is the identity until the first step, so that the layer
            is the plain one. The scale of the last batch norm starts at zero; where there
            is none, the second kernel does, or, if that goes by angle, a factor of each
            output. `"published"`: that scale starts at one and the second kernel at He's
            normal times 0.001, as in the authors' code: `M` starts near the identity.
        kernel_regularizer: Regularizer of both kernels.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Input shape:
        `(batch, *spatial, channels)` with `data_format="channels_last"`,
        `(batch, channels, *spatial)` with `"channels_first"`.

    Output shape:
        `(batch, *new_spatial, outputs)` or `(batch, outputs, *new_spatial)`, with the
        `outputs` parameters of the similarity; `(batch, outputs)` if pooled.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; for a geometry
            other than that of the layer served, or none at all, for a dilated kernel with
            `downsampling`, and for a network of your own with `downsampling` that does not
            predict once for each block, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> predictor = nsl_keras.predictors.SimilarityPredictor(3, padding="same")
    >>> tuple(predictor(keras.ops.ones((2, 8, 8, 4))).shape)
    (2, 8, 8, 9)
    >>> wide = nsl_keras.predictors.SimilarityPredictor(hidden_filters=96, momentum=0.9)
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(
    ...     8, 3, strides=2, similarity="unconstrained", predictor=wide)
    >>> tuple(layer(keras.ops.ones((2, 9, 9, 4))).shape), wide.strides, wide.outputs
    ((2, 4, 4, 8), (2, 2), 81)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and
        Appendix A. The paper mentions no batch norm; the places above are those of the
        authors' code, as is the plain second convolution of `"sphere"`.
    """

    _width = "hidden_filters"

    def __init__(
        self,
        kernel_size: int | tuple[int, ...] | None = None,
        kind: str = "sphere",
        similarity: Any = None,
        hidden_filters: int | None = None,
        strides: int | tuple[int, ...] | None = None,
        padding: str | None = None,
        data_format: str | None = None,
        dilation_rate: int | tuple[int, ...] | None = None,
        pooled: bool = False,
        downsampling: int = 1,
        batch_normalization: bool | None = None,
        momentum: float = 0.99,
        momentum_warmup: bool = True,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        start: str = "identity",
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kind=kind,
            similarity=similarity,
            batch_normalization=batch_normalization,
            momentum=momentum,
            momentum_warmup=momentum_warmup,
            epsilon=epsilon,
            synchronized=synchronized,
            hidden_kernel_initializer=hidden_kernel_initializer,
            output_kernel_initializer=output_kernel_initializer,
            start=start,
            kernel_regularizer=kernel_regularizer,
            **kwargs,
        )
        self.kernel_size = _unless_none(_kernel_size, kernel_size)
        if kernel_size is None and not (strides is None and dilation_rate is None):
            raise ValueError(
                "`strides` and `dilation_rate` must be None where `kernel_size` is. "
                f"Received: strides={strides}, dilation_rate={dilation_rate}"
            )
        rank = len(self.kernel_size or ())
        self.hidden_filters = _unless_none(
            validation.positive_integer, hidden_filters, "hidden_filters"
        )
        self.strides = _unless_none(validation.positive_integers, strides, rank, "strides")
        self.padding = _unless_none(
            validation.one_of, padding, ("valid", "same", "causal"), "padding"
        )
        self.data_format = _unless_none(
            validation.one_of,
            data_format,
            ("channels_last", "channels_first"),
            "data_format",
        )
        self.dilation_rate = _unless_none(
            validation.positive_integers, dilation_rate, rank, "dilation_rate"
        )
        self.pooled = validation.boolean(pooled, "pooled")
        self.downsampling = validation.positive_integer(downsampling, "downsampling")

    def _geometry(self, layer: keras.layers.Layer) -> dict[str, Any]:
        taken = self._equal(
            layer, "kernel_size", "strides", "padding", "data_format", "dilation_rate"
        )
        self._refuse_to_look_ahead(layer)
        dilation_rate = taken.get("dilation_rate") or self.dilation_rate
        self._refuse_holes(dilation_rate, f" in layer {layer.name!r}")
        return taken

    def _refuse_holes(self, dilation_rate: tuple[int, ...], where: str = "") -> None:
        if self.downsampling > 1 and max(dilation_rate) > 1:
            raise ValueError(
                "`downsampling` must be 1 where the kernel is dilated: convolutions cannot "
                "have both strides and dilation. Received: "
                f"downsampling={self.downsampling}, dilation_rate={dilation_rate}{where}"
            )

    def _refuse_to_look_ahead(self, layer: keras.layers.Layer) -> None:
        if layer.padding == "causal" and self.pooled:
            raise ValueError(
                "`predictor` must not be pooled in a causal layer, or it would look "
                "ahead. Received: predictor.pooled=True"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.kernel_size is None:
            raise ValueError(
                "`kernel_size` must be given to a predictor that serves no layer. "
                "Received: kernel_size=None"
            )
        rank = len(self.kernel_size)
        validation.rank(input_shape, rank + 2)
        self.strides = self.strides or (1,) * rank
        self.padding = self.padding or "valid"
        self.data_format = self.data_format or keras.config.image_data_format()
        self.dilation_rate = self.dilation_rate or (1,) * rank
        self._refuse_holes(self.dilation_rate)
        taps = math.prod(self.kernel_size)
        self._build_network(taps, self.kernel_size, tuple(input_shape))
        self._check_blocks(tuple(input_shape))

    def _check_blocks(self, input_shape: Shape) -> None:
        """Refuses a network of one's own that does not predict one `M` for each block."""
        if self.downsampling == 1:
            return
        # Later inputs may have other sizes: some that fill their blocks, some that do not.
        step = self.downsampling * max(self.strides)
        for size in range(
            3 * step + max(self.kernel_size), 4 * step + max(self.kernel_size)
        ):
            shape = list(input_shape)
            for axis in self._spatial_axes:
                shape[axis] = size
            *_, (_, _, predicted) = self.calls(tuple(shape))
            for axis in self._spatial_axes:
                blocks = -(-self._positions(shape, axis) // self.downsampling)
                if predicted[axis] != blocks:
                    raise ValueError(
                        f"`kind` must predict at {blocks} places along axis {axis} of an "
                        f"input of shape {tuple(shape)} with downsampling="
                        f"{self.downsampling}, as `predictor.hidden` does. Received: "
                        f"kind={self.kind!r}, which predicts at {predicted[axis]}"
                    )

    def _layer(
        self, place: str, normalize: str | None, initializer: keras.initializers.Initializer
    ) -> keras.layers.Layer:
        options: dict[str, Any] = {
            **self._options(f"{place}_convolution", initializer),
            "data_format": self.data_format,
            "padding": "causal" if self.padding == "causal" else "same",
        }
        filters = self.outputs
        if place == "hidden":
            filters = self.hidden_filters
            options["strides"] = tuple(self.downsampling * each for each in self.strides)
            options["padding"] = self.padding
            options["dilation_rate"] = self.dilation_rate
        rank = len(self.kernel_size)
        if normalize is None:
            return _PLAIN[rank](filters, self.kernel_size, **options)
        return _SPHERE[rank](filters, self.kernel_size, normalize=normalize, **options)

    def _pool(self, outputs: Tensor) -> Tensor:
        return ops.mean(outputs, axis=self._spatial_axes)

    def _at_every_position(self, outputs: Tensor, input_shape: Any) -> Tensor:
        """Repeats the prediction of each block, and drops what no position asks for."""
        shape = list(ops.shape(outputs))
        for axis in self._spatial_axes:
            outputs = self._repeated(outputs, axis)
            shape[axis] = self._positions(input_shape, axis)
        # A slice of all there is would cost a copy in the gradient.
        if any(shape[axis] != outputs.shape[axis] for axis in self._spatial_axes):
            outputs = ops.slice(outputs, (0,) * len(shape), shape)
        return outputs

    def _repeated(self, outputs: Tensor, axis: int) -> Tensor:
        """Repeats predictions along an axis, each over its block of positions."""
        shape = list(ops.shape(outputs))
        shape[axis] *= self.downsampling
        # Not `ops.repeat`, which is slower on a CPU.
        each = ops.expand_dims(outputs, axis + 1)
        return ops.reshape(ops.concatenate([each] * self.downsampling, axis + 1), shape)

    @property
    def _spatial_axes(self) -> tuple[int, ...]:
        first = 1 if self.data_format == "channels_last" else 2
        return tuple(range(first, first + len(self.kernel_size)))

    def _positions(self, input_shape: Any, axis: int) -> Any:
        """Returns how many positions the layer served has along an axis."""
        number = axis - self._spatial_axes[0]
        size, stride = input_shape[axis], self.strides[number]
        if self.padding != "valid":
            return -(-size // stride)
        reach = (self.kernel_size[number] - 1) * self.dilation_rate[number]
        return (size - reach - 1) // stride + 1

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        if self.pooled:
            return (input_shape[0], self.outputs)
        *_, (_, _, predicted) = self.calls(tuple(input_shape))
        if self.downsampling == 1:
            return predicted
        shape = list(predicted)
        for axis in self._spatial_axes:
            known = input_shape[axis] is not None
            shape[axis] = self._positions(input_shape, axis) if known else None
        return tuple(shape)

    def calls(
        self, input_shape: Shape
    ) -> Iterator[tuple[keras.layers.Layer, Shape, Shape]]:
        """Yields the layers, each with the shapes of its input and its output."""
        shape = input_shape
        for name in self._network:
            layer, before = getattr(self, name), shape
            shape = tuple(layer.compute_output_shape(before))
            yield layer, before, shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "kernel_size": self.kernel_size,
            "hidden_filters": self.hidden_filters,
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
            "pooled": self.pooled,
            "downsampling": self.downsampling,
        }


@keras.saving.register_keras_serializable("nsl_keras")
class SharedSimilarityPredictor(SimilarityPredictor):
    """One predictor for several dynamic layers, each with its own adaptation.

    Give the same object as `predictor=` to several layers. Each of them makes a small
    convolution of its own that brings its input to `adapted_filters` channels, with the
    layer's own kernel size, strides, padding and dilation, followed by the shared network,
    a `SimilarityPredictor` of stride 1, which predicts `M` for all of them:

        M = I + shared(adaptation(x))

    With 32 adapted filters the predictors of CNN-9 hold half the parameters of disjoint
    ones. The layers' kernels must have the same number of taps.

    There is no batch norm unless it is asked for: one set of moving statistics does not
    fit the inputs of several layers, and inference falls far below training.

    A saved model keeps the sharing. `keras.models.clone_model`, which rebuilds layers one
    by one, gives each of them a predictor of its own.

    Args:
        kernel_size: int or tuple of 1, 2 or 3 ints; `None` is that of the layer that is
            built first.
        kind: As for `SimilarityPredictor`.
        similarity: Name or `Similarity`, as in the layers served; `None` is that of the
            layer that is built first.
        adapted_filters: int, the number of channels after each layer's adaptation.
        hidden_filters: int or `None`, as for `SimilarityPredictor`.
        padding: `"same"`, or `"causal"` for causal 1D layers; `None` is what suits the
            layer that is built first.
        adaptation_initializer: Initializer of the adaptations' kernels.
        batch_normalization: bool or `None`: `True` for both batch norms of
            `SimilarityPredictor`, `None` for none.
        **kwargs: `data_format`, `pooled`, `downsampling`, `momentum`, `epsilon`,
            `momentum_warmup`, `synchronized`, `hidden_kernel_initializer`,
            `output_kernel_initializer`, `start` and `kernel_regularizer` (of the
            adaptations' kernels too) of `SimilarityPredictor`; `name`, `dtype`,
            `trainable` of `keras.layers.Layer`.

    Input shape:
        `(batch, *spatial, adapted_filters)` with `data_format="channels_last"`,
        `(batch, adapted_filters, *spatial)` with `"channels_first"`.

    Output shape:
        `(batch, *spatial, outputs)` or `(batch, outputs, *spatial)`; `(batch, outputs)` if
        pooled.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; for layers that
            it does not suit, when these are built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> shared = nsl_keras.predictors.SharedSimilarityPredictor()
    >>> model = keras.Sequential([
    ...     keras.Input((16, 16, 3)),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(8, 3, predictor=shared),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(16, 3, strides=2, predictor=shared),
    ... ])
    >>> model.layers[0].predictor is model.layers[1].predictor
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.2 and Figure
        3(b). The paper does not say how wide the adaptation is, and the authors released
        no code for it; 32 filters of the layer's own kernel size save the "nearly half"
        that Section 7.1 states.
    """

    serves_several = True

    def __init__(
        self,
        kernel_size: int | tuple[int, ...] | None = None,
        kind: str = "sphere",
        similarity: Any = None,
        adapted_filters: int = 32,
        hidden_filters: int | None = None,
        padding: str | None = None,
        adaptation_initializer: Any = "he_normal",
        batch_normalization: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if padding not in (None, "same", "causal"):
            raise ValueError(
                "`padding` must be 'same' or 'causal' in a shared predictor: the "
                "adaptations have the layers' own geometry. "
                f"Received: padding={padding!r}"
            )
        for name in ("strides", "dilation_rate"):
            if name in kwargs:
                raise ValueError(
                    f"`{name}` belongs to the layers that share a predictor. "
                    f"Received: {name}={kwargs[name]!r}"
                )
        super().__init__(
            kernel_size,
            kind=kind,
            similarity=similarity,
            hidden_filters=hidden_filters,
            padding=padding,
            batch_normalization=batch_normalization,
            **kwargs,
        )
        self.adapted_filters = validation.positive_integer(
            adapted_filters, "adapted_filters"
        )
        self.adaptation_initializer = keras.initializers.get(adaptation_initializer)

    def _normalizes(self, by_default: bool) -> bool:
        return bool(self.batch_normalization)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Predictor:
        if "start" not in config and config.get("batch_normalization") is None:
            # Of a file from before: its batch norms went by the kind.
            kind, similarity = config.get("kind", "sphere"), config.get("similarity")
            diagonal = matrices.get(similarity or "diagonal").predictor_batch_normalization
            if kind in ("cnn", "mlp") and not diagonal:
                raise ValueError(
                    "A shared `predictor` of kind 'cnn' for a similarity other than "
                    "'diagonal' does not load from a file of an earlier version: it had a "
                    "single batch norm. Make the model anew, and train it. "
                    f"Received: kind={kind!r}, similarity={similarity!r}"
                )
            wanted = kind == "full_sphere" or diagonal
            config = {**config, "batch_normalization": wanted}
        return super().from_config(config)

    def _geometry(self, layer: keras.layers.Layer) -> dict[str, Any]:
        taken = self._equal(layer, "data_format")
        taken["kernel_size"] = self.kernel_size or layer.kernel_size
        causal = layer.padding == "causal"
        taken["padding"] = self.padding or ("causal" if causal else "same")
        if causal and taken["padding"] != "causal":
            raise ValueError(
                "`predictor` must have padding='causal' in a causal layer, or it would "
                f"look ahead. Received: predictor.padding={self.padding!r}"
            )
        if len(layer.kernel_size) != len(taken["kernel_size"]):
            raise ValueError(
                f"`predictor` must have a kernel of {len(layer.kernel_size)} axes here. "
                f"Received: predictor.kernel_size={self.kernel_size}"
            )
        self._refuse_to_look_ahead(layer)
        return taken

    def serve(self, layer: keras.layers.Layer) -> keras.layers.Layer | None:
        super().serve(layer)
        return _PLAIN[len(layer.kernel_size)](
            self.adapted_filters,
            layer.kernel_size,
            strides=layer.strides,
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
            use_bias=False,
            kernel_initializer=self.adaptation_initializer,
            kernel_regularizer=self.kernel_regularizer,
            dtype=layer.dtype_policy,
            name="adaptation",
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.padding = self.padding or "same"
        super().build(input_shape)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("strides", "dilation_rate"):
            del config[name]
        return {
            **config,
            "adapted_filters": self.adapted_filters,
            "adaptation_initializer": keras.initializers.serialize(
                self.adaptation_initializer
            ),
        }


@keras.saving.register_keras_serializable("nsl_keras")
class DenseSimilarityPredictor(Predictor):
    """Predicts from a vector what its similarity matrix `M` adds to the identity.

    Two dense layers without bias. By `kind`, for the diagonal similarity (`T` outputs):

        "sphere":       SphereDense(H, input norm) -> BN -> ReLU -> Dense(T) -> BN
        "full_sphere":  SphereDense(H) -> BN -> ReLU -> SphereDense(T) -> BN
        "mlp":          Dense(H) -> BN -> ReLU -> Dense(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others there is no batch norm,
    except after the output of `"mlp"` and in `"full_sphere"`, which has both. `T` is
    `block_size`, or the width of the input.

    Args:
        block_size: int or `None`, as in the layer served; `None` is that of the layer
            served.
        kind: `"sphere"`, `"full_sphere"`, `"mlp"` (`"cnn"` is the same), or a name of your
            own from `nsl_keras.predictors.register`.
        similarity: Name or `Similarity` whose parameters are predicted; `None` is that of
            the layer served, and `"diagonal"` without one.
        hidden_units: int or `None`, the width of the hidden layer; `None` is half the
            units of the layer served, at least 8, and at most 64 for the diagonal
            similarity and 128 for others.
        batch_normalization: bool or `None`: `False` for no batch norm at all, which a
            recurrent cell needs; `True` for both; `None` for those named above.
        momentum: float in [0, 1), momentum of the batch norms.
        momentum_warmup: bool, as for `SimilarityPredictor`.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1.
        output_kernel_initializer: Initializer of the second kernel; `None` is that of
            `start`.
        start: `"identity"` or `"published"`, as for `SimilarityPredictor`.
        kernel_regularizer: Regularizer of both kernels.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`; the dtype is that of
            the layer served unless it is given.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: bool, passed to the batch norms.

    Input shape:
        `(..., features)`.

    Output shape:
        `(..., outputs)`, with the `outputs` parameters of the similarity.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; if the number
            of features is unknown, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> predictor = nsl_keras.predictors.DenseSimilarityPredictor(kind="mlp")
    >>> tuple(predictor(keras.ops.ones((2, 16))).shape)
    (2, 16)
    >>> in_blocks = nsl_keras.predictors.DenseSimilarityPredictor(
    ...     3, similarity="unconstrained")
    >>> tuple(in_blocks(keras.ops.ones((2, 18))).shape)
    (2, 9)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1, which
        predicts `M` with "hyperspherical fully-connected networks" too. Widths,
        initializers and batch norms are those of the authors' predictors of convolutions;
        they released none for vectors.
    """

    _width = "hidden_units"

    def __init__(
        self,
        block_size: int | None = None,
        kind: str = "sphere",
        similarity: Any = None,
        hidden_units: int | None = None,
        batch_normalization: bool | None = None,
        momentum: float = 0.99,
        momentum_warmup: bool = True,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        start: str = "identity",
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kind=kind,
            similarity=similarity,
            batch_normalization=batch_normalization,
            momentum=momentum,
            momentum_warmup=momentum_warmup,
            epsilon=epsilon,
            synchronized=synchronized,
            hidden_kernel_initializer=hidden_kernel_initializer,
            output_kernel_initializer=output_kernel_initializer,
            start=start,
            kernel_regularizer=kernel_regularizer,
            **kwargs,
        )
        self.block_size = _unless_none(
            validation.positive_integer, block_size, "block_size"
        )
        self.hidden_units = _unless_none(
            validation.positive_integer, hidden_units, "hidden_units"
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def _geometry(self, layer: keras.layers.Layer) -> dict[str, Any]:
        return self._equal(layer, "block_size")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        taps = self.block_size or features
        self._build_network(taps, (taps,), tuple(input_shape))

    def _layer(
        self, place: str, normalize: str | None, initializer: keras.initializers.Initializer
    ) -> keras.layers.Layer:
        units = self.hidden_units if place == "hidden" else self.outputs
        options = self._options(f"{place}_dense", initializer)
        if normalize is None:
            return keras.layers.Dense(units, **options)
        return SphereDense(units, normalize=normalize, **options)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.outputs)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "block_size": self.block_size,
            "hidden_units": self.hidden_units,
        }


def multiply_adds(network: keras.layers.Layer | None) -> int:
    """Returns the multiply-adds of a predictor or adaptation at one of its positions."""
    layers = [network, *rewiring.sublayers(network)] if network else []
    return sum(math.prod(each.kernel.shape) for each in layers if hasattr(each, "kernel"))


def cost_ratio(layer: Any) -> float:
    """Returns the multiply-adds of what predicts a layer's `M`, over the plain layer's."""
    block = getattr(layer.predictor, "downsampling", 1) ** len(layer.kernel_size)
    predicted = multiply_adds(layer.predictor) / block + multiply_adds(layer.adaptation)
    return predicted / math.prod(layer.kernel.shape)


def name_costly(ratios: Mapping[str, float | None]) -> str | None:
    """Says which predictors cost more than the layers they serve.

    Args:
        ratios: Multiply-adds of a layer's predictor over those of the plain layer, by the
            layer's name; `None` where that is not known.

    Returns:
        A sentence, or `None` if there are none.
    """
    costly = [
        f"{name!r} ({ratio:.1f} times)"
        for name, ratio in ratios.items()
        if ratio is not None and ratio > 1
    ]
    if not costly:
        return None
    return (
        "Predictors take more multiply-adds than the plain layers that they serve in "
        f"{', '.join(costly)}. `hidden_filters` of `SimilarityPredictor` sets their width; "
        "`downsampling` sets at how many positions they predict."
    )


def _unless_none(check: Callable[..., Any], value: Any, *arguments: Any) -> Any:
    return None if value is None else check(value, *arguments)


def _kernel_size(value: Any) -> tuple[int, ...]:
    if isinstance(value, (int, np.integer)):
        return validation.positive_integers(value, 2, "kernel_size")
    if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= 3:
        raise ValueError(
            "`kernel_size` must be a positive integer or 1 to 3 of them. "
            f"Received: kernel_size={value!r}"
        )
    return validation.positive_integers(tuple(value), len(value), "kernel_size")
