"""The pieces that the backbones are made of: convolutions, batch norm with iFiLM."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.neighborhoods.film import InstanceFiLM
from nsl_keras.similarity.convolution import NeuralSimilarityConv2D
from nsl_keras.similarity.predictors import SimilarityPredictor


def convolution(
    filters: int,
    kernel_size: int,
    *,
    similarity: Any = None,
    predictor: Any = None,
    predictor_filters: int | None = None,
    momentum: float = 0.9,
    epsilon: float = 1e-3,
    synchronized: bool = False,
    similarity_options: dict[str, Any] | None = None,
    **options: Any,
) -> keras.layers.Layer:
    """Returns a "same" convolution without bias, plain or with a neural similarity.

    A predictor given by name has the strides, padding and regularizer of the
    convolution, `predictor_filters` hidden filters, and batch norms with `momentum` and
    `epsilon`. `similarity_options` are further arguments of `NeuralSimilarityConv2D`.
    """
    options = {"padding": "same", "use_bias": False, **options}
    if similarity is None and predictor is None:
        return keras.layers.Conv2D(filters, kernel_size, **options)
    if isinstance(predictor, str):
        predictor = SimilarityPredictor(
            kernel_size,
            kind=predictor,
            similarity=similarity or "diagonal",
            hidden_filters=predictor_filters,
            strides=options.get("strides", 1),
            padding=options["padding"],
            momentum=momentum,
            epsilon=epsilon,
            synchronized=synchronized,
            kernel_regularizer=options.get("kernel_regularizer"),
            name=f"{options['name']}_predictor",
        )
    return NeuralSimilarityConv2D(
        filters,
        kernel_size,
        similarity=similarity or "diagonal",
        predictor=predictor,
        **(similarity_options or {}),
        **options,
    )


def normalize(
    inputs: Tensor,
    *,
    momentum: float,
    epsilon: float = 1e-3,
    synchronized: bool,
    film: int | None,
    name: str,
) -> Tensor:
    """Returns batch-normalised inputs, modulated by iFiLM where `film` entries are given.

    Channels stand where `keras.config.image_data_format()` says.
    """
    validation.fraction(momentum, "batch_normalization_momentum")
    validation.positive_number(epsilon, "batch_normalization_epsilon")
    axis = -1 if keras.config.image_data_format() == "channels_last" else 1
    if len(inputs.shape) == 2:
        axis = -1
    outputs = keras.layers.BatchNormalization(
        axis=axis,
        momentum=momentum,
        epsilon=epsilon,
        synchronized=synchronized,
        name=f"{name}_normalization",
    )(inputs)
    if film is not None:
        outputs = InstanceFiLM(film, axis=axis, name=f"{name}_film")(outputs)
    return outputs


_NEEDS_A_SIMILARITY = {
    "similarity_initializer": "identity",
    "similarity_regularizer": None,
    "learn_shape": False,
}


@dataclasses.dataclass(frozen=True)
class NeuralSimilarityUnits:
    """What all layers of a neural similarity network have in common, and its units."""

    similarity: Any
    similarity_initializer: Any
    similarity_regularizer: Any
    predictor: Any
    predictor_filters: int | None
    learn_shape: bool
    momentum: float
    epsilon: float
    synchronized: bool
    kernel_regularizer: Any

    def __post_init__(self) -> None:
        if self.similarity is None and self.predictor is None:
            for argument, default in _NEEDS_A_SIMILARITY.items():
                value = getattr(self, argument)
                if value != default:
                    raise ValueError(
                        f"`{argument}` needs a `similarity` or a `predictor`. Received: "
                        f"{argument}={value!r}, similarity=None, predictor=None"
                    )
        if self.predictor_filters is not None and not isinstance(self.predictor, str):
            raise ValueError(
                "`predictor_filters` is the width of predictors given by name, and must "
                "be None otherwise. Received: "
                f"predictor_filters={self.predictor_filters}, predictor={self.predictor!r}"
            )

    def convolve(
        self,
        inputs: Tensor,
        filters: int,
        kernel_size: int,
        name: str,
        plain: bool = False,
        **options: Any,
    ) -> Tensor:
        """Returns a convolution without bias; unless `plain`, with the similarity.

        Kernels start from the untruncated He normal distribution, as the authors' do.
        """
        neural = {} if plain else self._neural_options()
        return convolution(
            filters,
            kernel_size,
            kernel_initializer=he_normal(),
            kernel_regularizer=self.kernel_regularizer,
            name=f"{name}_convolution",
            **neural,
            **options,
        )(inputs)

    def _neural_options(self) -> dict[str, Any]:
        return {
            "similarity": self.similarity,
            "predictor": self.predictor,
            "predictor_filters": self.predictor_filters,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "synchronized": self.synchronized,
            "similarity_options": {
                argument: getattr(self, argument)
                for argument, default in _NEEDS_A_SIMILARITY.items()
                if getattr(self, argument) != default
            },
        }

    def normalize(self, inputs: Tensor, name: str) -> Tensor:
        """Returns batch-normalised inputs."""
        return normalize(
            inputs,
            momentum=self.momentum,
            epsilon=self.epsilon,
            synchronized=self.synchronized,
            film=None,
            name=name,
        )

    def unit(
        self, inputs: Tensor, filters: int, kernel_size: int, name: str, **options: Any
    ) -> Tensor:
        """Returns convolution, batch norm and ReLU; arguments are those of `convolve`."""
        outputs = self.convolve(inputs, filters, kernel_size, name, **options)
        outputs = self.normalize(outputs, name)
        return keras.layers.ReLU(name=f"{name}_relu")(outputs)

    def dense(self, inputs: Tensor, units: int, name: str, **options: Any) -> Tensor:
        """Returns a fully connected layer without bias, unless `use_bias` is given."""
        return keras.layers.Dense(
            units,
            **{"use_bias": False, **options},
            kernel_initializer=he_normal(),
            kernel_regularizer=self.kernel_regularizer,
            name=name,
        )(inputs)


def he_normal() -> keras.initializers.Initializer:
    """He's normal initializer without truncation."""
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_in", distribution="untruncated_normal"
    )
