"""One predictor for several dynamic convolutions."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import keras

from nsl_keras import nesting, validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity import predictors


@keras.saving.register_keras_serializable("nsl_keras")
class SharedSimilarityPredictor(keras.layers.Layer):
    """One network that predicts `M` for several dynamic convolutions.

    Pass the same object as `predictor=` to several layers, whose kernels must have the same
    size. In each layer a small convolution, the adaptation, maps the input to
    `adapted_filters` channels with the layer's own kernel size, strides, padding and
    dilation. The shared network follows:

        parameters of M(x) = parameters of I + shared(adaptation(x))

    The first layer built decides what the recipe leaves open, such as the width.
    Adaptations have the regularizer of their layer's kernel; the shared kernels have none.

    A `.keras` file keeps the sharing. `.h5` files and `to_json`, which describe layers one
    by one, give each layer a separate predictor, and `keras.models.clone_model` raises an
    error: copy the model by saving and loading it.

    Args:
        predictor: A `SimilarityPredictor`, or a name of its `kind`.
        adapted_filters: int, the number of channels after each layer's adaptation.
        share_adaptations: bool, whether layers of equal input size, kernel size, strides,
            padding and dilation share one adaptation. Unknown sizes count as equal.
        **kwargs: `name` and `trainable` of `keras.layers.Layer`.

    Input shape:
        The output shape of an adaptation.

    Output shape:
        `(batch, *spatial, outputs)` or `(batch, outputs, *spatial)`, with the `outputs`
        parameters of `M`; `(batch, outputs)` if pooled.

    Raises:
        ValueError: For arguments outside these ranges, and for layers that do not fit.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> shared = nsl_keras.predictors.SharedSimilarityPredictor()
    >>> first = nsl_keras.layers.NeuralSimilarityConv2D(8, 3, predictor=shared)
    >>> second = nsl_keras.layers.NeuralSimilarityConv2D(16, 3, 2, predictor=shared)
    >>> tuple(second(first(keras.ops.ones((2, 9, 9, 4)))).shape)
    (2, 3, 3, 16)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.2 and Figure
        3(b). The paper gives no width of the adaptation; 32 filters save the "nearly half"
        of Section 7.1.
    """

    def __init__(
        self,
        predictor: predictors.SimilarityPredictor | str = "sphere",
        adapted_filters: int = 32,
        share_adaptations: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)  # Its layers choose the dtype.
        recipe: Any = predictors.get(predictor)
        is_recipe = isinstance(recipe, predictors.SimilarityPredictor)
        demand = "a `SimilarityPredictor` or a name of its kind"
        validation.require(is_recipe, "predictor", demand, predictor)
        self.predictor: predictors.SimilarityPredictor = recipe.without_batch_norms()
        self.adapted_filters = validation.positive_integer(
            adapted_filters, "adapted_filters"
        )
        self.share_adaptations = validation.boolean(share_adaptations, "share_adaptations")
        self.shared_network: Any = None
        # Hidden from Keras and from walks: they belong to the layers, which save them.
        self._hidden = types.SimpleNamespace(adaptations={})

    def make_network(self, context: predictors.LayerContext) -> keras.Sequential:
        """Returns the adaptation of a layer, followed by the shared network."""
        demand = "given to convolutions if it is shared"
        validation.require(context.rank > 0, "predictor", demand, self.name)
        geometry = context.geometry
        kernel_size, ones = geometry["kernel_size"], (1,) * context.rank
        padding = "causal" if geometry["padding"] == "causal" else "same"
        if self.shared_network is None:
            shape = list(context.input_shape)
            shape[context.channel_axis] = self.adapted_filters
            changes = {"strides": ones, "padding": padding, "dilation_rate": ones}
            adapted = dataclasses.replace(
                context,
                input_shape=tuple(shape),
                geometry=geometry | changes,
                kernel_regularizer=None,
                is_depthwise=False,
            )
            # A loaded model may build its layers in another order.
            self.predictor = dataclasses.replace(
                self.predictor,
                width=self.predictor.hidden_width(adapted),
                downsampling=self.predictor.block_side(adapted),
            )
            self._shared = padding, kernel_size
            self.shared_network = self.predictor.make_network(adapted)
            nesting.pass_on_frozen(self)
        fits = (padding, kernel_size) == self._shared
        demand = "given to layers with the same kernel size, all causal or none"
        received = f"{self.name} for kernel_size={kernel_size}, padding={padding!r}"
        validation.require(fits, "predictor", demand, received)
        alike = str((context.input_shape[1:], geometry))
        adaptation = self._hidden.adaptations.get(alike) if self.share_adaptations else None
        if adaptation is None:
            start = {"kernel_initializer": "he_normal"}
            adaptation = self._hidden.adaptations[alike] = context.layer(
                "adaptation", self.adapted_filters, geometry, **start
            )
        return context.sequential([adaptation, self], "adapted_predictor")

    def call(self, inputs: Tensor) -> Tensor:
        return self.shared_network(inputs)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(self.shared_network.compute_output_shape(input_shape))

    def get_build_config(self) -> None:
        """Returns `None`, because the first layer that uses it makes the network."""

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "predictor": keras.saving.serialize_keras_object(self.predictor),
            "adapted_filters": self.adapted_filters,
            "share_adaptations": self.share_adaptations,
        }
