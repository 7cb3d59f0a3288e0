"""Recipes for the small networks that predict the `M` of a dynamic layer from its input.

A recipe is data. The layer that receives one asks it for a `keras.Sequential` that fits
the layer's own geometry, similarity and dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.sphere import (
    SphereConv1D,
    SphereConv2D,
    SphereConv3D,
    SphereDense,
)
from nsl_keras.training.normalization import BatchNormalization

#: Minimum hidden width when it is derived from the layer's width.
LEAST_WIDTH = 8

#: Where `M` starts: at the identity, or near it as in the authors' code.
STARTS = ("identity", "published")

#: Plain and hyperspherical layers, and poolings, by the number of spatial axes.
_LAYERS: dict[int, tuple[Any, Any, Any]] = {
    0: (keras.layers.Dense, SphereDense, None),
    1: (keras.layers.Conv1D, SphereConv1D, keras.layers.GlobalAveragePooling1D),
    2: (keras.layers.Conv2D, SphereConv2D, keras.layers.GlobalAveragePooling2D),
    3: (keras.layers.Conv3D, SphereConv3D, keras.layers.GlobalAveragePooling3D),
}

Layers = list[keras.layers.Layer]


@dataclasses.dataclass(frozen=True)
class Place:
    """What a predictor network must know about its layer.

    Attributes:
        channels: Number of channels or features of the layer's input.
        outputs: Number of parameters of `M`.
        plain_width: Number of outputs of the plain layer at a position.
        is_diagonal: Whether `M` is diagonal.
        geometry: `kernel_size`, `strides`, `padding`, `dilation_rate` and `data_format` of
            a convolution; `None` for layers of vectors.
        kernel_regularizer: Regularizer of the layer's kernel.
        dtype: The layer's dtype policy.
    """

    channels: int
    outputs: int
    plain_width: int
    is_diagonal: bool
    geometry: Any
    kernel_regularizer: Any
    dtype: Any

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return 0 if self.geometry is None else len(self.geometry["kernel_size"])

    @property
    def channel_axis(self) -> int:
        """The axis of the channels, in the input and in the prediction."""
        first = self.rank and self.geometry["data_format"] == "channels_first"
        return 1 if first else -1

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """The shape of the input, with every size unknown except the channels."""
        shape: list[int | None] = [None] * (self.rank + 2)
        shape[self.channel_axis] = self.channels
        return tuple(shape)


class Parts:
    """Makes the layers of a predictor for one place.

    Attributes:
        place: The layer whose `M` is predicted, a `Place`.
        width: int, the width of the hidden layer.
    """

    def __init__(self, predictor: SimilarityPredictor, place: Place) -> None:
        self.place = place
        self._predictor = predictor
        published = 64 if place.is_diagonal else 128
        half = min(max(place.plain_width // 2, LEAST_WIDTH), published)
        default = published if predictor.start == "published" else half
        self.width = predictor.width or default

    def hidden(
        self, normalize: str | None = None, batch_normalized: bool = False
    ) -> Layers:
        """Returns a layer from the input to the hidden width, and its batch norm if any.

        Args:
            normalize: `"both"`, `"input"` or `"kernel"` for a layer that compares by
                angle, as `SphereConv2D` does; `None` for a plain one.
            batch_normalized: bool, whether a batch norm follows unless the predictor's
                `batch_normalization` says otherwise.
        """
        geometry = dict(self.place.geometry or {})
        if geometry:
            block = self._predictor.downsampling
            geometry["strides"] = tuple(block * each for each in geometry["strides"])
        layer = self._layer("hidden", self.width, geometry, normalize, small_normal(0.1))
        return [layer, *self._normalizations("hidden", "ones", batch_normalized)]

    def output(
        self, normalize: str | None = None, batch_normalized: bool = False
    ) -> Layers:
        """Returns a layer to the parameters of `M`, and its batch norm or scale if any.

        Takes the arguments of `hidden`. With `start="identity"` the prediction is
        zero until the first training step.
        """
        geometry = dict(self.place.geometry or {})
        if geometry:
            causal = geometry["padding"] == "causal"
            geometry = {
                "kernel_size": self._predictor.output_kernel_size
                or geometry["kernel_size"],
                "padding": "causal" if causal else "same",
                "data_format": geometry["data_format"],
            }
        published = self._predictor.start == "published"
        gamma = "ones" if published else "zeros"
        scales = self._normalizations("output", gamma, batch_normalized)
        initializer = small_normal(0.001)
        if not published and not scales:
            if normalize in ("both", "kernel"):
                # A cosine with a kernel of zeros would be large after the first step.
                axis = self.place.channel_axis
                scales = [Scale(axis, dtype=self.place.dtype, name="output_scale")]
            else:
                initializer = keras.initializers.Zeros()
        outputs = self.place.outputs
        return [self._layer("output", outputs, geometry, normalize, initializer), *scales]

    def _layer(
        self,
        name: str,
        width: int,
        geometry: dict[str, Any],
        normalize: str | None,
        initializer: keras.initializers.Initializer,
    ) -> keras.layers.Layer:
        regularizer = self._predictor.kernel_regularizer or self.place.kernel_regularizer
        options = {
            **geometry,
            "use_bias": False,
            "kernel_initializer": initializer,
            "kernel_regularizer": regularizer,
            "dtype": self.place.dtype,
            "name": name,
        }
        plain, sphere, _ = _LAYERS[self.place.rank]
        if normalize is None:
            return plain(width, **options)
        return sphere(width, normalize=normalize, **options)

    def _normalizations(self, place: str, gamma: str, by_default: bool) -> Layers:
        wanted = self._predictor.batch_normalization
        options = wanted if isinstance(wanted, dict) else {}
        if not (wanted if isinstance(wanted, bool) else by_default):
            return []
        return [
            BatchNormalization(
                **{"momentum": 0.9, **options},
                axis=self.place.channel_axis,
                gamma_initializer=gamma,
                dtype=self.place.dtype,
                name=f"{place}_normalization",
            )
        ]


def _sphere(parts: Parts) -> Layers:
    normalized = parts.place.is_diagonal
    return _with_relu(
        parts, parts.hidden("input", normalized), parts.output(None, normalized)
    )


def _full_sphere(parts: Parts) -> Layers:
    return _with_relu(parts, parts.hidden("both", True), parts.output("both", True))


def _cnn(parts: Parts) -> Layers:
    normalized = parts.place.is_diagonal
    return _with_relu(parts, parts.hidden(None, normalized), parts.output(None, True))


def _with_relu(parts: Parts, hidden: Layers, output: Layers) -> Layers:
    return [*hidden, keras.layers.ReLU(dtype=parts.place.dtype, name="relu"), *output]


#: The built-in kinds by name.
KINDS: dict[str, Callable[[Parts], Layers]] = {
    "sphere": _sphere,
    "full_sphere": _full_sphere,
    "cnn": _cnn,
}


@keras.saving.register_keras_serializable("nsl_keras")
@dataclasses.dataclass(frozen=True, eq=False)
class SimilarityPredictor:
    """Recipe for the network that predicts the `M` of a dynamic layer.

    The network has two layers, convolutions in a convolution and dense layers elsewhere.
    It reads the layer's input `x` and returns, at every output position, the difference
    between the parameters of `M(x)` and of the identity. By `kind`, if `M` is diagonal:

        "sphere":       SphereConv(H, input norm) -> BN -> ReLU -> Conv(T) -> BN
        "full_sphere":  SphereConv(H) -> BN -> ReLU -> SphereConv(T) -> BN
        "cnn":          Conv(H) -> BN -> ReLU -> Conv(T) -> BN

    For other similarities (`T^2` outputs if unconstrained) there is no batch norm, except
    after the output of `"cnn"` and in `"full_sphere"`, which has two.

    The first layer has the kernel size, strides, padding and dilation of the convolution;
    the second has stride 1 and `"same"` (in causal layers `"causal"`).

    A recipe has no weights: you can pass one to many layers, and each layer makes a
    network, `layer.comparison.network`.

    Args:
        kind: `"sphere"`, `"full_sphere"`, `"cnn"`, or a function that takes a `Parts` and
            returns a list of layers. `parts.hidden(...)` and `parts.output(...)` return
            the layers above; anything may stand between them. To save models with it,
            register the function with `keras.saving.register_keras_serializable`.
        width: int or `None`, the width of the hidden layer. `None` is half the width of
            the layer, at least 8, and at most the authors' 64 for the diagonal similarity
            and 128 for others; with `start="published"` it is the authors' width.
        output_kernel_size: int, tuple, or `None` for the kernel size of the convolution.
        downsampling: int, the side of the blocks of positions that share one `M`: with 2,
            the first layer has twice the strides, and each block of 2x2 positions of an
            image takes one prediction. Blocks begin at the first position; those at the
            end may be smaller. Not in dilated convolutions.
        pooled: bool, whether to predict one `M` per example, the mean over all positions.
        batch_normalization: `None` for batch norms where the authors have them (see
            above; none in recurrent cells and shared predictors, which do not fit one set
            of moving statistics); `True` for both, `False` for none; or a dictionary of
            arguments of `nsl_keras.layers.BatchNormalization`, for the batch norms of
            `None`. The momentum is 0.9 unless the dictionary has another: an average over
            many steps lags behind weights that change fast.
        start: `"identity"`: `M` is the identity until the first training step, so that the
            layer is the plain one. The scale of the last batch norm starts at zero; without
            batch norm, the last kernel, or, if it compares by angle, a factor for each
            output. `"published"`: as in the authors' code the scale starts at one and the
            last kernel at He's normal times 0.001; `M` starts near the identity.
        kernel_regularizer: Regularizer of the network's kernels; `None` for the
            regularizer of the layer's kernel.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; for
            `downsampling`, `pooled` or `output_kernel_size` in a layer without positions,
            `downsampling` in a dilated convolution or `pooled` in a causal one, when the
            layer is built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> narrow = nsl_keras.predictors.SimilarityPredictor(width=8)
    >>> first = nsl_keras.layers.NeuralSimilarityConv2D(8, 3, predictor=narrow)
    >>> second = nsl_keras.layers.NeuralSimilarityConv2D(16, 3, 2, predictor=narrow)
    >>> tuple(second(first(keras.ops.ones((2, 9, 9, 4)))).shape)
    (2, 3, 3, 16)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and
        Appendix A. The paper mentions no batch norm; the places above are those of the
        authors' code, as is the plain second convolution of `"sphere"`. Predictors of
        vectors are this package's: the authors released none.
    """

    kind: str | Callable[[Parts], Layers] = "sphere"
    width: int | None = None
    output_kernel_size: Any = None
    downsampling: int = 1
    pooled: bool = False
    batch_normalization: bool | dict[str, Any] | None = None
    start: str = "identity"
    kernel_regularizer: Any = None

    def __post_init__(self) -> None:
        if not callable(self.kind):
            validation.one_of(self.kind, KINDS, "kind")
        validation.optional(validation.positive_integer, self.width, "width")
        validation.positive_integer(self.downsampling, "downsampling")
        validation.boolean(self.pooled, "pooled")
        if not isinstance(self.batch_normalization, (bool, dict, type(None))):
            raise ValueError(
                "`batch_normalization` must be None, True, False or a dictionary. "
                f"Received: batch_normalization={self.batch_normalization!r}"
            )
        validation.one_of(self.start, STARTS, "start")

    def network(self, place: Place) -> keras.Sequential:
        """Returns a new network for a layer, built."""
        geometry = place.geometry
        if geometry is None and (
            self.pooled or self.downsampling > 1 or self.output_kernel_size is not None
        ):
            raise ValueError(
                "`pooled`, `downsampling` and `output_kernel_size` of a predictor apply to "
                f"convolutions. Received: predictor={self}"
            )
        if self.downsampling > 1 and geometry["dilation_rate"] != (1,) * place.rank:
            raise ValueError(
                "`downsampling` of a predictor must be 1 in a dilated convolution. "
                f"Received: predictor={self}, dilation_rate={geometry['dilation_rate']}"
            )
        if self.pooled and geometry["padding"] == "causal":
            raise ValueError(
                "`predictor` must not be pooled in a causal layer, which must not look "
                f"ahead. Received: predictor={self}"
            )
        make = KINDS[self.kind] if isinstance(self.kind, str) else self.kind
        layers = make(Parts(self, place))
        if self.pooled:
            _, _, pooling = _LAYERS[place.rank]
            data_format = geometry["data_format"]
            layers.append(pooling(data_format, dtype=place.dtype, name="pooling"))
        return _sequential(layers, place, "predictor")

    def without_batch_norms(self) -> SimilarityPredictor:
        """Returns the recipe without default batch norms; explicit ones stay."""
        if self.batch_normalization is not None:
            return self
        return dataclasses.replace(self, batch_normalization=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SimilarityPredictor):
            return NotImplemented
        return self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash(self.kind)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            field.name: keras.saving.serialize_keras_object(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SimilarityPredictor:
        """Makes the recipe from `get_config()`."""
        arguments = {
            name: keras.saving.deserialize_keras_object(value)
            for name, value in config.items()
        }
        return cls(**arguments)


def _sequential(layers: Layers, place: Place, name: str) -> keras.Sequential:
    network = keras.Sequential(layers, name=name)
    network.dtype_policy = place.dtype  # Else it would cast to the global policy.
    network.build(place.input_shape)
    return network


def published(kind: str = "sphere", **options: Any) -> SimilarityPredictor:
    """Returns a predictor as in the code of the authors of Neural Similarity Learning.

    Its hidden layer has 64 filters for the diagonal similarity and 128 for others, the
    scale of the last batch norm starts at one, and the batch norms have the fixed momentum
    0.999: their moving statistics need thousands of steps.

    Args:
        kind: `"sphere"`, `"full_sphere"` or `"cnn"`.
        options: Arguments of `SimilarityPredictor`; they override the settings above.

    Returns:
        A `SimilarityPredictor`.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.predictors.published().batch_normalization
    {'momentum': 0.999, 'momentum_warmup': False}

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and the
        authors' code.
    """
    settings = {
        "batch_normalization": {"momentum": 0.999, "momentum_warmup": False},
        "start": "published",
        **options,
    }
    return SimilarityPredictor(kind, **settings)


@keras.saving.register_keras_serializable("nsl_keras")
class SharedSimilarityPredictor(keras.layers.Layer):
    """One network that predicts `M` for several dynamic convolutions.

    Pass the same object as `predictor=` to several layers. Each of them makes a small
    convolution, the adaptation, which brings its input to `adapted_filters` channels, with
    the layer's own kernel size, strides, padding and dilation. The shared network follows:

        parameters of M(x) = parameters of I + shared(adaptation(x))

    With 32 adapted filters and hidden layers of the published width, the predictors of
    CNN-9 hold half the parameters of separate ones. The kernels of the layers must have
    the same number of taps; anything the recipe leaves open, such as the width, is taken
    from the first layer built.

    A saved model keeps the sharing. `keras.models.clone_model`, which rebuilds layers one
    by one, gives each layer a separate predictor.

    Args:
        predictor: A `SimilarityPredictor`, or a name of its `kind`.
        adapted_filters: int, the number of channels after each layer's adaptation.
        adaptation_initializer: Initializer of the adaptations' kernels, which have the
            regularizer of the network.
        **kwargs: `name` and `trainable` of `keras.layers.Layer`.

    Input shape:
        The output shape of an adaptation.

    Output shape:
        `(batch, *spatial, outputs)` or `(batch, outputs, *spatial)`, with the `outputs`
        parameters of `M`; `(batch, outputs)` if pooled.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; for layers
            that the network does not fit, when those layers are built.

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

    def __init__(
        self,
        predictor: SimilarityPredictor | str = "sphere",
        adapted_filters: int = 32,
        adaptation_initializer: Any = "he_normal",
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)  # Its layers choose the dtype.
        recipe = get(predictor)
        if not isinstance(recipe, SimilarityPredictor):
            raise ValueError(
                "`predictor` must be a `SimilarityPredictor` or a name of its kind. "
                f"Received: predictor={predictor!r}"
            )
        self.predictor = recipe.without_batch_norms()
        self.adapted_filters = validation.positive_integer(
            adapted_filters, "adapted_filters"
        )
        self.adaptation_initializer = keras.initializers.get(adaptation_initializer)
        self.shared_network: Any = None

    @property
    def downsampling(self) -> int:
        """The side of the blocks of positions that share one `M`."""
        return self.predictor.downsampling

    def network(self, place: Place) -> keras.Sequential:
        """Returns the adaptation of a layer, followed by the shared network."""
        if place.geometry is None:
            raise ValueError(
                "A shared `predictor` must be given to convolutions. "
                f"Received: {self.name!r} for a layer of vectors"
            )
        padding = "causal" if place.geometry["padding"] == "causal" else "same"
        ones = (1,) * place.rank
        if self.shared_network is None:
            changes = {"strides": ones, "padding": padding, "dilation_rate": ones}
            adapted = dataclasses.replace(
                place, channels=self.adapted_filters, geometry=place.geometry | changes
            )
            self._padding = padding
            self.shared_network = self.predictor.network(adapted)
        if padding != self._padding:
            raise ValueError(
                "A shared `predictor` must be given to causal layers alone, or to none. "
                f"Received: {self.name!r} for layers of both kinds"
            )
        convolution, _, _ = _LAYERS[place.rank]
        adaptation = convolution(
            self.adapted_filters,
            **place.geometry,
            use_bias=False,
            kernel_initializer=self.adaptation_initializer,
            kernel_regularizer=self.predictor.kernel_regularizer
            or place.kernel_regularizer,
            dtype=place.dtype,
            name="adaptation",
        )
        return _sequential([adaptation, self], place, "adapted_predictor")

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        return self.shared_network(inputs, training=training)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return tuple(self.shared_network.compute_output_shape(input_shape))

    def get_build_config(self) -> None:
        """Returns `None`: the first layer that uses the predictor makes the network."""

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "predictor": keras.saving.serialize_keras_object(self.predictor),
            "adapted_filters": self.adapted_filters,
            "adaptation_initializer": keras.initializers.serialize(
                self.adaptation_initializer
            ),
        }


#: Predictors that make a network for each layer; others are custom layers.
NETWORK_MAKERS = (SimilarityPredictor, SharedSimilarityPredictor)


@keras.saving.register_keras_serializable("nsl_keras")
class Scale(keras.layers.Layer):
    """Private: multiplies every channel by a weight that starts at zero."""

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

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "axis": self.axis}


def small_normal(scale: float) -> keras.initializers.Initializer:
    """He's normal initializer times `scale`; the authors use 0.1 and 0.001."""
    return keras.initializers.VarianceScaling(
        2.0 * scale**2, mode="fan_in", distribution="untruncated_normal"
    )


def get(identifier: Any) -> SimilarityPredictor | keras.layers.Layer | None:
    """Returns a predictor by the name of its kind, from its serialized form, or unchanged.

    Args:
        identifier: `None`, the name of a kind, a dictionary from
            `keras.saving.serialize_keras_object`, a `SimilarityPredictor`, or a layer.

    Returns:
        A `SimilarityPredictor`, a layer, or `None`.

    Raises:
        ValueError: If the name is unknown; the message lists the known ones.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.predictors.get("cnn").kind
    'cnn'
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, str) and identifier in KINDS:
        return SimilarityPredictor(identifier)
    allowed = (type(None), SimilarityPredictor, keras.layers.Layer)
    if not isinstance(identifier, allowed):
        raise ValueError(
            f"`predictor` must be None, one of {', '.join(map(repr, KINDS))}, a "
            f"`SimilarityPredictor`, or a layer. Received: predictor={identifier!r}"
        )
    return identifier
