"""Keras layers with one kernel that compute `W^T M x`, and the form that holds `M`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from operator import attrgetter
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import configs, nesting, similarities, validation
from nsl_keras.backend import Tensor, outside_traces, wide_dtype
from nsl_keras.similarity import predictors
from nsl_keras.similarity.kernels import FloatKernel
from nsl_keras.similarity.shared_predictor import SharedSimilarityPredictor

#: An entry in the file of a layer with a similarity.
_MARK = "has_similarity"

#: The attributes of a convolution that its predictor network needs.
_GEOMETRY = ("kernel_size", "strides", "padding", "dilation_rate", "data_format")


class _Penalty(keras.regularizers.Regularizer):
    """The penalty of a form, as a class because Keras before 3.11 takes no functions."""

    def __init__(self, form: BilinearForm) -> None:
        self.form = form

    def __call__(self, parameters: Any) -> Tensor:
        return self.form._penalty(parameters)


class BilinearForm(keras.layers.Layer):
    """The `M` of one kernel, a weight or predicted, with the kernel's learned shape `D`.

    A layer holds one form per kernel. The form has no `call`: the layer asks it for the
    equivalent kernel of a static `M`, the parameters of a predicted `M(x)`, or the product
    `M v` with vectors. Without a learned shape `D` is the identity.

    Args:
        similarity: As in `NeuralSimilarityConv2D`.
        predictor: As in `NeuralSimilarityConv2D`.
        block_size: int or `None`, for kernels of dense and recurrent layers: the number of
            features in a block. Feature `block * T + t` of a vector takes the role of tap
            `t` of channel `block` in a convolution.
        **kwargs: Arguments of `keras.layers.Layer`.

    Attributes:
        network: The layer that predicts `M`, once built; `None` if `M` is static.
        similarity_parameters: The weight of a static `M`; `None` if `M` is predicted.
        shape_parameters: The weight of the learned shape; `None` without one.
        taps: The number `T` of taps.
        channels: The number of channels that a filter reads; on vectors, of blocks.
    """

    def __init__(
        self,
        similarity: Any,
        predictor: Any = None,
        block_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.similarity = similarities.get(similarity)
        self.predictor = predictors.get(predictor)
        self.block_size = validation.optional(
            validation.positive_integer, block_size, "block_size"
        )
        self.network: Any = None
        self.similarity_parameters = None
        self.shape_parameters = None
        if self.predictor is not None:
            self._require_predictable()

    def _require_predictable(self) -> None:
        similarity, start = self.similarity, self.similarity.initializer
        at_identity = isinstance(start, keras.initializers.Identity) and start.gain == 1
        is_plain = similarity.shared_by == "layer" and similarity.constraint is None
        if similarity.static_only or not at_identity or not is_plain:
            raise ValueError(
                "`similarity` with a predictor must not be `static_only`, and must not set "
                "`initializer`, `constraint` or `shared_by`. Received: "
                f"similarity={type(similarity).__name__} with "
                f"{similarity.get_config()}, predictor={self.predictor!r}"
            )

    def build(
        self,
        input_shape: tuple[Any, ...],
        kernel_shape: tuple[int, ...],
        kernel_regularizer: Any,
        width: int,
        geometry: dict[str, Any] | None = None,
        filter_axes: tuple[int, ...] = (-1,),
    ) -> None:
        """Builds the `M` of a kernel.

        Args:
            input_shape: Shape of the layer's input, or of the vectors that `M` multiplies.
            kernel_shape: Shape of the kernel.
            kernel_regularizer: Regularizer of the kernel.
            width: The number of outputs of the plain layer at a position.
            geometry: Of a convolution, as in `predictors.LayerContext`.
            filter_axes: The axes of the kernel that number its filters; -2 and -1 of a
                depthwise convolution, -2 of a transposed one.
        """
        self._on_vectors = geometry is None
        if geometry is None:
            features = input_shape[-1]
            input_shape = (None, features)
            self.kernel_size: tuple[int, ...] = (self.block_size or features,)
            self.channels = features // self.kernel_size[0]
            if features % self.kernel_size[0]:
                raise ValueError(
                    "`block_size` must divide the number of features. "
                    f"Received: block_size={self.block_size}, {features} features"
                )
        else:
            self.kernel_size = geometry["kernel_size"]
            self.channels = kernel_shape[-2]
        self.taps = math.prod(self.kernel_size)
        shared = self.similarity.shared_by_channels
        if not shared and (len(filter_axes) > 1 or geometry is None):
            raise ValueError(
                "`similarity` must be shared by all channels, except in full "
                f"convolutions. Received: similarity={type(self.similarity).__name__!r}"
            )
        self._set_counts([self.channels, kernel_shape[-1]], filter_axes)
        channels = self.channels // self._counts[0]
        self._matrix_size = self.taps if shared else self.taps * channels
        start = self._start()
        if self.predictor is None:
            self.similarity_parameters = self.add_weight(
                name="similarity",
                shape=start.shape,
                initializer=lambda shape, dtype: ops.convert_to_tensor(start, dtype),
                regularizer=self.similarity.regularizer and _Penalty(self),
                constraint=self.similarity.constraint,
                autocast=False,
            )
        else:
            self.identity = start  # `_require_predictable` refused all other starts.
            context = predictors.LayerContext(
                input_shape=input_shape,
                identity=start,
                width=width,
                is_diagonal=isinstance(self.similarity, similarities.Diagonal),
                geometry=geometry,
                kernel_regularizer=kernel_regularizer,
                dtype=self.dtype_policy,
                is_depthwise=len(filter_axes) > 1,
            )
            self._build_network(context)
        if self.similarity.learn_shape:
            self.shape_parameters = self.add_weight(
                name="shape", shape=(self.taps,), initializer="ones", autocast=False
            )
        nesting.pass_on_frozen(self)

    def _penalty(self, parameters: Any) -> Tensor:
        """Returns the penalty on the `M` that parameters give."""
        parameters = ops.convert_to_tensor(parameters)
        matrix = self.similarity.matrix(parameters, self._matrix_size)
        return self.similarity.regularizer(matrix)

    def _set_counts(self, sizes: list[int], filter_axes: tuple[int, ...]) -> None:
        """Sets the number of `M` along the last two axes of the kernel."""
        self._counts, shared_by = [1, 1], self.similarity.shared_by
        if shared_by == "filter":
            for axis in filter_axes:
                self._counts[axis] = sizes[axis]
        elif shared_by != "layer":
            axis = -1 if filter_axes == (-2,) else -2
            if sizes[axis] % shared_by:
                raise ValueError(
                    "`shared_by` must divide the number of channels that a filter reads. "
                    f"Received: shared_by={shared_by}, {sizes[axis]} channels"
                )
            self._counts[axis] = sizes[axis] // shared_by
        #: The axis that numbers them, if any.
        self._leading = () if shared_by == "layer" else (math.prod(self._counts),)

    def _start(self) -> np.ndarray:
        """Returns the parameters of each initial `M`."""
        size = (self._matrix_size, self._matrix_size)
        # In half precision an eigenvalue may round below zero.
        wide = wide_dtype(self.variable_dtype)
        with outside_traces():  # Some similarities look at the values.
            matrix = ops.convert_to_numpy(self.similarity.initializer(size, dtype=wide))
            parameters = self.similarity.parameters_from(matrix)
            parameters = np.asarray(ops.convert_to_numpy(parameters))
        return np.broadcast_to(parameters, (*self._leading, *parameters.shape))

    def _build_network(self, context: predictors.LayerContext) -> None:
        recipes = (predictors.SimilarityPredictor, SharedSimilarityPredictor)
        self._block = 1  # The side of the blocks of positions that share one `M`.
        self._channel_axis = context.channel_axis
        shape = context.input_shape
        if isinstance(self.predictor, recipes):
            self.network = self.predictor.network(context)
            received = tuple(self.network.compute_output_shape(shape))
            if len(received) > 2:
                self._block = self.predictor.block_side(context)
        else:  # The predictor is a custom layer.
            self.network = self.predictor
            inputs = keras.KerasTensor(shape, self.compute_dtype)
            received = tuple(self.network(inputs).shape)
        axis = -1 if len(received) == 2 else self._channel_axis
        if received[axis] != context.outputs:
            raise ValueError(
                f"`predictor` must return the {context.outputs} parameters of `M` on axis "
                f"{axis}. Received: an output of shape {received}"
            )

    def parameters(
        self,
        inputs: Tensor,
        training: bool | None = None,
        penalized: bool = True,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the parameters of `M`, predicted from inputs if it is dynamic.

        Args:
            inputs: Vectors `(..., features)`, or the inputs of a convolution.
            training: bool, for batch norms of the predictor.
            penalized: bool, whether to add the mean penalty on predicted `M` to the losses.
            mask: Boolean `(...)` for vectors: batch norms leave out masked vectors.

        Returns:
            The parameters of a static `M`, or the predicted parameters for each vector,
            example or block of positions (see `at_positions`).
        """
        if self.network is None:
            return ops.convert_to_tensor(self.similarity_parameters)
        if self._on_vectors:
            vectors = ops.reshape(inputs, (-1, inputs.shape[-1]))
            options = {}
            if mask is not None and "mask" in signature(self.network.call).parameters:
                options["mask"] = ops.reshape(mask, (-1,))
            prediction = self.network(vectors, training=training, **options)
            leading = ops.shape(inputs)[:-1]
        else:
            prediction = self.network(inputs, training=training)  # NSL Eq. (3): M(x)
            if self._channel_axis == 1 and len(prediction.shape) > 2:
                prediction = ops.moveaxis(prediction, 1, -1)
            leading = ops.shape(prediction)[:-1]
            if len(leading) == 1:  # The predictor is pooled.
                leading = (leading[0], *[1] * len(self.kernel_size))
        wide = wide_dtype(prediction.dtype)
        parameters = ops.reshape(prediction, (*leading, *self.identity.shape))
        parameters = ops.cast(parameters, wide)
        if getattr(self.predictor, "residual", True):
            parameters = parameters + ops.cast(self.identity, wide)
        if penalized and self.similarity.regularizer is not None:
            each = ops.reshape(parameters, (-1, *self.identity.shape))
            count = ops.maximum(ops.shape(each)[0], 1)  # A batch may be empty.
            self.add_loss(self._penalty(each) / ops.cast(count, wide))
        return ops.cast(parameters, inputs.dtype)

    def at_positions(self, parameters: Tensor, positions: Sequence[Any]) -> Tensor:
        """Returns predicted parameters at every position of a convolution.

        Every size of the positions may be 1 if there is one `M` per example.
        """
        if self._block == 1:
            return parameters
        shape = list(ops.shape(parameters))
        for axis in range(1, len(positions) + 1):
            shape[axis] *= self._block
            # Not `ops.repeat`, which is slower on a CPU.
            each = ops.expand_dims(parameters, axis + 1)
            parameters = ops.reshape(ops.concatenate([each] * self._block, axis + 1), shape)
        repeated = shape[1 : len(positions) + 1]
        if all(isinstance(each, int) for each in (*repeated, *positions)):
            left = [more - wanted for more, wanted in zip(repeated, positions, strict=True)]
            if not any(left):
                # A slice of everything would cost a copy in the gradient.
                return parameters
            if min(left) < 0 or max(left) >= self._block:
                raise ValueError(
                    "`predictor` must predict once for each block of positions with the "
                    f"side `downsampling`. Received: downsampling={self._block}, "
                    f"predictions for {repeated} positions of a convolution with "
                    f"{list(positions)}"
                )
        shape[1 : len(positions) + 1] = positions
        return ops.slice(parameters, (0,) * len(shape), shape)

    def with_shape(self, kernel: Tensor) -> Tensor:
        """Returns `D W`, whose gradient goes to the real parameters of the shape."""
        real = ops.convert_to_tensor(self.shape_parameters)
        mask = self.learned_shape + (real - ops.stop_gradient(real))  # NSL Eq. (5)
        if self._on_vectors:
            return ops.tile(mask, self.channels)[:, None] * kernel  # NSL Eq. (4)
        return ops.reshape(mask, (*self.kernel_size, 1, 1)) * kernel  # NSL Eq. (4)

    def equivalent_kernel(self, kernel: Tensor) -> Tensor:
        """Returns the kernel `M^T D W` of a static `M`, in the shape of `kernel`."""
        kernel = ops.convert_to_tensor(kernel)
        shape, width = kernel.shape, kernel.shape[-1]
        if self.similarity.learn_shape:
            kernel = self.with_shape(kernel)
        if self._on_vectors:
            by_block = ops.reshape(kernel, (-1, self.taps, width))
            kernel = ops.swapaxes(by_block, 0, 1)
        # An axis for the blocks of channels, and one for those of filters.
        first, second = self._counts
        split = (first, self.channels // first, second, width // second)
        kernel = ops.transpose(ops.reshape(kernel, (self.taps, *split)), (1, 3, 0, 2, 4))
        blocks = kernel.shape
        kernel = ops.reshape(kernel, (*self._leading, *blocks[2:]))
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        equivalent = self.similarity.equivalent_kernel(parameters, kernel)
        # In the order of the kernel: taps first, on vectors blocks of features first.
        order = (0, 3, 2, 1, 4) if self._on_vectors else (2, 0, 3, 1, 4)
        return ops.reshape(ops.transpose(ops.reshape(equivalent, blocks), order), shape)

    def apply(self, parameters: Tensor, vectors: Tensor) -> Tensor:
        """Returns `M v` for vectors `(..., features)`, in their dtype.

        A static `M` is applied in the variables' dtype.
        """
        dtype = vectors.dtype
        vectors = ops.cast(vectors, parameters.dtype)
        shape = ops.shape(vectors)
        if self.network is None:  # All vectors are one batch of blocks.
            rows = ops.reshape(vectors, (-1, self.taps))
        else:
            rows = ops.reshape(vectors, (*shape[:-1], self.channels, self.taps))
        product = self.similarity.apply_to_rows(parameters, rows)  # NSL Eq. (3)
        return ops.cast(ops.reshape(product, shape), dtype)

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`; several matrices are stacked on the first axis."""
        self.require_similarity("static", "similarity_matrix")
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        return self.similarity.matrix(parameters, self._matrix_size)

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for each tap that is kept, 0 for all other taps."""
        if not self.similarity.learn_shape:
            raise ValueError(
                "`learned_shape` needs a similarity with `learn_shape=True`. "
                "Received: learn_shape=False"
            )
        validation.built(self, "learned_shape")
        threshold = self.similarity.shape_threshold
        kept = ops.convert_to_tensor(self.shape_parameters) > threshold
        return ops.cast(kept, self.variable_dtype)

    def require_similarity(self, wanted: str, what: str) -> None:
        """Raises unless `M` is static, or predicted from the input, and built."""
        if (self.predictor is None) != (wanted == "static"):
            raise ValueError(
                f"`{what}` needs a {wanted} similarity. "
                f"Received: predictor={self.predictor!r}"
            )
        validation.built(self, what)


class WithSimilarity(nesting.KeepsFrozen):
    """Private mixin: marks saved weights so that the plain layer refuses to load them.

    The plain layer would ignore the weights of a `BilinearForm` and load the rest.
    """

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        store[_MARK] = np.ones(1)  # Keras counts the entries.

    def load_own_variables(self, store: Any) -> None:
        own = set(store.keys()) - {_MARK}
        super().load_own_variables({key: store[key] for key in own})


from nsl_keras.turning import Foldable


class NeuralSimilarity(WithSimilarity, Foldable, FloatKernel):
    own_attributes = ("bilinear_form", "_kernel_trainable")
    @property
    def similarity_kernel(self): return self.kernel
    def folded_variables(self):
        self.bilinear_form.require_similarity("static", "fold")
        return [(self.kernel, self.equivalent_kernel)]
    def turn_back(self):
        self.kernel_trainable = True
        super().turn_back()

    """Private mixin, in front of a Keras layer with one kernel: `W^T M x`.

    A subclass names the Keras layer as `plain`, and computes the product with a predicted
    `M(x)` in `dynamic_product(inputs, kernel, training)`.
    """

    plain: type[keras.layers.Layer]
    #: The axes of the kernel that number its filters.
    filter_axes: tuple[int, ...] = (-1,)
    dynamic_product: Any
    # Read-only: the `BilinearForm` holds them.
    similarity = property(attrgetter("bilinear_form.similarity"))
    predictor = property(attrgetter("bilinear_form.predictor"))

    def __init__(
        self,
        *args: Any,
        similarity: Any = "diagonal",
        predictor: Any = None,
        kernel_trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.set_similarity(similarity, predictor, kernel_trainable)

    def set_similarity(self, similarity, predictor, kernel_trainable=True):
        first = getattr(self, "data_format", None) == "channels_first"
        self.channel_axis = 1 if first else -1
        self.filters_shape = (-1, *[1] * self.rank) if first else (-1,)
        self._kernel_trainable = kernel_trainable
        self.bilinear_form = BilinearForm(
            similarity, predictor, dtype=self.dtype_policy, name="bilinear_form"
        )
        if self.predictor is not None and getattr(self, "groups", 1) != 1:
            raise ValueError(
                "`groups` must be 1 with a predictor. "
                f"Received: groups={self.groups}, predictor={predictor!r}"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.build_similarity(input_shape)

    def build_similarity(self, input_shape):
        width = self.compute_output_shape(input_shape)[self.channel_axis]
        geometry = self.predicting_geometry() if hasattr(self, "kernel_size") else None
        shape, kernel = tuple(input_shape), self.kernel
        self.bilinear_form.build(
            shape, kernel.shape, kernel.regularizer, width, geometry, self.filter_axes
        )
        nesting.pass_on_frozen(self)
        if not self.kernel_trainable:
            self._set_flags_of_kernel()

    def product(
        self, inputs: Tensor, training: bool | None = None, **options: Any
    ) -> Tensor:
        """Returns `W^T M x`; options go to `dynamic_product`."""
        form, kernel = self.bilinear_form, ops.convert_to_tensor(self.kernel)
        if form.network is None:
            kernel = form.equivalent_kernel(kernel)
            return self.plain_product(inputs, ops.cast(kernel, inputs.dtype))
        if self.similarity.learn_shape:
            kernel = form.with_shape(kernel)
        kernel = ops.cast(kernel, inputs.dtype)
        return self.dynamic_product(inputs, kernel, training, **options)

    def predicting_geometry(self) -> dict[str, Any]:
        """Returns the geometry of a convolution, as its predictor network needs it."""
        return {name: getattr(self, name) for name in _GEOMETRY}

    def predicting_shape(self, input_shape: Any) -> Any:
        """Returns a shape with the positions at which a dynamic layer predicts `M`."""
        return self.compute_output_shape(input_shape)

    def predicted_matrices(self, inputs: Tensor) -> Tensor:
        """Returns the `M(x)` that a dynamic layer uses at each position.

        The positions are those of the output, or of a transposed convolution's input.

        Returns:
            Tensor of shape `(batch, *positions, T, T)`, without `D`; every size of
            `positions` is 1 with a pooled predictor.

        Raises:
            ValueError: If the layer is static, or not built yet.
        """
        self.bilinear_form.require_similarity("dynamic", "predicted_matrices")
        inputs = ops.cast(inputs, self.compute_dtype)
        shape = list(self.predicting_shape(tuple(inputs.shape)))
        del shape[self.channel_axis]
        form = self.bilinear_form
        parameters = form.at_positions(form.parameters(inputs, penalized=False), shape[1:])
        return self.similarity.matrix(parameters, form.taps)

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`, without `D`: `(T, T)`, or `(c T, c T)` if full.

        If `shared_by` is not `"layer"`, the first axis counts blocks of channels, or
        filters.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        return self.bilinear_form.similarity_matrix

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for each tap that is kept, 0 for all other taps.

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
        self.bilinear_form.require_similarity("static", "equivalent_kernel")
        return self.bilinear_form.equivalent_kernel(self.kernel)

    @keras.layers.Layer.trainable.setter
    def trainable(self, value: bool) -> None:
        keras.layers.Layer.trainable.fset(self, value)
        if self.built:
            self._set_flags_of_kernel()

    @property
    def kernel_trainable(self) -> bool:
        """Whether kernel, bias and activation are trained, or the similarity alone."""
        return self._kernel_trainable

    @kernel_trainable.setter
    def kernel_trainable(self, value: bool) -> None:
        self._kernel_trainable = value
        if self.built:
            self._set_flags_of_kernel()

    def _set_flags_of_kernel(self) -> None:
        for part in (self.kernel, self.bias, self.activation):
            if isinstance(part, (keras.Variable, keras.layers.Layer)):
                part.trainable = self.kernel_trainable and self.trainable

    def get_config(self) -> dict[str, Any]:
        own = configs.arguments_of(self, NeuralSimilarity)
        if isinstance(self.predictor, keras.layers.Layer):
            # Keras's own key for objects that several configs share. Keras sets it only
            # from the second config on where the object stands inside a layer (3.15), and
            # then a loaded model would have two of them.
            own["predictor"]["shared_object_id"] = id(self.predictor)
        return {**super().get_config(), **own}


def similarities_of(layer: keras.layers.Layer) -> list[BilinearForm]:
    """Returns the `M` of each kernel in a layer, including its cells."""
    return [each for each in nesting.sublayers(layer) if isinstance(each, BilinearForm)]
