"""The dynamic `M`: a predictor, then `M(x) x` under the kernel at every position."""

from __future__ import annotations

import inspect
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import similarities, validation
from nsl_keras.backend import Tensor, at_least_float32, map_chunks
from nsl_keras.similarity import predictors
from nsl_keras.similarity.form import BilinearForm
from nsl_keras.similarity.shared_predictor import SharedSimilarityPredictor


class DynamicForm(BilinearForm):
    """A dynamic `M(x)` of a convolution: `y = W^T M(x) x` at every output position.

    The predictor is a recipe or a layer. `network` is the layer that predicts `M`, once
    built, and `identity_parameters` are those of the identity. See also `BilinearForm`.
    """

    def __init__(self, similarity: Any, predictor: Any, **kwargs: Any) -> None:
        super().__init__(similarity, **kwargs)
        self.predictor = predictor
        #: Whether the predictions are differences from the identity.
        self.residual = True
        if isinstance(predictor, keras.layers.Layer):
            predictors.forms_of.setdefault(predictor, weakref.WeakSet()).add(self)
        start = similarity.initializer
        at_identity = isinstance(start, keras.initializers.Identity) and start.gain == 1
        is_plain = similarity.shared_by == "layer" and similarity.constraint is None
        fits = at_identity and is_plain and not similarity.static_only
        demand = (
            "one that can be predicted, without an `initializer`, `constraint` or "
            "`shared_by` of its own, if a `predictor` is given"
        )
        validation.require(fits, "similarity", demand, type(similarity).__name__)

    def build(
        self,
        kernel_shape: tuple[int, ...],
        filter_axes: tuple[int, ...],
        kernel_regularizer: Any,
        feature_axes: tuple[int, ...] | None = None,
        input_shape: Any = None,
        geometry: Any = None,
        width: int | None = None,
    ) -> None:
        """Makes the network for a kernel whose axes `filter_axes` number its filters.

        For `feature_axes` see `measure`, for the other arguments `predictors.LayerContext`;
        a `width` of `None` is the number of filters.
        """
        self.measure(kernel_shape, feature_axes)
        #: Without it Keras would warn of a mask of vectors; positions have no mask.
        self.supports_masking = self.on_vectors
        self.geometry = geometry
        self.identity_parameters = self.similarity.start(self.taps, self.variable_dtype)
        fits, demand = self.identity_parameters.size, "one with parameters to predict"
        validation.require(fits, "similarity", demand, type(self.similarity).__name__)
        if self.on_vectors:
            input_shape = (None, self.features)
        context = predictors.LayerContext(
            input_shape=input_shape,
            identity_parameters=self.identity_parameters,
            width=width or math.prod(kernel_shape[axis] for axis in filter_axes),
            is_diagonal=isinstance(self.similarity, similarities.Diagonal),
            geometry=geometry,
            kernel_regularizer=kernel_regularizer,
            dtype=self.dtype_policy,
            is_depthwise=len(filter_axes) > 1,
        )
        self.channel_axis = context.channel_axis
        #: The side of the blocks of positions that share one `M`.
        self.downsampling = 1
        recipes = (predictors.SimilarityPredictor, SharedSimilarityPredictor)
        if isinstance(self.predictor, recipes):
            self.network = self.predictor.make_network(context)
            # A shared predictor has a recipe, which `make_network` has just completed.
            recipe = getattr(self.predictor, "predictor", self.predictor)
            self.residual = recipe.residual
            received = tuple(self.network.compute_output_shape(input_shape))
            if len(received) > 2:
                self.downsampling = recipe.block_side(context)
        else:  # The predictor is a custom layer.
            self.network = self.predictor
            inputs = keras.KerasTensor(input_shape, self.compute_dtype)
            # Builds it. A symbolic call would leave a node in the layer's graph.
            call = keras.layers.Lambda(lambda x: self.network(x), name="call")
            received = tuple(call.compute_output_spec(inputs).shape)
        axis = -1 if len(received) == 2 else self.channel_axis
        fits = received[axis] == context.outputs
        demand = f"{context.outputs}, the number of parameters of `M`, on axis {axis}"
        validation.require(fits, "predictor.output_shape", demand, received)
        self.build_learned_shape()

    def call(self, inputs: Tensor, kernel: Tensor, training: bool | None = None) -> Tensor:
        """Returns `W^T M(x) x` at every output position."""
        parameters = self.predict_parameters(inputs)
        if self.shape_parameters is not None:
            mask = ops.reshape(self.shape_mask(), (*self.kernel_size, 1, 1))
            kernel = mask * kernel  # NSL Eq. (4)
        kernel = ops.cast(kernel, inputs.dtype)
        inputs = ops.moveaxis(inputs, self.channel_axis, -1)
        if training:
            # Recomputed for the gradient, on CPUs a few examples at a time: `M(x) x` is the
            # input's size times the number of taps. Chunks sum the kernel's gradient in
            # float32.
            size = math.prod(ops.shape(inputs)[1:]) * self.taps
            shared, entries = [at_least_float32(kernel)], [parameters, inputs]
            outputs = map_chunks(self.product, shared, entries, size)
        else:
            outputs = self.product(kernel, parameters, inputs)
        return ops.moveaxis(outputs, -1, self.channel_axis)

    def predict_parameters(
        self, inputs: Tensor, penalized: bool = True, mask: Tensor | None = None
    ) -> Tensor:
        """Returns the parameters of `M(x)` per vector or block of positions.

        The parameters are on the last axes. With one `M` per example all spatial axes have
        size 1. Batch norms leave out masked vectors. `penalized` adds the mean penalty on
        `M` to the losses.
        """
        if self.on_vectors:
            options = {}
            names = {} if mask is None else inspect.signature(self.network.call).parameters
            if "mask" in names:
                options["mask"] = ops.reshape(mask, (-1,))
            rows = ops.reshape(inputs, (-1, inputs.shape[-1]))
            prediction = self.network(rows, **options)
            leading = ops.shape(inputs)[:-1]
        else:
            prediction = self.network(inputs)  # NSL Eq. (3): M(x)
            positions: Any = [1] * len(self.kernel_size)
            if len(prediction.shape) > 2:
                prediction = ops.moveaxis(prediction, self.channel_axis, -1)
                positions = ops.shape(prediction)[1:-1]
            leading = (ops.shape(prediction)[0], *positions)
        parameters = ops.reshape(prediction, (*leading, *self.identity_parameters.shape))
        parameters = ops.cast(parameters, self.precision)
        if self.residual:
            parameters = parameters + ops.cast(self.identity_parameters, self.precision)
        if penalized and self.similarity.regularizer is not None:
            each = ops.reshape(parameters, (-1, *self.identity_parameters.shape))
            count = ops.maximum(ops.shape(each)[0], 1)  # A batch may be empty.
            matrices = self.similarity.matrix(each, self.taps)
            penalty = self.similarity.regularizer(matrices)
            self.add_loss(penalty / ops.cast(count, self.precision))
        return ops.cast(parameters, inputs.dtype)

    def matrices(self, inputs: Tensor) -> Tensor:
        """Returns `M(x)` for every vector, or at every position of the output."""
        parameters = self.predict_parameters(inputs, penalized=False)
        if not self.on_vectors:
            moved = ops.moveaxis(inputs, self.channel_axis, -1)
            patch, *_ = windows(moved, self.geometry)
            parameters = self.at_positions(parameters, ops.shape(patch)[1:-1])
        return self.similarity.matrix(parameters, self.taps)

    def at_positions(self, parameters: Tensor, positions: Sequence[Any]) -> Tensor:
        """Returns parameters for every position from those for every block of positions."""
        predicted = ops.shape(parameters)[1 : 1 + len(positions)]
        wanted = [-(-size // self.downsampling) for size in positions]
        pairs = zip(predicted, wanted, strict=True)
        sized = [pair for pair in pairs if all(isinstance(size, int) for size in pair)]
        # One prediction per example, without a recipe's blocks, serves all positions.
        is_one = self.downsampling == 1 and all(found == 1 for found, _ in sized)
        if not is_one and any(found != size for found, size in sized):
            raise ValueError(
                "`predictions` must be at each position, or block of `downsampling`, of "
                f"{tuple(positions)}. Received: predictions={tuple(predicted)}"
            )
        if self.downsampling == 1:
            return parameters
        for axis, size in enumerate(positions, start=1):
            shape = list(ops.shape(parameters))
            known = isinstance(shape[axis], int) and isinstance(size, int)
            shape[axis] *= self.downsampling
            # Not `ops.repeat`, which is slower on a CPU.
            copies = [ops.expand_dims(parameters, axis + 1)] * self.downsampling
            parameters = ops.reshape(ops.concatenate(copies, axis + 1), shape)
            # A slice of everything would cost a copy in the gradient.
            if not known or shape[axis] != size:
                shape[axis] = size
                parameters = ops.slice(parameters, (0,) * len(shape), shape)
        return parameters

    def multiply_windows(self, parameters: Tensor, inputs: Tensor) -> list[Tensor]:
        """Returns `M(x) x` at every position, tap by tap, in one or more parts."""
        patches = windows(inputs, self.geometry)
        positions = patches[0].shape[1:-1]
        if self.downsampling > 1 or parameters.shape[1 : 1 + len(positions)] != positions:
            parameters = self.at_positions(parameters, ops.shape(patches[0])[1:-1])
        return self.similarity.apply_to_windows(parameters, patches)

    def product(self, kernel: Tensor, parameters: Tensor, inputs: Tensor) -> Tensor:
        """Returns `sum_c sum_t sum_u W[t,c,o] M(x)[p,t,u] x[p,u,c]`, with channels last."""
        weighted = self.multiply_windows(parameters, inputs)
        weights = ops.cast(ops.reshape(kernel, (-1, kernel.shape[-1])), inputs.dtype)
        parts = zip(weighted, ops.split(weights, len(weighted)), strict=True)
        outputs = sum(
            ops.matmul(ops.reshape(part, (-1, part.shape[-1])), weight)  # NSL Eq. (3)
            for part, weight in parts
        )
        return ops.reshape(outputs, (*ops.shape(weighted[0])[:-1], kernel.shape[-1]))


def windows(inputs: Tensor, geometry: dict[str, Any]) -> list[Tensor]:
    """Returns the input under every tap, as shifted copies; channels are last."""
    names = "kernel_size", "strides", "padding", "dilation_rate"
    kernel_size, strides, padding, dilation_rate = (geometry[name] for name in names)
    # Each size is an int if known, else a scalar tensor, or a symbol of JAX.
    batch, *sizes, channels = ops.shape(inputs)
    lengths, extents, paddings = [], [], []
    for size, k, s, d in zip(sizes, kernel_size, strides, dilation_rate, strict=True):
        maximum: Any = ops.maximum if ops.is_tensor(size) else max
        reach = (k - 1) * d
        # The number of output positions. ONNX truncates quotients: none may be negative.
        length = (size - (reach if padding == "valid" else 0) - 1) // s + 1
        needed = maximum((length - 1) * s + reach + 1 - size, 0)
        before = {"valid": 0, "causal": reach, "same": needed // 2}[padding]
        extent = s * (length + reach // s)
        lengths.append(length)
        extents.append(extent)
        paddings.append([before, maximum(extent - before - size, 0)])
    # Each axis is split into s phases (every s-th pixel), so a tap is a slice of one phase.
    phases: dict[tuple[int, ...], Tensor]
    phases = {(0,) * len(extents): ops.pad(inputs, [[0, 0], *paddings, [0, 0]])}
    for axis, (stride, extent) in enumerate(zip(strides, extents, strict=True)):
        if stride > 1:
            phases = {
                (*place[:axis], number, *place[axis + 1 :]): phase
                for place, tensor in phases.items()
                for number, phase in enumerate(_phases(tensor, axis + 1, stride, extent))
            }
    shifted = []
    for tap in itertools.product(*(range(k) for k in kernel_size)):
        offsets = [t * d for t, d in zip(tap, dilation_rate, strict=True)]
        place = tuple(o % s for o, s in zip(offsets, strides, strict=True))
        start = [o // s for o, s in zip(offsets, strides, strict=True)]
        # A slice, whose gradient is a padding: without XLA on a CPU, TensorFlow computes
        # the gradient of indexing several times slower.
        shifted.append(
            ops.slice(phases[place], (0, *start, 0), (batch, *lengths, channels))
        )
    return shifted


def _phases(tensor: Tensor, axis: int, stride: int, extent: Any) -> list[Tensor]:
    """Returns the first `extent` pixels along an axis, dealt out to `stride` tensors."""
    shape = list(ops.shape(tensor))
    shape[axis] = extent
    cropped = ops.slice(tensor, (0,) * len(shape), shape)
    shape[axis : axis + 1] = [extent // stride, stride]
    return ops.unstack(ops.reshape(cropped, shape), stride, axis + 1)
