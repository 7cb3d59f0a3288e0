"""What every layer with a neural similarity adds to a Keras layer: `M`, kernel shape, fold.

`NeuralSimilarity` is all of it for convolutions; `VectorSimilarity` cuts vectors into
blocks besides, for dense layers and recurrent cells.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, outside_traces
from nsl_keras.similarity import matrices
from nsl_keras.similarity.kernels import FloatKernel

#: The layers that predictors without a `serve` of their own serve.
_SERVED: weakref.WeakKeyDictionary[keras.layers.Layer, weakref.ref[Any]] = (
    weakref.WeakKeyDictionary()
)


def get_initializer(identifier: Any) -> keras.initializers.Initializer:
    """Returns an initializer of `M`; the default one, the identity, for `None`."""
    return keras.initializers.get("identity" if identifier is None else identifier)


def is_identity(initializer: keras.initializers.Initializer) -> bool:
    """Whether an initializer is Keras's identity, with ones on its diagonal."""
    return isinstance(initializer, keras.initializers.Identity) and initializer.gain == 1


class NeuralSimilarity(FloatKernel):
    """Private mixin, in front of a Keras layer: `W^T M x` in place of `W^T x`.

    A subclass computes with the `equivalent` kernel where `M` is static, and where it is
    dynamic compares with the parameters that its predictor returns.
    """

    kernel: Any
    bias: Any
    predictor: Any

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
        self.similarity = matrices.get(similarity)
        self.similarity_initializer = get_initializer(similarity_initializer)
        self.similarity_regularizer = keras.regularizers.get(similarity_regularizer)
        self.similarity_constraint = keras.constraints.get(similarity_constraint)
        self.learn_shape = validation.boolean(learn_shape, "learn_shape")
        self.shape_threshold = validation.fraction(shape_threshold, "shape_threshold")
        self._kernel_trainable = validation.boolean(kernel_trainable, "kernel_trainable")
        self.predictor = self._get_predictor(predictor)
        if self.predictor is not None:
            self._check_dynamic(predictor)

    def _get_predictor(self, predictor: Any) -> keras.layers.Layer | None:
        """Returns a predictor from what the argument may be."""
        raise NotImplementedError

    def _check_dynamic(self, predictor: Any) -> None:
        if not self.similarity.takes_predictor:
            raise ValueError(
                f"`similarity` {type(self.similarity).__name__!r} is static and takes no "
                f"predictor. Received: predictor={predictor!r}"
            )
        if self.similarity_regularizer or self.similarity_constraint:
            raise ValueError(
                "`similarity_regularizer` and `similarity_constraint` apply to a "
                "static similarity and must be None with a predictor. Received: "
                f"similarity_regularizer={self.similarity_regularizer}, "
                f"similarity_constraint={self.similarity_constraint}"
            )
        if not is_identity(self.similarity_initializer):
            raise ValueError(
                "`similarity_initializer` applies to a static similarity and must be "
                "'identity' with a predictor. Received: "
                f"similarity_initializer={self.similarity_initializer}"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        kernel_size, channels = self._kernel_grid(input_shape)
        taps = math.prod(kernel_size)
        self._structure = self.similarity.for_kernel_size(kernel_size)
        self._matrix_size = taps if self._structure.shared_by_channels else taps * channels
        self.similarity_parameters = None
        self.shape_parameters = None
        self.adaptation = None
        if self.predictor is None:
            self.similarity_parameters = self.add_weight(
                name="similarity",
                shape=self._structure.parameter_shape(self._matrix_size),
                initializer=self._initial_parameters,
                regularizer=self.similarity_regularizer,
                constraint=self.similarity_constraint,
                autocast=False,
            )
        if self.learn_shape:
            self.shape_parameters = self.add_weight(
                name="shape", shape=(taps,), initializer="ones", autocast=False
            )
        if self.predictor is not None:
            self._build_predictor(tuple(input_shape))
        rewiring.pass_on_frozen(self)
        if not self._kernel_trainable:
            self._apply_kernel_trainable()

    def _kernel_grid(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[tuple[int, ...], int]:
        """Returns the sizes of the grid of taps, and the channels that a filter reads."""
        raise NotImplementedError

    @property
    def plain_width(self) -> int:
        """The number of outputs of the plain layer at a position."""
        return int(self.kernel.shape[-1])

    def _initial_parameters(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        del shape  # That of the similarity's parameters, which is checked below.
        size = (self._matrix_size, self._matrix_size)
        with outside_traces():
            # A similarity may have to look at the values, as a Cholesky factor does, and
            # half precision would round eigenvalues below zero.
            wide = keras.backend.result_type(dtype, "float32")
            matrix = ops.convert_to_numpy(self.similarity_initializer(size, dtype=wide))
        return ops.cast(self._parameters_from(matrix), dtype)

    def _parameters_from(self, matrix: np.ndarray) -> Tensor:
        parameters = self._structure.parameters_from(matrix)
        expected = tuple(self._structure.parameter_shape(self._matrix_size))
        if tuple(parameters.shape) != expected:
            raise ValueError(
                "`similarity.parameters_from` must return the shape that "
                f"`similarity.parameter_shape` names, {expected}. "
                f"Received: shape {tuple(parameters.shape)} from {self.similarity!r}"
            )
        return parameters

    def _build_predictor(self, input_shape: tuple[int | None, ...]) -> None:
        """Builds what predicts `M`, and checks what comes out of it."""
        with outside_traces():
            identity = self._parameters_from(np.eye(self._matrix_size))
            self._identity = np.asarray(ops.convert_to_numpy(identity))
        shape = input_shape
        if hasattr(self.predictor, "serve"):
            self.adaptation = self.predictor.serve(self)
        if self.adaptation is not None:
            self.adaptation.build(shape)
            shape = self.adaptation.compute_output_shape(shape)
        if not self.predictor.built:
            self.predictor.build(shape)
        received = tuple(self.predictor.compute_output_shape(shape))
        allowed = self._prediction_shapes(input_shape, self._identity.size)
        if received not in allowed:
            raise ValueError(
                f"`predictor` must map the input shape {input_shape} to the parameters of "
                f"`M`, of shape {' or '.join(map(str, allowed))}. "
                f"Received: an output of shape {received}"
            )
        if not hasattr(self.predictor, "serve"):
            self._serve_alone()

    def _serve_alone(self) -> None:
        """Raises if a layer of the caller's own serves another layer already.

        It would be saved with each of them, and loaded with neither.
        """
        served = _SERVED.setdefault(self.predictor, weakref.ref(self))()
        if served is None:  # That layer is gone.
            _SERVED[self.predictor] = weakref.ref(self)
        elif served is not self:
            raise ValueError(
                "`predictor` must serve one layer, unless it is a "
                "`SharedSimilarityPredictor`. Received: a predictor that serves layer "
                f"{served.name!r}, for layer {self.name!r}"
            )

    def _prediction_shapes(
        self, input_shape: tuple[int | None, ...], outputs: int
    ) -> list[tuple[int | None, ...]]:
        """Returns the shapes that a prediction of so many parameters may have."""
        raise NotImplementedError

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
        activation = getattr(self, "activation", None)  # A layer with weights, perhaps.
        for part in (self.kernel, self.bias, activation):
            if isinstance(part, (keras.Variable, keras.layers.Layer)):
                part.trainable = self._kernel_trainable and self.trainable

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`, without the kernel's shape: `(T, T)`, or `(c T, c T)` if full.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self.require_static("similarity_matrix")
        return self._structure.matrix(ops.convert_to_tensor(self.similarity_parameters))

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for every tap that is kept, 0 for the others.

        Raises:
            ValueError: If the layer does not learn its kernel's shape, or is not built.
        """
        if not self.learn_shape:
            raise ValueError(
                f"`learned_shape` needs `learn_shape=True`. Received: layer {self.name!r} "
                "with learn_shape=False"
            )
        validation.built(self, "learned_shape")
        kept = ops.convert_to_tensor(self.shape_parameters) > self.shape_threshold
        return ops.cast(kept, self.variable_dtype)

    def _trained_shape(self) -> Tensor:
        """Returns the diagonal of `D`, whose gradient goes to the real parameters."""
        real = ops.convert_to_tensor(self.shape_parameters)
        return self.learned_shape + (real - ops.stop_gradient(real))  # NSL Eq. (5)

    def equivalent(self, kernel: Tensor) -> Tensor:
        """Returns the kernel `M^T D W`, in the shape of `kernel`, for a static `M`."""
        raise NotImplementedError

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `W^[u,c,o] = sum_t W[t,c,o] M[t,u]`, in the shape of `kernel`.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self.require_static("equivalent_kernel")
        return self.equivalent(ops.convert_to_tensor(self.kernel))

    def fold(self) -> keras.layers.Layer:
        """Returns a new plain Keras layer that computes the same.

        This layer stays as it is, and the two share no weights.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self.require_static("fold")
        plain = self.plain.from_config(self._plain_config())
        plain.build(self.get_build_config()["input_shape"])
        # Copies: on JAX the two would share buffers, which a training step donates.
        plain.kernel.assign(ops.convert_to_numpy(self.equivalent_kernel))
        if self.bias is not None:
            plain.bias.assign(ops.convert_to_numpy(self.bias))
        rewiring.copy_activations(self, plain)
        if isinstance(plain.activation, keras.layers.Layer) and not self.kernel_trainable:
            plain.activation.trainable = plain.trainable  # As kernel and bias.
        return plain

    def require_static(self, what: str) -> None:
        """Raises unless `M` is static and the layer is built."""
        if self.predictor is not None:
            raise ValueError(
                f"`{what}` needs a static similarity: layer {self.name!r} predicts its "
                "similarity from the input. Received: "
                f"predictor={self.predictor.name!r}"
            )
        validation.built(self, what)

    def _plain_config(self) -> dict[str, Any]:
        return super().get_config()

    def get_config(self) -> dict[str, Any]:
        return {
            **self._plain_config(),
            "similarity": matrices.serialize(self.similarity),
            "similarity_initializer": keras.initializers.serialize(
                self.similarity_initializer
            ),
            "similarity_regularizer": keras.regularizers.serialize(
                self.similarity_regularizer
            ),
            "similarity_constraint": keras.constraints.serialize(
                self.similarity_constraint
            ),
            "predictor": self._serialized_predictor(),
            "learn_shape": self.learn_shape,
            "shape_threshold": self.shape_threshold,
            "kernel_trainable": self.kernel_trainable,
        }

    def _serialized_predictor(self) -> dict[str, Any] | None:
        config = keras.saving.serialize_keras_object(self.predictor)
        if getattr(self.predictor, "serves_several", False):
            # Keras's own key for objects that several configs share. It is set only from
            # the second config on where the object stands inside a layer (Keras 3.15),
            # and then a loaded model would have two of them.
            config["shared_object_id"] = id(self.predictor)
        return config


class VectorSimilarity(NeuralSimilarity):
    """Private mixin: a similarity along the last axis, in blocks of `block_size`.

    Feature `block * T + t` of a vector is what tap `t` of channel `block` is in a
    convolution.
    """

    def __init__(self, *args: Any, block_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_size = validation.optional(
            validation.positive_integer, block_size, "block_size"
        )
        if not self.similarity.shared_by_channels:
            raise ValueError(
                "`similarity` must be shared by all blocks of a vector; 'unconstrained' "
                "without `block_size` is the full matrix. "
                f"Received: similarity={type(self.similarity).__name__!r}"
            )

    def _kernel_grid(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[tuple[int, ...], int]:
        features = validation.known_axis(input_shape, -1, "last axis")
        taps = self.block_size or features
        if features % taps:
            raise ValueError(
                "`block_size` must divide the size of the vectors it cuts. "
                f"Received: block_size={self.block_size}, {features} features"
            )
        return (taps,), features // taps

    def _prediction_shapes(
        self, input_shape: tuple[int | None, ...], outputs: int
    ) -> list[tuple[int | None, ...]]:
        return [(*input_shape[:-1], outputs)]

    def parameters(self, vectors: Tensor, training: bool | None) -> Tensor:
        """Returns the parameters of `M`: one set, or one a vector if it is dynamic."""
        if self.predictor is None:
            return ops.convert_to_tensor(self.similarity_parameters)
        prediction = self.predictor(vectors, training=training)
        return matrices.around(self._identity, prediction, self.compute_dtype)

    def compare(self, parameters: Tensor, vectors: Tensor) -> Tensor:
        """Returns `D M v` for vectors `(..., features)`, in the compute dtype.

        A static `M` is applied in its own float32, whatever the vectors' dtype.
        """
        vectors = ops.cast(vectors, parameters.dtype)
        shape = ops.shape(vectors)
        # A static `M` takes the blocks of all vectors in one product.
        each = () if self.predictor is None else shape[:-1]
        blocks = -1 if not each else vectors.shape[-1] // self._matrix_size
        rows = ops.reshape(vectors, (*each, blocks, self._matrix_size))
        compared = self._structure.compare_rows(
            parameters, rows
        )  # NSL Eq. (3), if dynamic.
        if self.learn_shape:
            compared = compared * ops.cast(
                self._trained_shape(), compared.dtype
            )  # NSL Eq. (4)
        return ops.cast(ops.reshape(compared, shape), self.compute_dtype)

    def equivalent(self, kernel: Tensor) -> Tensor:
        blocks = ops.reshape(kernel, (-1, self._matrix_size, kernel.shape[-1]))
        taps = ops.swapaxes(blocks, 0, 1)
        if self.learn_shape:
            taps = self._trained_shape()[:, None, None] * taps  # NSL Eq. (4)
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        equivalent = self._structure.equivalent_kernel(parameters, taps)
        return ops.reshape(ops.swapaxes(equivalent, 0, 1), kernel.shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "block_size": self.block_size}
