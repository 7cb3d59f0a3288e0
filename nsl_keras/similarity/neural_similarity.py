"""A mixin for Keras layers with one kernel: `W^T M x` in place of `W^T x`."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import keras
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity import bilinear_form
from nsl_keras.similarity.kernels import FloatKernel

#: The attributes of a convolution that its predictor network needs.
_GEOMETRY = ("kernel_size", "strides", "padding", "dilation_rate", "data_format")


class NeuralSimilarity(bilinear_form.WithSimilarity, FloatKernel):
    """Private mixin, in front of a Keras layer with one kernel: `W^T M x`.

    A subclass names the Keras layer as `plain`, and computes the product with a predicted
    `M(x)` in `dynamic_product(inputs, kernel, training)`.
    """

    plain: type[keras.layers.Layer]
    #: The axes of the kernel that number its filters.
    filter_axes: tuple[int, ...] = (-1,)
    dynamic_product: Any
    product = bilinear_form.product
    # Read-only: the `BilinearForm` holds the values.
    similarity = property(attrgetter("bilinear_form.similarity"))
    similarity_initializer = property(attrgetter("bilinear_form.similarity_initializer"))
    similarity_regularizer = property(attrgetter("bilinear_form.similarity_regularizer"))
    similarity_constraint = property(attrgetter("bilinear_form.similarity_constraint"))
    predictor = property(attrgetter("bilinear_form.predictor"))
    learn_shape = property(attrgetter("bilinear_form.learn_shape"))
    shape_threshold = property(attrgetter("bilinear_form.shape_threshold"))
    shared_by = property(attrgetter("bilinear_form.shared_by"))

    def __init__(
        self,
        *args: Any,
        similarity: Any = "diagonal",
        similarity_initializer: Any = "identity",
        similarity_regularizer: Any = None,
        similarity_constraint: Any = None,
        predictor: Any = None,
        learn_shape: bool = False,
        shape_threshold: float = 0.5,
        shared_by: str | int = "layer",
        kernel_trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._kernel_trainable = validation.boolean(kernel_trainable, "kernel_trainable")
        self.bilinear_form = bilinear_form.BilinearForm(
            similarity,
            similarity_initializer,
            similarity_regularizer,
            similarity_constraint,
            predictor,
            learn_shape,
            shape_threshold,
            shared_by,
            dtype=self.dtype_policy,
            name="bilinear_form",
        )
        if self.predictor is not None and getattr(self, "groups", 1) != 1:
            raise ValueError(
                "`groups` must be 1 with a predictor. "
                f"Received: groups={self.groups}, predictor={predictor!r}"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        width = self.compute_output_shape(input_shape)[self.channel_axis]
        geometry = self.predicting_geometry() if hasattr(self, "kernel_size") else None
        self.bilinear_form.build(
            tuple(input_shape),
            self.kernel.shape,
            self.kernel.regularizer,
            width,
            geometry,
            self.filter_axes,
        )
        rewiring.pass_on_frozen(self)
        if not self._kernel_trainable:
            self._apply_kernel_trainable()

    def predicting_geometry(self) -> dict[str, Any]:
        """Returns the geometry of a convolution, as its predictor network needs it."""
        return {name: getattr(self, name) for name in _GEOMETRY}

    def predicting_shape(self, input_shape: Any) -> Any:
        """Returns a shape with the positions at which a dynamic layer predicts `M`."""
        return self.compute_output_shape(input_shape)

    def predicted_matrices(self, inputs: Tensor) -> Tensor:
        """Returns the `M(x)` that a dynamic layer uses at each position.

        The positions are those of the output, or of a transposed convolution's input.

        Args:
            inputs: Batch of the layer's inputs.

        Returns:
            Tensor of shape `(batch, *positions, T, T)`, without `D`; every size of
            `positions` is 1 with a pooled predictor.

        Raises:
            ValueError: If the layer is static, or not built yet.
        """
        if self.predictor is None:
            raise ValueError(
                "`predicted_matrices` needs a dynamic similarity: layer "
                f"{self.name!r} has a static one, `similarity_matrix`. "
                "Received: predictor=None"
            )
        validation.built(self, "predicted_matrices")
        inputs = ops.cast(inputs, self.compute_dtype)
        shape = list(self.predicting_shape(tuple(inputs.shape)))
        del shape[self.channel_axis]
        parameters = self.bilinear_form.parameters(
            inputs, positions=shape[1:], penalized=False
        )
        return self.similarity.matrix(parameters, self.bilinear_form.taps)

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`, without `D`: `(T, T)`, or `(c T, c T)` if full.

        If `shared_by` is not `"layer"`, an axis in front numbers blocks of channels, or
        filters.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        return self.bilinear_form.similarity_matrix

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for each tap that is kept, 0 for the others.

        Raises:
            ValueError: If the layer does not learn its kernel's shape, or is not built.
        """
        return self.bilinear_form.learned_shape

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `M^T D W`, in the shape of `kernel`; without a learned shape `M^T W`.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self.bilinear_form.require_static("equivalent_kernel")
        return self.bilinear_form.equivalent_kernel(ops.convert_to_tensor(self.kernel))

    def fold(self) -> keras.layers.Layer:
        """Returns a new plain Keras layer that computes the same.

        This layer does not change, and the two share no weights.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self.bilinear_form.require_static("fold")
        config = rewiring.with_functions(self, super().get_config())
        plain = self.plain.from_config(config)
        plain.build(self.get_build_config()["input_shape"])
        # NumPy copies: on JAX the two layers would share buffers, which training donates.
        plain.kernel.assign(ops.convert_to_numpy(self.equivalent_kernel))
        if self.bias is not None:
            plain.bias.assign(ops.convert_to_numpy(self.bias))
        rewiring.copy_activations(self, plain)
        if isinstance(plain.activation, keras.layers.Layer) and not self.kernel_trainable:
            plain.activation.trainable = plain.trainable  # Like kernel and bias.
        return plain

    @keras.layers.Layer.trainable.setter
    def trainable(self, value: bool) -> None:
        # While the layer is frozen, so is its kernel: remember how it was.
        self._kernel_trainable = self.kernel_trainable
        keras.layers.Layer.trainable.fset(self, value)

    @property
    def kernel_trainable(self) -> bool:
        """Whether kernel, bias and activation are trained, or the similarity alone."""
        if self.built and self.trainable:
            return self.kernel.trainable
        return self._kernel_trainable

    @kernel_trainable.setter
    def kernel_trainable(self, value: bool) -> None:
        self._kernel_trainable = validation.boolean(value, "kernel_trainable")
        if self.built:
            self._apply_kernel_trainable()

    def _apply_kernel_trainable(self) -> None:
        for part in (self.kernel, self.bias, self.activation):
            if isinstance(part, (keras.Variable, keras.layers.Layer)):
                part.trainable = self._kernel_trainable and self.trainable

    def get_config(self) -> dict[str, Any]:
        own = rewiring.arguments_of(self, NeuralSimilarity)
        if isinstance(self.predictor, keras.layers.Layer):
            # Keras's own key for objects that several configs share. Keras sets it only
            # from the second config on where the object stands inside a layer (3.15), and
            # then a loaded model would have two of them.
            own["predictor"]["shared_object_id"] = id(self.predictor)
        return {**super().get_config(), **own}
