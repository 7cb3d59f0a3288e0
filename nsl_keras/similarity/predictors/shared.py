"""One predictor for several layers, each with an adaptation of its own."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.similarity import matrices
from nsl_keras.similarity.predictors.base import Predictor
from nsl_keras.similarity.predictors.convolutional import (
    PLAIN_CONVOLUTIONS,
    SimilarityPredictor,
)


@keras.saving.register_keras_serializable("nsl_keras")
class SharedSimilarityPredictor(SimilarityPredictor):
    """One predictor for several dynamic layers, each with its own adaptation.

    Give the same object as `predictor=` to several layers. Each of them makes a small
    convolution of its own that brings its input to `adapted_filters` channels, with the
    layer's own kernel size, strides, padding and dilation, followed by the shared network,
    a `SimilarityPredictor` of stride 1, which predicts `M` for all of them:

        M = I + shared(adaptation(x))

    With 32 adapted filters and hidden layers of the published width, the predictors of
    CNN-9 hold half the parameters of disjoint ones. The layers' kernels must have the same
    number of taps.

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
        return PLAIN_CONVOLUTIONS[len(layer.kernel_size)](
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
