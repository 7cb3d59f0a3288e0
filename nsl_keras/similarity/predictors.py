"""Small networks that predict the similarity matrix of a dynamic layer from its input.

A *kind* names the network: a function that returns its layers. `SimilarityPredictor` makes
them convolutions, at the positions that the layer served stands at;
`DenseSimilarityPredictor` makes them dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.normalization import BatchNormalization
from nsl_keras.similarity import matrices
from nsl_keras.similarity.sphere import (
    SphereConv1D,
    SphereConv2D,
    SphereConv3D,
    SphereDense,
)

_SPHERE = {1: SphereConv1D, 2: SphereConv2D, 3: SphereConv3D}
_PLAIN = {1: keras.layers.Conv1D, 2: keras.layers.Conv2D, 3: keras.layers.Conv3D}

Network = Callable[["Predictor"], list[keras.layers.Layer | None]]

#: The networks of the predictors that layers make from a name.
KINDS: dict[str, Network] = {}


def register(name: str) -> Callable[[Network], Network]:
    """Returns a decorator that gives a predictor's network a name.

    Layers then take the name as `predictor=`, and predictors as `kind=`. The function is
    given the predictor and returns its layers, called one after the other; entries that
    are `None` are left out. Each becomes an attribute of the predictor under its own name.
    It may make them with these methods, or in any other way:

    * `predictor.hidden(normalize)` and `predictor.output(normalize)`: a convolution or
      dense layer to the hidden width, or to the `predictor.outputs` parameters of `M`; by
      angle, with the norms `"both"`, `"input"` or `"kernel"`, or plain for `None`;
    * `predictor.normalization(place, by_default)`: a batch norm, or `None`.

    A predictor's prediction must stand at the positions of the layer served. The name goes
    into saved models; a process that loads one must have registered it.

    Args:
        name: The name.

    Raises:
        ValueError: If the name is one of the package's own.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> @nsl_keras.predictors.register("tanh")
    ... def tanh(predictor):
    ...     return [predictor.hidden("input"), keras.layers.Activation("tanh", name="tanh"),
    ...             predictor.output(None)]
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, predictor="tanh")
    >>> tuple(layer(keras.ops.ones((1, 8, 8, 2))).shape)
    (1, 6, 6, 4)
    """
    if getattr(KINDS.get(name), "__module__", None) == __name__:
        raise ValueError(
            "`name` must not be that of one of the package's predictors. "
            f"Received: name={name!r}"
        )

    def decorate(network: Network) -> Network:
        KINDS[name] = network
        return network

    return decorate


@register("sphere")
def _sphere(predictor: Predictor) -> list[keras.layers.Layer | None]:
    normalized = predictor.similarity.predictor_batch_normalization
    return [
        predictor.hidden("input"),
        predictor.normalization("hidden", normalized),
        keras.layers.ReLU(name="hidden_relu", dtype=predictor.dtype_policy),
        predictor.output(None),
        predictor.normalization("output", normalized),
    ]


@register("full_sphere")
def _full_sphere(predictor: Predictor) -> list[keras.layers.Layer | None]:
    return [
        predictor.hidden("both"),
        predictor.normalization("hidden", True),
        keras.layers.ReLU(name="hidden_relu", dtype=predictor.dtype_policy),
        predictor.output("both"),
        predictor.normalization("output", True),
    ]


@register("mlp")
@register("cnn")
def _plain(predictor: Predictor) -> list[keras.layers.Layer | None]:
    normalized = predictor.similarity.predictor_batch_normalization
    return [
        predictor.hidden(None),
        predictor.normalization("hidden", normalized),
        keras.layers.ReLU(name="hidden_relu", dtype=predictor.dtype_policy),
        predictor.output(None),
        predictor.normalization("output", True),
    ]


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


def small_normal(scale: float) -> keras.initializers.Initializer:
    """He's normal initializer times `scale`; the authors use 0.1 and 0.001."""
    return keras.initializers.VarianceScaling(
        2.0 * scale**2, mode="fan_in", distribution="untruncated_normal"
    )


class Predictor(keras.layers.Layer):
    """Private base: the arguments of all predictors, and their network."""

    #: Whether one predictor may serve several layers, with an adaptation for each.
    serves_several = False
    pooled = False
    hidden_normalization: Any = None
    output_normalization: Any = None
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
        epsilon: float,
        synchronized: bool,
        hidden_kernel_initializer: Any,
        output_kernel_initializer: Any,
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
        self.epsilon = validation.positive_number(epsilon, "epsilon")
        self.synchronized = synchronized
        self.hidden_kernel_initializer = keras.initializers.get(
            hidden_kernel_initializer or small_normal(0.1)
        )
        self.output_kernel_initializer = keras.initializers.get(
            output_kernel_initializer or small_normal(0.001)
        )
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self._dtype_is_given = kwargs.get("dtype") is not None
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
        """
        if not (self._dtype_is_given or self.built):
            self.dtype_policy = layer.dtype_policy
        self._take(layer, "similarity", compare=False)
        return None

    def _take(self, layer: keras.layers.Layer, name: str, compare: bool = True) -> None:
        own, of_layer = getattr(self, name), getattr(layer, name)
        if own is None:
            setattr(self, name, of_layer)
        elif compare and own != of_layer:
            raise ValueError(
                f"`predictor` must have {name}={of_layer!r}, as the layer, or None. "
                f"Received: predictor.{name}={own!r}"
            )

    def _build_network(self, taps: int, kernel_size: tuple[int, ...], shape: Any) -> None:
        """Makes and builds the layers of the kind, each an attribute under its name."""
        self.similarity = self.similarity or matrices.get("diagonal")
        structure = self.similarity.for_kernel_size(kernel_size)
        #: The number of parameters of `M`.
        self.outputs = math.prod(structure.parameter_shape(taps))
        layers = [layer for layer in KINDS[self.kind](self) if layer is not None]
        self._network = tuple(layer.name for layer in layers)
        for layer in layers:
            setattr(self, layer.name, layer)
            layer.build(shape)
            shape = tuple(layer.compute_output_shape(shape))

    def hidden(self, normalize: str | None) -> keras.layers.Layer:
        """Returns a layer from the input to the hidden width; by angle, or plain."""
        raise NotImplementedError

    def output(self, normalize: str | None) -> keras.layers.Layer:
        """Returns a layer to the parameters of `M`; by angle, or plain."""
        raise NotImplementedError

    def normalization(self, place: str, by_default: bool) -> keras.layers.Layer | None:
        """Returns the batch norm after a layer, `None` where there is to be none."""
        wanted = self.batch_normalization
        if not (by_default if wanted is None else wanted):
            return None
        return BatchNormalization(
            axis=1 if getattr(self, "data_format", None) == "channels_first" else -1,
            momentum=self.momentum,
            epsilon=self.epsilon,
            synchronized=self.synchronized,
            dtype=self.dtype_policy,
            name=f"{place}_normalization",
        )

    def _options(self, place: str, name: str) -> dict[str, Any]:
        return {
            "use_bias": False,
            "kernel_initializer": getattr(self, f"{place}_kernel_initializer"),
            "kernel_regularizer": self.kernel_regularizer,
            "dtype": self.dtype_policy,
            "name": f"{place}_{name}",
        }

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        outputs = inputs
        for name in self._network:
            # Keras hands `training` on to the batch norms.
            outputs = getattr(self, name)(outputs)
        return self._pool(outputs) if self.pooled else outputs

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "kind": self.kind,
            "similarity": _unless_none(matrices.serialize, self.similarity),
            "batch_normalization": self.batch_normalization,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "synchronized": self.synchronized,
            "hidden_kernel_initializer": keras.initializers.serialize(
                self.hidden_kernel_initializer
            ),
            "output_kernel_initializer": keras.initializers.serialize(
                self.output_kernel_initializer
            ),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


@keras.saving.register_keras_serializable("nsl_keras")
class SimilarityPredictor(Predictor):
    """Predicts, at every output position of a convolution, what `M` adds to the identity.

    Two layers with the kernel size of the convolution they serve. By `kind`, for the
    diagonal similarity (`T` outputs, the number of taps):

        "sphere":       SphereConv(64, input norm) -> BN -> ReLU -> Conv(T) -> BN
        "full_sphere":  SphereConv(64) -> BN -> ReLU -> SphereConv(T) -> BN
        "cnn":          Conv(64) -> BN -> ReLU -> Conv(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others the hidden layer has 128
    filters, and there is no batch norm, except after the output of `"cnn"` and in
    `"full_sphere"`, which has both.

    The first layer has the strides, padding and dilation of the convolution, the second
    stride 1 and `"same"` (`"causal"` in a causal predictor), so that the prediction has
    exactly the output's positions. What is left `None` of these is taken from the layer
    that is served, when that is built: `predictor=SimilarityPredictor(momentum=0.9)`.

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
        hidden_filters: int or `None`, the width of the hidden layer; `None` is 64 for
            the diagonal similarity and 128 for others.
        strides: int or tuple of ints; 1 without a layer.
        padding: `"valid"`, `"same"` or, in 1D, `"causal"`; `"valid"` without a layer.
        data_format: `"channels_last"` or `"channels_first"`;
            `keras.config.image_data_format()` without a layer.
        dilation_rate: int or tuple of ints; 1 without a layer.
        pooled: bool, whether to predict one `M` per example, the mean of what is predicted
            at its positions, instead of one per position.
        batch_normalization: bool or `None`: `False` for no batch norm at all; `True` for
            both; `None` for those named above.
        momentum: float in [0, 1), momentum of the batch norms (the authors: 0.999). In
            trainings of a few hundred steps take 0.9: until the moving statistics have
            settled, validation is far below training.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1, as in the authors' code.
        output_kernel_initializer: Initializer of the second kernel; `None` is He's
            normal times 0.001, which starts `M` close to the identity.
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
            other than that of the layer served, or none at all, at build.

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
        batch_normalization: bool | None = None,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kind=kind,
            similarity=similarity,
            batch_normalization=batch_normalization,
            momentum=momentum,
            epsilon=epsilon,
            synchronized=synchronized,
            hidden_kernel_initializer=hidden_kernel_initializer,
            output_kernel_initializer=output_kernel_initializer,
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
        self.pooled = pooled

    def serve(self, layer: keras.layers.Layer) -> keras.layers.Layer | None:
        for name in ("kernel_size", "strides", "padding", "data_format", "dilation_rate"):
            self._take(layer, name)
        self._refuse_to_look_ahead(layer)
        return super().serve(layer)

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
        taps = math.prod(self.kernel_size)
        self._build_network(taps, self.kernel_size, tuple(input_shape))

    def hidden(self, normalize: str | None) -> keras.layers.Layer:
        filters = self.hidden_filters or self.similarity.predictor_filters
        return self._convolution(
            "hidden",
            filters,
            normalize,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
        )

    def output(self, normalize: str | None) -> keras.layers.Layer:
        padding = "causal" if self.padding == "causal" else "same"
        return self._convolution("output", self.outputs, normalize, padding=padding)

    def _convolution(
        self, place: str, filters: int, normalize: str | None, **geometry: Any
    ) -> keras.layers.Layer:
        options = {
            **self._options(place, "convolution"),
            **geometry,
            "data_format": self.data_format,
        }
        rank = len(self.kernel_size)
        if normalize is None:
            return _PLAIN[rank](filters, self.kernel_size, **options)
        return _SPHERE[rank](filters, self.kernel_size, normalize=normalize, **options)

    def _pool(self, outputs: Tensor) -> Tensor:
        first = 1 if self.data_format == "channels_last" else 2
        return ops.mean(outputs, axis=tuple(range(first, first + len(self.kernel_size))))

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        if self.pooled:
            return (input_shape[0], self.outputs)
        shape = tuple(input_shape)
        for name in self._network:
            shape = tuple(getattr(self, name).compute_output_shape(shape))
        return shape

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
        **kwargs: `data_format`, `pooled`, `batch_normalization`, `momentum`, `epsilon`,
            `synchronized`, `hidden_kernel_initializer`, `output_kernel_initializer` and
            `kernel_regularizer` (of the adaptations' kernels too) of
            `SimilarityPredictor`; `name`, `dtype`, `trainable` of `keras.layers.Layer`.

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
            **kwargs,
        )
        self.adapted_filters = validation.positive_integer(
            adapted_filters, "adapted_filters"
        )
        self.adaptation_initializer = keras.initializers.get(adaptation_initializer)

    def serve(self, layer: keras.layers.Layer) -> keras.layers.Layer | None:
        self._take(layer, "kernel_size", compare=False)
        self._take(layer, "data_format")
        if self.padding is None:
            self.padding = "causal" if layer.padding == "causal" else "same"
        if layer.padding == "causal" != self.padding:
            raise ValueError(
                "`predictor` must have padding='causal' in a causal layer, or it would "
                f"look ahead. Received: predictor.padding={self.padding!r}"
            )
        if len(layer.kernel_size) != len(self.kernel_size):
            raise ValueError(
                f"`predictor` must have a kernel of {len(layer.kernel_size)} axes here. "
                f"Received: predictor.kernel_size={self.kernel_size}"
            )
        self._refuse_to_look_ahead(layer)
        Predictor.serve(self, layer)
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

        "sphere":       SphereDense(64, input norm) -> BN -> ReLU -> Dense(T) -> BN
        "full_sphere":  SphereDense(64) -> BN -> ReLU -> SphereDense(T) -> BN
        "mlp":          Dense(64) -> BN -> ReLU -> Dense(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others the hidden layer has 128
    units, and there is no batch norm, except after the output of `"mlp"` and in
    `"full_sphere"`, which has both. `T` is `block_size`, or the width of the input.

    Args:
        block_size: int or `None`, as in the layer served; `None` is that of the layer
            served.
        kind: `"sphere"`, `"full_sphere"`, `"mlp"` (`"cnn"` is the same), or a name of your
            own from `nsl_keras.predictors.register`.
        similarity: Name or `Similarity` whose parameters are predicted; `None` is that of
            the layer served, and `"diagonal"` without one.
        hidden_units: int or `None`, the width of the hidden layer; `None` is 64 for the
            diagonal similarity and 128 for others.
        batch_normalization: bool or `None`: `False` for no batch norm at all, which a
            recurrent cell needs; `True` for both; `None` for those named above.
        momentum: float in [0, 1), momentum of the batch norms.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1.
        output_kernel_initializer: Initializer of the second kernel; `None` is He's
            normal times 0.001, which starts `M` close to the identity.
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

    def __init__(
        self,
        block_size: int | None = None,
        kind: str = "sphere",
        similarity: Any = None,
        hidden_units: int | None = None,
        batch_normalization: bool | None = None,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kind=kind,
            similarity=similarity,
            batch_normalization=batch_normalization,
            momentum=momentum,
            epsilon=epsilon,
            synchronized=synchronized,
            hidden_kernel_initializer=hidden_kernel_initializer,
            output_kernel_initializer=output_kernel_initializer,
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

    def serve(self, layer: keras.layers.Layer) -> keras.layers.Layer | None:
        self._take(layer, "block_size")
        return super().serve(layer)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        taps = self.block_size or features
        self._build_network(taps, (taps,), tuple(input_shape))

    def hidden(self, normalize: str | None) -> keras.layers.Layer:
        units = self.hidden_units or self.similarity.predictor_filters
        return self._dense("hidden", units, normalize)

    def output(self, normalize: str | None) -> keras.layers.Layer:
        return self._dense("output", self.outputs, normalize)

    def _dense(self, place: str, units: int, normalize: str | None) -> keras.layers.Layer:
        options = self._options(place, "dense")
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
