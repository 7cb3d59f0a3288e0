"""What all predictors have in common: their arguments, and the network of a kind."""

from __future__ import annotations

import math
import re
from typing import Any

import keras
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor
from nsl_keras.registry import Names
from nsl_keras.similarity import matrices
from nsl_keras.training.normalization import BatchNormalization

#: The networks of the predictors that layers make from a name: functions that are given
#: the predictor, and return its layers.
KINDS = Names("predictor")

#: The least width of a hidden layer that follows its layer's.
LEAST_WIDTH = 8

#: Where `M` starts: at the identity, or near it as the authors' code does.
STARTS = ("identity", "published")

Shape = tuple[int | None, ...]


class Predictor(keras.layers.Layer):
    """Private base: the arguments of all predictors, and their network.

    Its life, with `predictor="sphere"` for example: the layer to be served makes it by that
    kind, and what it is not given is `None`. When the layer is built, it calls `serve`,
    where the predictor takes geometry, similarity, dtype and width from it. Then it builds
    the predictor, which makes the kind's network (`_build_network`), and in each call hands
    it the inputs: the outputs are the parameters of `M`.
    """

    #: Whether one predictor may serve several layers, with an adaptation for each.
    serves_several = False
    # What becomes of a prediction: `SimilarityPredictor` has these as arguments. One `call`
    # for all keeps the way of a batch short.
    pooled = False
    downsampling = 1
    #: The batch norms of the network, where it has them.
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
        self.similarity = validation.optional(matrices.get, similarity)
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
        if self.similarity is not None and not self.similarity.takes_predictor:
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
        """Makes and builds the layers of the kind, each an attribute under its name.

        Files know layers by these attributes. A name that Keras gave, which counts all
        layers of the process, gives way to the layer's place.
        """
        self.similarity = self.similarity or matrices.get("diagonal")
        if getattr(self, self._width) is None:  # Of a predictor without a layer.
            setattr(self, self._width, self._published_width)
        structure = self.similarity.for_kernel_size(kernel_size)
        #: The number of parameters of `M`.
        self.outputs = math.prod(structure.parameter_shape(taps))
        layers = KINDS[self.kind](self)
        self._network = tuple(
            f"layer_{place}" if _is_named_by_keras(layer) else layer.name
            for place, layer in enumerate(layers)
        )
        if len(set(self._network)) < len(layers):
            raise ValueError(
                f"`kind` {self.kind!r} must return layers with names of their own, and "
                "take `hidden` and `output` once each. Received: layers "
                f"{', '.join(self._network)}"
            )
        reserved = [name for name in self._network if self._means_another_thing(name)]
        if reserved:
            raise ValueError(
                f"`kind` {self.kind!r} must name its layers otherwise than attributes of "
                f"the predictor. Received: layers {', '.join(reserved)}"
            )
        for name, layer in zip(self._network, layers, strict=True):
            setattr(self, name, layer)
            layer.build(shape)
            shape = tuple(layer.compute_output_shape(shape))
        rewiring.pass_on_frozen(self)

    def _means_another_thing(self, name: str) -> bool:
        """Whether an attribute of this name is no layer of the network."""
        if name in ("hidden_normalization", "output_normalization"):
            return False
        own = vars(self).get(name)
        is_set = own is not None and not isinstance(own, keras.layers.Layer)
        return is_set or hasattr(type(self), name)

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
            "similarity": validation.optional(matrices.serialize, self.similarity),
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


def _is_named_by_keras(layer: keras.layers.Layer) -> bool:
    """Whether a layer's name is that of its class, as `conv2d_3` is."""
    name = re.sub(r"_\d+$", "", layer.name).replace("_", "")
    return name == type(layer).__name__.lower()


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


def small_normal(scale: float) -> keras.initializers.Initializer:
    """He's normal initializer times `scale`; the authors use 0.1 and 0.001."""
    return keras.initializers.VarianceScaling(
        2.0 * scale**2, mode="fan_in", distribution="untruncated_normal"
    )
