"""The bilinear similarity `W^T M x`: the `M` of one kernel, and layers with one kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, outside_traces
from nsl_keras.similarity import matrices, predictors
from nsl_keras.similarity.kernels import FloatKernel

#: The arguments of a `Comparison` that layers with one kernel also take.
ARGUMENTS = (
    "similarity",
    "similarity_initializer",
    "similarity_regularizer",
    "similarity_constraint",
    "predictor",
    "learn_shape",
    "shape_threshold",
)
#: The attributes of a convolution that its predictor network needs.
_GEOMETRY = ("kernel_size", "strides", "padding", "dilation_rate", "data_format")


class Comparison(keras.layers.Layer):
    """The `M` of one kernel, a weight or predicted, with the kernel's learned shape `D`.

    A layer holds one for each of its kernels. It has no `call`: the layer asks it for the
    equivalent kernel of a static `M`, the parameters of a predicted `M(x)`, or the product
    `D M v` with vectors. Without a learned shape `D` is the identity.

    Args:
        block_size: int or `None`, for kernels of dense and recurrent layers: the number of
            features in a block. Feature `block * T + t` of a vector takes the role of tap
            `t` of channel `block` in a convolution.
        **kwargs: Other arguments, as for `nsl_keras.layers.NeuralSimilarityConv2D`.

    Attributes:
        network: The layer that predicts `M`, once built; `None` if it is static.
        similarity_parameters: The weight of a static `M`; `None` if it is predicted.
        shape_parameters: The weight of the learned shape; `None` without one.
    """

    def __init__(
        self,
        similarity: Any = "diagonal",
        similarity_initializer: Any = "identity",
        similarity_regularizer: Any = None,
        similarity_constraint: Any = None,
        predictor: Any = None,
        learn_shape: bool = False,
        shape_threshold: float = 0.5,
        block_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.similarity = matrices.get(similarity)
        self.similarity_initializer = keras.initializers.get(similarity_initializer)
        self.similarity_regularizer = keras.regularizers.get(similarity_regularizer)
        self.similarity_constraint = keras.constraints.get(similarity_constraint)
        self.predictor = predictors.get(predictor)
        self.learn_shape = validation.boolean(learn_shape, "learn_shape")
        self.shape_threshold = validation.fraction(shape_threshold, "shape_threshold")
        self.block_size = validation.optional(
            validation.positive_integer, block_size, "block_size"
        )
        self.network: Any = None
        self.similarity_parameters = None
        self.shape_parameters = None
        if self.predictor is not None:
            self._refuse_static_arguments()

    def _refuse_static_arguments(self) -> None:
        if self.similarity.static_only:
            raise ValueError(
                f"`similarity` {type(self.similarity).__name__!r} is static and takes no "
                f"predictor. Received: predictor={self.predictor!r}"
            )
        for name in ("initializer", "regularizer", "constraint"):
            value = getattr(self, f"similarity_{name}")
            is_identity = isinstance(value, keras.initializers.Identity) and value.gain == 1
            if value is not None and not is_identity:
                raise ValueError(
                    f"`similarity_{name}` applies to a static similarity and must be left "
                    f"out with a predictor. Received: similarity_{name}={value}"
                )

    def build(
        self,
        input_shape: tuple[Any, ...],
        kernel_shape: tuple[int, ...],
        kernel_regularizer: Any,
        width: int,
        geometry: dict[str, Any] | None = None,
        depthwise: bool = False,
    ) -> None:
        """Builds the `M` of a kernel.

        Args:
            input_shape: Shape of the layer's input, or of the vectors that `M` multiplies.
            kernel_shape: Shape of the kernel.
            kernel_regularizer: Regularizer of the kernel.
            width: The number of outputs of the plain layer at a position.
            geometry: The attributes `_GEOMETRY` of a convolution; `None` for vectors.
            depthwise: bool, whether a convolution is depthwise.
        """
        channel_axis = -1
        if geometry is None:
            features = input_shape[-1]
            self.kernel_size: tuple[int, ...] = (self.block_size or features,)
            channels = features // self.kernel_size[0]
            if features % self.kernel_size[0]:
                raise ValueError(
                    "`block_size` must divide the number of features. "
                    f"Received: block_size={self.block_size}, {features} features"
                )
        else:
            self.kernel_size = geometry["kernel_size"]
            channels = kernel_shape[-2]
            channel_axis = 1 if geometry["data_format"] == "channels_first" else -1
        self._on_vectors = geometry is None
        self._channel_axis = channel_axis
        self.taps = math.prod(self.kernel_size)
        shared = self.similarity.shared_by_channels
        if not shared and (depthwise or geometry is None):
            raise ValueError(
                "`similarity` must be shared by all channels, outside of full "
                f"convolutions. Received: similarity={type(self.similarity).__name__!r}"
            )
        self._matrix_size = self.taps if shared else self.taps * channels
        start = self._start()
        if self.predictor is None:
            self.similarity_parameters = self.add_weight(
                name="similarity",
                shape=start.shape,
                initializer=lambda shape, dtype: ops.convert_to_tensor(start, dtype),
                regularizer=self.similarity_regularizer,
                constraint=self.similarity_constraint,
                autocast=False,
            )
        if self.learn_shape:
            self.shape_parameters = self.add_weight(
                name="shape", shape=(self.taps,), initializer="ones", autocast=False
            )
        if self.predictor is None:
            return
        self._identity = start
        place = predictors.Place(
            channels=input_shape[channel_axis],
            outputs=start.size,
            plain_width=width,
            is_diagonal=isinstance(self.similarity, matrices.Diagonal),
            geometry=geometry,
            kernel_regularizer=kernel_regularizer,
            dtype=self.dtype_policy,
        )
        self._build_network(place, input_shape)

    def _start(self) -> np.ndarray:
        """Returns the parameters of the initial `M`."""
        size = (self._matrix_size, self._matrix_size)
        # In half precision an eigenvalue may round below zero.
        wide = keras.backend.result_type(self.variable_dtype, "float32")
        with outside_traces():  # Some similarities look at the values.
            matrix = ops.convert_to_numpy(self.similarity_initializer(size, dtype=wide))
            parameters = self.similarity.parameters_from(matrix)
            return np.asarray(ops.convert_to_numpy(parameters))

    def _build_network(self, place: predictors.Place, input_shape: Any) -> None:
        if isinstance(self.predictor, predictors.NETWORK_MAKERS):
            self.network = self.predictor.network(place)
        else:  # The predictor is a custom layer.
            self.network = self.predictor
        shape = place.input_shape if self._on_vectors else input_shape
        if not self.network.built:
            self.network.build(shape)
        received = tuple(self.network.compute_output_shape(shape))
        axis = -1 if len(received) == 2 else place.channel_axis
        if received[axis] != place.outputs:
            raise ValueError(
                f"`predictor` must return the {place.outputs} parameters of `M` on axis "
                f"{axis}. Received: an output of shape {received}"
            )

    def parameters(
        self,
        inputs: Tensor,
        training: bool | None = None,
        positions: Sequence[Any] = (),
    ) -> Tensor:
        """Returns the parameters of `M`, predicted from inputs if it is dynamic.

        Args:
            inputs: Vectors `(..., features)`, or the inputs of a convolution.
            training: bool, for batch norms of the predictor.
            positions: The number of output positions of a convolution along each axis.

        Returns:
            The parameters of a static `M`; of a predicted one, parameters for each vector
            or position, where every size of `positions` may be 1.
        """
        if self.network is None:
            return ops.convert_to_tensor(self.similarity_parameters)
        if self._on_vectors:
            rows = ops.reshape(inputs, (-1, inputs.shape[-1]))
            prediction = self.network(rows, training=training)
            leading = ops.shape(inputs)[:-1]
        else:
            prediction = self.network(inputs, training=training)
            if self._channel_axis == 1 and len(prediction.shape) > 2:
                prediction = ops.moveaxis(prediction, 1, -1)
            leading = ops.shape(prediction)[:-1]
            if len(leading) == 1:  # The predictor is pooled.
                leading = (leading[0], *[1] * len(positions))
        wide = keras.backend.result_type(prediction.dtype, "float32")
        residual = ops.reshape(prediction, (*leading, *self._identity.shape))
        identity = ops.cast(self._identity, wide)
        parameters = ops.cast(residual, wide) + identity  # NSL Eq. (3): M(x)
        parameters = ops.cast(parameters, self.compute_dtype)
        block = getattr(self.predictor, "downsampling", 1)
        if block > 1 and len(prediction.shape) > 2:
            return _repeated(parameters, block, positions)
        return parameters

    def shaped(self, kernel: Tensor) -> Tensor:
        """Returns `D W`, with the taps of a kernel on the first of three axes."""
        width = kernel.shape[-1]
        if self._on_vectors:
            kernel = ops.reshape(kernel, (-1, self.taps, width))
            kernel = ops.swapaxes(kernel, 0, 1)
        else:
            kernel = ops.reshape(kernel, (self.taps, -1, width))
        if self.learn_shape:
            kernel = self._trained_shape()[:, None, None] * kernel  # NSL Eq. (4)
        return kernel

    def _trained_shape(self) -> Tensor:
        """Returns the diagonal of `D`, whose gradient goes to the real parameters."""
        real = ops.convert_to_tensor(self.shape_parameters)
        return self.learned_shape + (real - ops.stop_gradient(real))  # NSL Eq. (5)

    def equivalent_kernel(self, kernel: Tensor) -> Tensor:
        """Returns the kernel `M^T D W` of a static `M`, in the shape of `kernel`."""
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        equivalent = self.similarity.equivalent_kernel(parameters, self.shaped(kernel))
        if self._on_vectors:
            equivalent = ops.swapaxes(equivalent, 0, 1)
        return ops.reshape(equivalent, kernel.shape)

    def compare(self, parameters: Tensor, vectors: Tensor) -> Tensor:
        """Returns `D M v` for vectors `(..., features)`, in the compute dtype.

        A static `M` is applied in the variables' dtype, whatever that of the vectors.
        """
        vectors = ops.cast(vectors, parameters.dtype)
        shape = ops.shape(vectors)
        # A static `M` takes the blocks of all vectors in one product.
        leading = () if self.network is None else shape[:-1]
        blocks = -1 if not leading else vectors.shape[-1] // self.taps
        rows = ops.reshape(vectors, (*leading, blocks, self.taps))
        compared = self.similarity.compare_rows(parameters, rows)  # NSL Eq. (3)
        if self.learn_shape:
            shape_of_kernel = ops.cast(self._trained_shape(), compared.dtype)
            compared = compared * shape_of_kernel  # NSL Eq. (4)
        return ops.cast(ops.reshape(compared, shape), self.compute_dtype)

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`."""
        self.require_static("similarity_matrix")
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        return self.similarity.matrix(parameters, self._matrix_size)

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for each tap that is kept, 0 for the others."""
        if not self.learn_shape:
            raise ValueError(
                "`learned_shape` needs `learn_shape=True`. Received: learn_shape=False"
            )
        validation.built(self, "learned_shape")
        kept = ops.convert_to_tensor(self.shape_parameters) > self.shape_threshold
        return ops.cast(kept, self.variable_dtype)

    def require_static(self, what: str) -> None:
        """Raises unless `M` is static and built."""
        if self.predictor is not None:
            raise ValueError(
                f"`{what}` needs a static similarity; this one is predicted from the "
                f"input. Received: predictor={self.predictor!r}"
            )
        validation.built(self, what)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of a layer with one kernel, for its config."""
        serialize = keras.saving.serialize_keras_object
        config = {name: serialize(getattr(self, name)) for name in ARGUMENTS}
        if isinstance(self.predictor, keras.layers.Layer):
            # Keras's own key for objects that several configs share. Keras sets it only
            # from the second config on where the object stands inside a layer (3.15), and
            # then a loaded model would have two of them.
            config["predictor"]["shared_object_id"] = id(self.predictor)
        return config


def _repeated(parameters: Tensor, block: int, positions: Sequence[Any]) -> Tensor:
    """Returns parameters at every position, from parameters for each block of positions."""
    shape = list(ops.shape(parameters))
    for axis in range(1, len(positions) + 1):
        shape[axis] *= block
        # Not `ops.repeat`, which is slower on a CPU.
        each = ops.expand_dims(parameters, axis + 1)
        parameters = ops.reshape(ops.concatenate([each] * block, axis + 1), shape)
    repeated = shape[1 : len(positions) + 1]
    known = all(isinstance(each, int) for each in (*repeated, *positions))
    if known and repeated == list(positions):
        return parameters  # A slice of everything would cost a copy in the gradient.
    shape[1 : len(positions) + 1] = positions
    return ops.slice(parameters, (0,) * len(shape), shape)


class NeuralSimilarity(FloatKernel):
    """Private mixin, in front of a Keras layer with one kernel: `W^T M x`.

    A subclass names the Keras layer as `plain`, and computes the product with a predicted
    `M(x)` in `dynamic_product(inputs, kernel, training)`.
    """

    plain: type[keras.layers.Layer]
    dynamic_product: Any
    # Read-only: the `Comparison` holds the values.
    similarity = property(attrgetter("comparison.similarity"))
    similarity_initializer = property(attrgetter("comparison.similarity_initializer"))
    similarity_regularizer = property(attrgetter("comparison.similarity_regularizer"))
    similarity_constraint = property(attrgetter("comparison.similarity_constraint"))
    predictor = property(attrgetter("comparison.predictor"))
    learn_shape = property(attrgetter("comparison.learn_shape"))
    shape_threshold = property(attrgetter("comparison.shape_threshold"))

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
        kernel_trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._kernel_trainable = validation.boolean(kernel_trainable, "kernel_trainable")
        self.comparison = Comparison(
            similarity,
            similarity_initializer,
            similarity_regularizer,
            similarity_constraint,
            predictor,
            learn_shape,
            shape_threshold,
            dtype=self.dtype_policy,
            name="comparison",
        )
        if self.predictor is not None and getattr(self, "groups", 1) != 1:
            raise ValueError(
                "`groups` must be 1 with a predictor. "
                f"Received: groups={self.groups}, predictor={predictor!r}"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        width = self.compute_output_shape(input_shape)[self.channel_axis]
        geometry = None
        if hasattr(self, "kernel_size"):
            geometry = {name: getattr(self, name) for name in _GEOMETRY}
        kernel, depthwise = self.kernel, isinstance(self, keras.layers.DepthwiseConv2D)
        self.comparison.build(
            tuple(input_shape), kernel.shape, kernel.regularizer, width, geometry, depthwise
        )
        rewiring.pass_on_frozen(self)
        if not self._kernel_trainable:
            self._apply_kernel_trainable()

    def product(self, inputs: Tensor, training: bool | None) -> Tensor:
        kernel = ops.convert_to_tensor(self.kernel)
        if self.comparison.network is None:
            # The static bilinear similarity: a plain product with the folded kernel.
            kernel = self.comparison.equivalent_kernel(kernel)
            return self.plain_product(inputs, ops.cast(kernel, inputs.dtype))
        return self.dynamic_product(inputs, kernel, training)

    def predicted_matrices(self, inputs: Tensor) -> Tensor:
        """Returns the `M(x)` that a dynamic layer predicts at each position of its output.

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
        shape = list(self.compute_output_shape(tuple(inputs.shape)))
        del shape[self.channel_axis]
        parameters = self.comparison.parameters(inputs, positions=shape[1:])
        return self.similarity.matrix(parameters, self.comparison.taps)

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`, without `D`: `(T, T)`, or `(c T, c T)` if full.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        return self.comparison.similarity_matrix

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for each tap that is kept, 0 for the others.

        Raises:
            ValueError: If the layer does not learn its kernel's shape, or is not built.
        """
        return self.comparison.learned_shape

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `M^T D W`, in the shape of `kernel`; without a learned shape `M^T W`.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self.comparison.require_static("equivalent_kernel")
        return self.comparison.equivalent_kernel(ops.convert_to_tensor(self.kernel))

    def fold(self) -> keras.layers.Layer:
        """Returns a new plain Keras layer that computes the same.

        This layer does not change, and the two share no weights.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self.comparison.require_static("fold")
        plain = self.plain.from_config(super().get_config())
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
        return {
            **super().get_config(),
            **self.comparison.arguments(),
            "kernel_trainable": self.kernel_trainable,
        }
