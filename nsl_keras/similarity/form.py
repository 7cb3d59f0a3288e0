"""What a static and a dynamic `M` share: the structure, and the kernel's learned shape."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras import nesting, validation
from nsl_keras.backend import Tensor, wide_dtype
from nsl_keras.similarities import Similarity


class BilinearForm(keras.layers.Layer):
    """The `M` of one kernel, with the kernel's learned shape `D`.

    Without a learned shape `D` is the identity. Half precision ends at this layer: `M` and
    `D` multiply the kernel in the variables' dtype. In dense and recurrent layers, feature
    `block * T + t` of a vector takes the role of tap `t` of channel `block`, with
    `T = block_size`.

    Attributes:
        predictor: The predictor of a dynamic `M`, and `network`, the layer that it made.
        similarity_parameters: The weight of a static `M`.
        shape_parameters: The weight of the learned shape; `None` without one.
        kernel_size, taps: The number of taps along each axis, and their product `T`.
        size: The size of `M`: the number of taps, of all channels if `M` is full.
        channels: The number of channels that a filter reads; on vectors, of blocks.
        features: The length of the vectors, for kernels of dense and recurrent layers.
    """

    predictor: Any = None
    network: Any = None
    similarity_parameters: Any = None
    shape_parameters: Any = None

    def __init__(
        self, similarity: Similarity, block_size: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        self.precision = wide_dtype(self.variable_dtype)
        self.similarity = similarity
        check = validation.positive_integer
        self.block_size = validation.optional(check, block_size, "block_size")

    def measure(
        self, kernel_shape: tuple[int, ...], feature_axes: tuple[int, ...] | None
    ) -> None:
        """Sets the numbers of taps and channels of a kernel.

        `feature_axes` are the axes of a kernel that multiplies vectors, `None` for others.
        """
        self.on_vectors = feature_axes is not None
        if feature_axes is not None:
            features = math.prod(kernel_shape[axis] for axis in feature_axes)
            size = self.block_size or features
            demand = f"a divisor of the {features} features"
            validation.require(features % size == 0, "block_size", demand, size)
            self.kernel_size: tuple[int, ...] = (size,)
            self.features, self.channels = features, features // size
        else:
            self.kernel_size, self.channels = tuple(kernel_shape[:-2]), kernel_shape[-2]
        self.taps = self.size = math.prod(self.kernel_size)

    def build_learned_shape(self) -> None:
        """Makes the weight of the learned shape, if any; call it at the end of `build`."""
        if self.similarity.learn_shape:
            self.shape_parameters = self.add_weight(
                name="shape", shape=(self.taps,), initializer="ones", autocast=False
            )
        nesting.pass_on_frozen(self)

    def shape_mask(self) -> Tensor:
        """Returns `learned_shape`, whose gradient goes to the shape's real parameters."""
        real = ops.convert_to_tensor(self.shape_parameters)
        return self.learned_shape + (real - ops.stop_gradient(real))  # NSL Eq. (5)

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for each tap that is kept, 0 for the others."""
        learned = self.similarity.learn_shape
        validation.require(learned, "learn_shape", "True for `learned_shape`", learned)
        validation.require_built(self, "learned_shape")
        threshold = self.similarity.shape_threshold
        kept = ops.convert_to_tensor(self.shape_parameters) > threshold
        return ops.cast(kept, self.variable_dtype)

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`; several matrices are stacked on the first axis."""
        self.require_kind("static", "similarity_matrix")
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        return self.similarity.matrix(parameters, self.size)

    def require_kind(self, wanted: str, what: str) -> None:
        """Raises unless `M` is static, or dynamic, as wanted, and built."""
        fits = (self.predictor is None) == (wanted == "static")
        demand = f"{'None' if wanted == 'static' else 'given'} for `{what}`"
        validation.require(fits, "predictor", demand, self.predictor)
        validation.require_built(self, what)
