"""What every layer with a neural similarity shares: the matrix M and the kernel's shape.

A layer stores a similarity, makes its weight or takes it from a predictor, and compares
`W^T M x` with it. Kernels come and go here with their taps flattened: `(T, c, o)`.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32, outside_traces
from nsl_keras.similarity import matrices


class NeuralSimilarity(keras.layers.Layer):
    """Private base: similarity arguments, static `M`, dynamic `M`, learned kernel shape.

    A subclass calls `_store_similarity` in `__init__`, `_build_similarity` in `build`, and
    adds `_similarity_config()` to its config. It has a `kernel` and a `bias`, and says with
    `_plain_layer` what it folds to.
    """

    def _store_similarity(
        self,
        *,
        similarity: Any,
        similarity_initializer: Any,
        similarity_regularizer: Any,
        similarity_constraint: Any,
        predictor: Any,
        learn_shape: bool,
        shape_threshold: float,
        kernel_trainable: bool,
    ) -> None:
        """Validates and stores the arguments; call it last in `__init__`."""
        self.similarity = matrices.get(similarity)
        self.similarity_initializer = keras.initializers.get(similarity_initializer)
        self.similarity_regularizer = keras.regularizers.get(similarity_regularizer)
        self.similarity_constraint = keras.constraints.get(similarity_constraint)
        self.learn_shape = bool(learn_shape)
        self.shape_threshold = validation.fraction(shape_threshold, "shape_threshold")
        self._kernel_trainable = bool(kernel_trainable)
        self.predictor = self._resolve_predictor(predictor)

    def _resolve_predictor(self, predictor: Any) -> keras.layers.Layer | None:
        if predictor is None:
            return None
        if isinstance(predictor, dict):
            predictor = keras.saving.deserialize_keras_object(predictor)
        if self.similarity.static_only:
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
        if not isinstance(self.similarity_initializer, keras.initializers.Identity):
            raise ValueError(
                "`similarity_initializer` applies to a static similarity and must be "
                "'identity' with a predictor. Received: "
                f"similarity_initializer={self.similarity_initializer}"
            )
        if isinstance(predictor, keras.layers.Layer):
            return predictor
        kinds = self._predictor_kinds()
        if not isinstance(predictor, str) or predictor not in kinds:
            names = ", ".join(repr(kind) for kind in kinds)
            raise ValueError(
                f"`predictor` must be None, one of {names}, or a layer. "
                f"Received: predictor={predictor!r}"
            )
        return self._make_predictor(predictor)

    def _predictor_kinds(self) -> tuple[str, ...]:
        """Returns the names of the predictors that the layer can make."""
        raise NotImplementedError

    def _make_predictor(self, kind: str) -> keras.layers.Layer:
        """Returns a predictor of a kind, with the layer's own geometry."""
        raise NotImplementedError

    def _plain_layer(self) -> keras.layers.Layer:
        """Returns the plain Keras layer that the static layer folds to, built."""
        raise NotImplementedError

    def _build_similarity(self, kernel_size: tuple[int, ...], channels: int) -> None:
        """Makes the weights of `M` and of the kernel's shape.

        Args:
            kernel_size: Sizes along the axes that the taps are numbered over.
            channels: Number of channels that a filter of the kernel reads.
        """
        taps = math.prod(kernel_size)
        self._structure = self.similarity.for_kernel_size(kernel_size)
        self._matrix_size = taps if self._structure.shared_by_channels else taps * channels
        if self.predictor is None:
            self.similarity_parameters = self.add_weight(
                name="similarity",
                shape=self._structure.parameter_shape(self._matrix_size),
                initializer=self._initial_parameters,
                regularizer=self.similarity_regularizer,
                constraint=self.similarity_constraint,
                autocast=False,
            )
        self.shape_parameters = (
            self.add_weight(name="shape", shape=(taps,), initializer="ones", autocast=False)
            if self.learn_shape
            else None
        )
        self._apply_kernel_trainable()

    def _initial_parameters(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        del shape  # That of the similarity's parameters, which is checked below.
        size = (self._matrix_size, self._matrix_size)
        with outside_traces():
            # A similarity may have to look at the values, as a Cholesky factor does.
            matrix = ops.convert_to_numpy(self.similarity_initializer(size, dtype=dtype))
        return self._parameters_from(matrix)

    def _parameters_from(self, matrix: Any) -> Tensor:
        parameters = ops.cast(self._structure.parameters_from(matrix), self.variable_dtype)
        expected = tuple(self._structure.parameter_shape(self._matrix_size))
        if tuple(parameters.shape) != expected:
            raise ValueError(
                "`similarity.parameters_from` must return the shape that "
                f"`similarity.parameter_shape` names, {expected}. "
                f"Received: shape {tuple(parameters.shape)} from {self.similarity!r}"
            )
        return parameters

    @property
    def kernel_trainable(self) -> bool:
        """Whether kernel and bias are trained, or the similarity alone."""
        if self.built and self.trainable:
            return self.kernel.trainable
        return self._kernel_trainable

    @kernel_trainable.setter
    def kernel_trainable(self, value: bool) -> None:
        self._kernel_trainable = bool(value)
        if self.built:
            self._apply_kernel_trainable()

    def _apply_kernel_trainable(self) -> None:
        for variable in (self.kernel, self.bias):
            if variable is not None:
                variable.trainable = self._kernel_trainable and self.trainable

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`, without the kernel's shape: `(T, T)`, or `(c T, c T)` if full.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self._require_static("similarity_matrix")
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
        self._require_built("learned_shape")
        kept = ops.convert_to_tensor(self.shape_parameters) > self.shape_threshold
        return ops.cast(kept, self.variable_dtype)

    def _shaped(self, kernel: Tensor) -> Tensor:
        """Returns a kernel `(T, c, o)` without the taps that `D` leaves out.

        The forward and backward pass use the Boolean `d`; its gradient goes to the real
        parameters as it is (straight-through).
        """
        if not self.learn_shape:
            return kernel
        real = ops.convert_to_tensor(self.shape_parameters)
        shape = self.learned_shape + (real - ops.stop_gradient(real))
        return shape[:, None, None] * kernel

    def _equivalent(self, kernel: Tensor) -> Tensor:
        """Returns `W^[u,c,o] = sum_t W[t,c,o] d[t] M[t,u]` for a kernel `(T, c, o)`."""
        kernel = self._shaped(kernel)
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        if self._structure.shared_by_channels:
            return self._structure.equivalent_kernel(parameters, kernel)
        taps, channels, filters = kernel.shape
        channels_first = ops.reshape(
            ops.transpose(kernel, (1, 0, 2)), (channels * taps, 1, filters)
        )
        equivalent = self._structure.equivalent_kernel(parameters, channels_first)
        return ops.transpose(ops.reshape(equivalent, (channels, taps, filters)), (1, 0, 2))

    def _similarity_at(self, prediction: Tensor, dtype: str) -> Tensor:
        """Returns the similarity's parameters from a prediction `(..., outputs)`."""
        identity = self._parameters_from(np.eye(self._matrix_size))
        shape = (*ops.shape(prediction)[:-1], *identity.shape)
        residual = at_least_float32(ops.reshape(prediction, shape))
        return ops.cast(residual + ops.cast(identity, residual.dtype), dtype)

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `W^[u,c,o] = sum_t W[t,c,o] M[t,u]`, in the shape of `kernel`.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self._require_static("equivalent_kernel")
        kernel = ops.convert_to_tensor(self.kernel)
        return self._unflatten(self._equivalent(self._flatten(kernel)))

    def _flatten(self, kernel: Tensor) -> Tensor:
        """Returns a kernel of the layer's shape as `(T, c, o)`."""
        return ops.reshape(kernel, (-1, *kernel.shape[-2:]))

    def _unflatten(self, kernel: Tensor) -> Tensor:
        """Returns a kernel `(T, c, o)` in the layer's shape."""
        return ops.reshape(kernel, self.kernel.shape)

    def fold(self) -> keras.layers.Layer:
        """Returns a new plain Keras layer that computes the same.

        This layer stays as it is, and the two share no weights.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self._require_static("fold")
        plain = self._plain_layer()
        plain.kernel.assign(self.equivalent_kernel)
        if self.bias is not None:
            # A copy: on JAX the two would share a buffer, which training gives away.
            plain.bias.assign(ops.convert_to_numpy(self.bias.value))
        return plain

    def _require_static(self, what: str) -> None:
        if self.predictor is not None:
            raise ValueError(
                f"`{what}` needs a static similarity: layer {self.name!r} predicts its "
                "similarity from the input. Received: "
                f"predictor={self.predictor.name!r}"
            )
        self._require_built(what)

    def _require_built(self, what: str) -> None:
        if not self.built:
            raise ValueError(
                f"`{what}` needs a built layer. Call layer {self.name!r} on data, or "
                "its `build(input_shape)`, first."
            )

    def _similarity_config(self) -> dict[str, Any]:
        return {
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
        return keras.saving.serialize_keras_object(self.predictor)
