"""Keras layers with one kernel that compute `W^T M x`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import nesting, validation
from nsl_keras.backend import Tensor
from nsl_keras.backend.built_layers import set_autocast
from nsl_keras.similarity.with_similarity import WithSimilarity
from nsl_keras.turning import turned_into

#: The attributes of a convolution that its dynamic `M` needs.
_GEOMETRY = ("kernel_size", "strides", "padding", "dilation_rate", "data_format")


class NeuralSimilarity(WithSimilarity):
    """Private mixin, in front of a Keras layer with one kernel: `W^T M x`.

    Keras does not autocast the kernel, so equivalent kernels are computed in the variables'
    dtype. Keras quantizes no derived layers; quantized policies are refused, except for the
    modes in `quantized`.
    """

    #: The quantization modes that a subclass supports.
    quantized: tuple[str, ...] = ()
    kernel_name = "kernel"
    data_format = "channels_last"  # Dense layers know no other.
    #: The axes of the kernel that number its filters.
    filter_axes: tuple[int, ...] = (-1,)
    own_attributes = ("bilinear_form", "_kernel_trainable", "is_unsaved")
    #: Whether no config contains this layer: a `.keras` file would lose its `M`.
    is_unsaved = False
    _kernel_trainable = True

    def __init__(self, *args: Any, kernel_trainable: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernel_trainable = kernel_trainable

    @property
    def channel_axis(self) -> int:
        return -1 if self.data_format == "channels_last" else 1

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The axes of the input with the features that a filter reads at one position."""
        return (self.channel_axis,)

    @property
    def kernel_variable(self) -> keras.Variable:
        """The weight that holds the kernel; `kernel` adds LoRA, if enabled, to it."""
        # Own variables come before those of sublayers.
        return next(each for each in self.variables if each.name == self.kernel_name)

    @property
    def feature_axes(self) -> tuple[int, ...] | None:
        """The axes of the kernel whose features `M` multiplies; `None` if it has taps.

        A static convolution of one tap and several filters has features by `block_size`.
        """
        is_dense = self.filter_axes == (-1,) and {*self.kernel_size} == {1}
        has_features = is_dense and self.predictor is None and self.block_size is not None
        return (self.rank,) if has_features else None

    def set_similarity(self, similarity: Any, predictor: Any, block_size: Any) -> None:
        form = self.make_form(similarity, predictor, block_size, "bilinear_form")
        self.bilinear_form: Any = form
        # The axes raise for an equation that does not fit.
        fits = self.feature_axes is not None or block_size is None
        demand = "None, unless the layer is dense or a static convolution of kernel size 1"
        validation.require(fits, "block_size", demand, block_size)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        for axis in self.input_axes:
            validation.known_axis(input_shape, axis, "channel axis")
        super().build(input_shape)

    def build_similarity(self, input_shape: tuple[int | None, ...]) -> None:
        fits = self.quantization_mode in (None, *self.quantized)
        kinds = ", ".join(["float", *self.quantized])
        demand = f"one of {kinds} in a {type(self).__name__}"
        received = f"{self.dtype_policy.name} of {self.name}"
        validation.require(fits, "dtype", demand, received)
        kernel = self.kernel_variable
        set_autocast(kernel, False)
        geometry = {name: getattr(self, name, None) for name in _GEOMETRY}
        self.bilinear_form.build(
            tuple(kernel.shape),
            self.filter_axes,
            feature_axes=self.feature_axes,
            kernel_regularizer=kernel.regularizer,
            input_shape=tuple(input_shape),
            geometry=geometry if hasattr(self, "kernel_size") else None,
        )
        nesting.pass_on_frozen(self)
        if not self.kernel_trainable:
            self._set_flags_of_kernel()

    def call(self, inputs: Tensor) -> Tensor:
        # For inputs smaller than the kernel TensorFlow's convolution returns uninitialized
        # memory (2.21, CPU). Keras raises, but older versions let zero positions pass.
        # JAX represents unknown sizes by symbols, which Keras does not compute with.
        shape = tuple(size if isinstance(size, int) else None for size in inputs.shape)
        if hasattr(self, "kernel_size") and 0 in self.compute_output_shape(shape)[1:]:
            raise ValueError(
                "`inputs` must be no smaller than the kernel: the output size would be "
                f"zero or negative. Received: inputs={shape}"
            )
        # Integers too: Keras leaves them as they are.
        outputs = self.apply_kernel(ops.cast(inputs, self.compute_dtype))
        if self.bias is not None:
            # Keras's layers use `ops.add`, which with channels first on TensorFlow adds the
            # bias along the width if it equals the number of filters (Keras 3.15).
            bias = ops.cast(self.bias, outputs.dtype)
            ones = [1] * self.rank if self.data_format == "channels_first" else []
            outputs = outputs + ops.reshape(bias, (*bias.shape, *ones))
        return outputs if self.activation is None else self.activation(outputs)

    def apply_kernel(self, inputs: Tensor) -> Tensor:
        """Returns the outputs before bias and activation."""
        form, kernel = self.bilinear_form, ops.convert_to_tensor(self.kernel)
        if form.predictor is not None:
            # Keras passes `training` on to the form: plain layers have no such argument,
            # and a turned layer keeps the signature of its `call`.
            return form(inputs, kernel)
        kernel = ops.cast(form.fold_kernel(kernel), inputs.dtype)
        return self.plain_product(inputs, kernel)

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Returns the Keras layer's product of inputs and a kernel: a convolution."""
        return self.convolution_op(inputs, kernel)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kernel_trainable": self.kernel_trainable}

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `M^T D W`, in the shape of `kernel`; `D` is the learned shape, if any.

        Raises a ValueError if the layer is dynamic or not built.
        """
        self.bilinear_form.require_kind("static", "equivalent_kernel")
        return self.bilinear_form.fold_kernel(ops.convert_to_tensor(self.kernel))

    @property
    def similarity_matrix(self) -> Tensor:
        """The static `M`, without `D`: `(T, T)`, or `(c T, c T)` if full.

        If `shared_by` is not `"layer"`, the first axis counts blocks of channels or
        filters. Raises a ValueError if the layer is dynamic or not built.
        """
        return self.bilinear_form.similarity_matrix

    @property
    def learned_shape(self) -> Tensor:
        """The diagonal of `D`: 1 for each tap that is kept, 0 for the others.

        Raises a ValueError if the layer does not learn its kernel's shape or is not built.
        """
        return self.bilinear_form.learned_shape

    def predicted_matrices(self, inputs: Tensor) -> Tensor:
        """Returns the `M(x)` that a dynamic layer uses at each position of its output.

        The shape is `(batch, *positions, T, T)`, without `D`; every size of `positions` is
        1 with a pooled predictor. Raises a ValueError if the layer is static or not built.
        """
        self.bilinear_form.require_kind("dynamic", "predicted_matrices")
        return self.bilinear_form.matrices(ops.cast(inputs, self.compute_dtype))

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
        self._kernel_trainable = validation.boolean(value, "kernel_trainable")
        if self.built:
            self._set_flags_of_kernel()

    def _set_flags_of_kernel(self) -> None:
        value = self.kernel_trainable and self.trainable
        if self.quantization_mode is None:
            has_lora = getattr(self, "lora_enabled", False)
            self.kernel_variable.trainable = value and not has_lora
        for name in ("pointwise_kernel", "bias", "activation"):
            part = getattr(self, name, None)
            if isinstance(part, (keras.Variable, keras.layers.Layer)):
                part.trainable = value

    @classmethod
    def turn(cls, layer: Any, is_unsaved: bool, kernel_trainable: bool, *args: Any) -> None:
        """Turns a built plain layer into this class; `args` go to `set_similarity`."""
        with turned_into(layer, cls) as input_shape:
            layer.set_similarity(*args)
            layer.is_unsaved = is_unsaved
            layer.build_similarity(input_shape)
            layer.kernel_trainable = kernel_trainable

    def turn_copy(self, layer: Any) -> None:
        """Turns a plain layer that already has this layer's kernel into a copy of it."""
        of_similarity = self.similarity, self.predictor, self.block_size
        self.turn(layer, self.is_unsaved, self.kernel_trainable, *of_similarity)
        forms = self.bilinear_form, layer.bilinear_form
        for variable, new in zip(*(each.variables for each in forms), strict=True):
            new.assign(variable)

    def folded_variables(self) -> list[tuple[keras.Variable, Tensor]]:
        self.bilinear_form.require_kind("static", "fold")
        is_float = self.quantization_mode is None
        demand = "float, not quantized, to be folded"
        validation.require(is_float, "kernel", demand, self.quantization_mode)
        folded = [(self.kernel_variable, self.equivalent_kernel)]
        if getattr(self, "lora_enabled", False):  # The folded kernel contains it.
            folded.append((self.lora_kernel_b, ops.zeros(self.lora_kernel_b.shape)))
        return folded

    def become_plain(self) -> None:
        set_autocast(self.kernel_variable, True)
        self.kernel_trainable = True
        super().become_plain()

    def save_assets(self, _: str) -> None:
        """Raises if a `.keras` file, which Keras is writing, would lose `M`."""
        if self.is_unsaved:
            raise ValueError(
                f"`{self.path}` has a similarity inside a layer whose config does not "
                "contain it, so a file of the whole model would lose `M`. Call "
                "`convert.fold` and save the folded model, or call `convert.save_task`."
            )
