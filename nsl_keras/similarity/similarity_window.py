"""Neural similarities of windows that slide over an input: predictors, and folding.

One rule: whatever predicts `M` sees the input at the very positions that the window
stands at, so it is given the window's own strides, padding and dilation.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.similarity.convolution_base import Window
from nsl_keras.similarity.neural_similarity import NeuralSimilarity
from nsl_keras.similarity.predictors import (
    KINDS,
    SharedSimilarityPredictor,
    SimilarityPredictor,
)


class SimilarityWindow(NeuralSimilarity, Window):
    """Private base of convolutions and depthwise convolutions with a similarity."""

    #: The Keras layer that the static layer folds to.
    plain: type[keras.layers.Layer]
    predictor: Any

    def _predictor_kinds(self) -> tuple[str, ...]:
        return KINDS

    def _make_predictor(self, kind: str) -> keras.layers.Layer:
        return SimilarityPredictor(
            self.kernel_size,
            kind=kind,
            similarity=self.similarity,
            strides=self.strides,
            padding=self.padding,
            data_format=self.data_format,
            dilation_rate=self.dilation_rate,
            kernel_regularizer=self._predictor_kernel_regularizer(),
            dtype=self.dtype_policy,
            name="predictor",
        )

    def _predictor_kernel_regularizer(self) -> Any:
        raise NotImplementedError

    def _build_predictor(self, input_shape: tuple[int | None, ...]) -> None:
        """Builds what predicts `M`, and checks what comes out of it."""
        self.adaptation = None
        if self.predictor is None:
            return
        shape = tuple(input_shape)
        self._check_predictor_geometry()
        if isinstance(self.predictor, SharedSimilarityPredictor):
            self.adaptation = self.predictor.adaptation(
                self.kernel_size,
                strides=self.strides,
                padding=self.padding,
                dilation_rate=self.dilation_rate,
                dtype=self.dtype_policy,
                name="adaptation",
            )
            self.adaptation.build(shape)
            shape = self.adaptation.compute_output_shape(shape)
        if not self.predictor.built:
            self.predictor.build(shape)
        self._check_prediction_shape(
            tuple(self.predictor.compute_output_shape(shape)), input_shape
        )

    def _check_predictor_geometry(self) -> None:
        """Raises where a predictor has the right output shape and the wrong meaning."""
        if not isinstance(self.predictor, SimilarityPredictor):
            return
        if self.predictor.data_format != self.data_format:
            raise ValueError(
                f"`predictor` must have data_format={self.data_format!r}, as the layer. "
                f"Received: predictor.data_format={self.predictor.data_format!r}"
            )
        if self.padding == "causal" != self.predictor.padding:
            raise ValueError(
                "`predictor` must have padding='causal' in a causal layer, or it would "
                f"look ahead. Received: predictor.padding={self.predictor.padding!r}"
            )
        if self.padding == "causal" and self.predictor.pooled:
            raise ValueError(
                "`predictor` must not be pooled in a causal layer, or it would look "
                "ahead. Received: predictor.pooled=True"
            )

    def _check_prediction_shape(
        self, received: tuple[int | None, ...], input_shape: tuple[int | None, ...]
    ) -> None:
        outputs = math.prod(self._structure.parameter_shape(self._matrix_size))
        positions = self.compute_output_shape(input_shape)
        everywhere = (
            (*positions[:-1], outputs)
            if self.data_format == "channels_last"
            else (positions[0], outputs, *positions[2:])
        )
        an_example = (positions[0], outputs)
        if received not in (everywhere, an_example):
            raise ValueError(
                "`predictor` must map the input to one set of similarity parameters "
                f"per output position, of shape {everywhere} for the input shape "
                f"{tuple(input_shape)}, or to one per example, of shape {an_example}. "
                f"Received: an output of shape {received}"
            )

    def _predict(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Returns the parameters of `M`, channels last: `(batch, *positions, ...)`.

        One `M` per example has positions of size 1.
        """
        if self.adaptation is not None:
            inputs = self.adaptation(inputs)
        prediction = self.predictor(inputs, training=training)
        if len(prediction.shape) == 2:
            shape = ops.shape(prediction)
            prediction = ops.reshape(
                prediction, (shape[0], *[1] * self.rank, prediction.shape[1])
            )
        elif self.data_format == "channels_first":
            prediction = ops.moveaxis(prediction, 1, -1)
        return self._similarity_at(prediction, self.compute_dtype)

    def _compare_at_positions(self, inputs: Tensor, parameters: Tensor) -> Tensor:
        """Returns `W^T D M(p) x_p` for the predicted parameters at every position."""
        if self.data_format == "channels_first":
            inputs = ops.moveaxis(inputs, 1, -1)
        kernel = self._unflatten(self._shaped(self._flatten(self.kernel)))
        outputs = self._compare(inputs, kernel, parameters)
        if self.data_format == "channels_first":
            outputs = ops.moveaxis(outputs, -1, 1)
        return outputs

    def _compare(self, inputs: Tensor, kernel: Tensor, parameters: Tensor) -> Tensor:
        """The dynamic comparison of the kind of window, channels last."""
        raise NotImplementedError

    def _serialized_predictor(self) -> dict[str, Any] | None:
        config = super()._serialized_predictor()
        if config is not None and isinstance(self.predictor, SharedSimilarityPredictor):
            # Keras's own key for objects that several configs share. It is set only from
            # the second config on where the object stands inside a layer (Keras 3.15),
            # and then a loaded model would have two of them.
            config["shared_object_id"] = id(self.predictor)
        return config

    def _plain_layer(self) -> keras.layers.Layer:
        # The arguments of the plain layer are those that this one has besides its
        # similarity.
        similarity = self._similarity_config()
        config = {k: v for k, v in self.get_config().items() if k not in similarity}
        layer = self.plain.from_config(config)
        shape: list[int | None] = [None] * (self.rank + 2)
        shape[self.channel_axis] = self.input_spec.axes[self.channel_axis]
        layer.build(tuple(shape))
        return layer
