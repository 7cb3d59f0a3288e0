"""The static `M`: from its parameters to the equivalent kernel `M^T D W`."""

from __future__ import annotations

import functools
import math
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarities import Diagonal
from nsl_keras.similarity.form import BilinearForm

#: The most features of a block whose `M` is computed: `M` would outgrow the kernel.
_LARGEST = 1024


class _KerasFunction(keras.regularizers.Regularizer, keras.constraints.Constraint):
    """A function in one of these roles: Keras before 3.15 takes no functions."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, value: Any) -> Tensor:
        return self.function(ops.convert_to_tensor(value))


class StaticForm(BilinearForm):
    """A static `M`, a weight: `W^T M x = (M^T W)^T x`, so it folds into the kernel.

    If there are several `M`, the first axis of `similarity_parameters` numbers them: blocks
    of channels, or filters. See `BilinearForm` for arguments and attributes.
    """

    def build(
        self,
        kernel_shape: tuple[int, ...],
        filter_axes: tuple[int, ...],
        feature_axes: tuple[int, ...] | None = None,
        **_: Any,
    ) -> None:
        """Makes the weight for a kernel whose axes `filter_axes` number its filters.

        These are -2 and -1 of a depthwise convolution, and -2 of a transposed one. For
        `feature_axes` see `measure`.
        """
        self.measure(kernel_shape, feature_axes)
        axes = feature_axes or ()
        others = (axis for axis in range(len(kernel_shape)) if axis not in axes)
        self._features_first = [*axes, *others]
        # The numbers of channels and of filters.
        sizes = self.channels, math.prod(kernel_shape) // (self.taps * self.channels)
        similarity = self.similarity
        full = not similarity.shared_by_channels
        fits = not full or (len(filter_axes) == 1 and not self.on_vectors)
        demand = "shared by all channels, except in full convolutions"
        validation.require(fits, "similarity", demand, type(similarity).__name__)
        # The number of `M` along the last two axes of the kernel.
        counts, shared_by = [1, 1], similarity.shared_by
        if shared_by == "filter":
            for axis in filter_axes:
                counts[axis] = sizes[axis]
        elif shared_by != "layer":
            axis = -1 if filter_axes == (-2,) else -2
            demand = f"a divisor of the {sizes[axis]} channels that a filter reads"
            divides = sizes[axis] % shared_by == 0
            validation.require(divides, "shared_by", demand, shared_by)
            counts[axis] = sizes[axis] // shared_by
        # `fold_kernel` views the kernel as `_blocks`: (taps, blocks of channels, channels,
        # blocks of filters, filters), or on vectors with the taps third. Each pair of
        # blocks has its own `M`. `_order` moves both axes of blocks to the front, followed
        # by what `M` multiplies; `_by_matrix` is then (matrices, size, others, filters).
        # For 3x3 taps, 2 channels, 4 filters and an `M` for each filter: (3, 3, 2, 4), in
        # blocks (9, 1, 2, 4, 1), in order (1, 4, 9, 2, 1), by matrix (4, 9, 2, 1).
        (first, second), (channels, filters) = counts, sizes
        of_channels, of_filters = (first, channels // first), (second, filters // second)
        self._blocks: tuple[int, ...] = (self.taps, *of_channels, *of_filters)
        self._order = (1, 3, 2, 0, 4) if full else (1, 3, 0, 2, 4)
        if self.on_vectors:
            self._blocks = (*of_channels, self.taps, *of_filters)
            self._order = (0, 3, 2, 1, 4)
        if full:
            self.size = self.taps * (channels // first)
        is_vector = isinstance(similarity, Diagonal) and similarity.regularizer is None
        demand = (
            f"given, and at most {_LARGEST}, unless the similarity is diagonal and has no "
            f"regularizer: `M` would have {self.size}^2 entries"
        )
        fits = self.size <= _LARGEST or is_vector or not self.on_vectors
        validation.require(fits, "block_size", demand, self.block_size)
        leading = () if shared_by == "layer" else (first * second,)
        self._by_matrix = (*leading, self.size, -1, filters // second)
        start = similarity.start(self.size, self.variable_dtype)
        start = np.broadcast_to(start, (*leading, *start.shape))
        constraint = similarity.constraint
        if leading and constraint is not None:
            constraint = _KerasFunction(functools.partial(ops.vectorized_map, constraint))
        self.similarity_parameters = self.add_weight(
            name="similarity",
            shape=start.shape,
            initializer=lambda shape, dtype: ops.convert_to_tensor(start, dtype),
            regularizer=similarity.regularizer and _KerasFunction(self._penalty),
            constraint=constraint,
            autocast=False,
        )
        self.build_learned_shape()

    def _penalty(self, _: Tensor) -> Tensor:
        return self.similarity.regularizer(self.similarity_matrix)

    def fold_kernel(self, kernel: Tensor) -> Tensor:
        """Returns the equivalent kernel `M^T D W`, in the shape of the kernel `W`."""
        moved = ops.transpose(kernel, self._features_first)
        blocks = ops.reshape(moved, self._blocks)
        if self.shape_parameters is not None:
            ones = [1] * (2 if self.on_vectors else 4)
            blocks = ops.reshape(self.shape_mask(), (-1, *ones)) * blocks  # NSL Eq. (4)
        blocks = ops.transpose(blocks, self._order)
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        equivalent = self.similarity.equivalent_kernel(  # NSL Eq. (2)
            parameters, ops.reshape(blocks, self._by_matrix)
        )
        # The same way back.
        equivalent = ops.reshape(equivalent, blocks.shape)
        equivalent = ops.transpose(equivalent, np.argsort(self._order).tolist())
        equivalent = ops.reshape(equivalent, moved.shape)
        return ops.transpose(equivalent, np.argsort(self._features_first).tolist())

    def multiply(self, vectors: Tensor, seen: Tensor | None = None) -> Tensor:
        """Returns `M x` for vectors `x` with the features last; `seen` is not used.

        Filters must share `M`, which must not have a learned shape.
        """
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        is_one = self.similarity.shared_by == "layer"
        blocks = (-1, self.taps) if is_one else (-1, *self._blocks[:3])
        rows = ops.reshape(ops.cast(vectors, parameters.dtype), blocks)
        products = self.similarity.apply_to_rows(parameters, rows)
        return ops.cast(ops.reshape(products, ops.shape(vectors)), vectors.dtype)
