"""Keras layers with one kernel that compute `W^T M x`."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import nesting, similarities, validation
from nsl_keras.backend import Tensor
from nsl_keras.backend.built_layers import set_autocast
from nsl_keras.similarity import predictors
from nsl_keras.similarity.dynamic import DynamicForm
from nsl_keras.similarity.form import BilinearForm
from nsl_keras.similarity.kernels import FloatKernel, windows
from nsl_keras.similarity.static import StaticForm
from nsl_keras.turning import Foldable, turned_into

#: An entry in the file of a layer with a similarity.
_MARK = "has_similarity"
#: The attributes of a convolution that its dynamic `M` needs.
_GEOMETRY = ("kernel_size", "strides", "padding", "dilation_rate", "data_format")


class WithSimilarity(nesting.KeepsFrozen, Foldable):
    """Private mixin, in front of a Keras layer: a layer with a static or dynamic `M`.

    A mark in the file makes the plain layer refuse the weights of this layer: it would
    ignore those of `M` and load the rest. `bilinear_form` is the `M`; the subclass's
    `set_similarity` makes it for a plain layer, and `build_similarity` builds it.
    """

    #: The form of a predicted `M(x)`; `None` if the layer is always static.
    dynamic_form: type[DynamicForm] | None = DynamicForm
    # Read-only: the form holds them.
    similarity = property(attrgetter("bilinear_form.similarity"))
    predictor = property(attrgetter("bilinear_form.predictor"))
    block_size = property(attrgetter("bilinear_form.block_size"))

    def __init__(
        self,
        *args: Any,
        similarity: Any = "diagonal",
        predictor: Any = None,
        block_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        similarity, predictor = similarities.get(similarity), predictors.get(predictor)
        self.set_similarity(similarity, predictor, block_size)

    def make_form(self, similarity: Any, predictor: Any, block_size: Any, name: str) -> Any:
        """Returns an `M` for a kernel: a static one, or with a predictor a dynamic one."""
        options = {"block_size": block_size, "dtype": self.dtype_policy, "name": name}
        if predictor is None:
            return StaticForm(similarity, **options)
        fits = self.dynamic_form is not None and getattr(self, "groups", 1) == 1
        demand = "None in EinsumDense and transposed layers, and with `groups` above 1"
        validation.require(fits, "predictor", demand, predictor)
        make: Any = self.dynamic_form
        return make(similarity, predictor, **options)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.build_similarity(input_shape)

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        store[_MARK] = np.ones(1)  # A plain layer refuses one entry too many.

    def load_own_variables(self, store: Any) -> None:
        own = set(store.keys()) - {_MARK}
        super().load_own_variables({key: store[key] for key in own})

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        predictor: Any = serialize(self.predictor)
        if isinstance(self.predictor, keras.layers.Layer):
            # Keras's own key for objects that several configs share. For an object inside a
            # layer, Keras sets it only from the second config on (3.15), so a loaded model
            # would contain two copies.
            live = predictor["shared_object_id"] = predictors.LiveId(id(self.predictor))
            forms = predictors.forms_of[self.predictor]
            own = [each for each in forms_in(self) if each in forms]
            live.layers = len(forms) // len(own)  # A recurrent cell has two.
        return {
            **super().get_config(),
            "similarity": serialize(self.similarity),
            "predictor": predictor,
            "block_size": self.block_size,
        }


class NeuralSimilarity(WithSimilarity, FloatKernel):
    """Private mixin, in front of a Keras layer with one kernel: `W^T M x`.

    `FloatKernel.call` adds bias and activation to what `apply_kernel` returns.
    """

    #: The axes of the kernel that number its filters.
    filter_axes: tuple[int, ...] = (-1,)
    own_attributes = ("bilinear_form", "_kernel_trainable", "is_inside")
    #: Whether a layer that does not save this one as its part contains it.
    is_inside = False
    _kernel_trainable = True

    def __init__(self, *args: Any, kernel_trainable: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernel_trainable = kernel_trainable

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

    def build_similarity(self, input_shape: tuple[int | None, ...]) -> None:
        self.require_plain_kernel()
        kernel = self.kernel_variable
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

    def apply_kernel(self, inputs: Tensor) -> Tensor:
        form, kernel = self.bilinear_form, ops.convert_to_tensor(self.kernel)
        if form.predictor is not None:
            # Keras passes `training` on to the form: plain layers have no such argument,
            # and a turned layer keeps the signature of its `call`.
            return form(inputs, kernel)
        kernel = ops.cast(form.equivalent(kernel), inputs.dtype)
        return self.plain_product(inputs, kernel)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kernel_trainable": self.kernel_trainable}

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `M^T D W`, in the shape of `kernel`; `D` is the learned shape, if any.

        Raises a ValueError if the layer is dynamic or not built.
        """
        self.bilinear_form.require("static", "equivalent_kernel")
        return self.bilinear_form.equivalent(ops.convert_to_tensor(self.kernel))

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
        form = self.bilinear_form
        form.require("dynamic", "predicted_matrices")
        inputs = ops.cast(inputs, self.compute_dtype)
        parameters = form.predicted(inputs, penalized=False)
        if not form.on_vectors:
            moved = ops.moveaxis(inputs, self.channel_axis, -1)
            patch, *_ = windows(moved, *(getattr(self, name) for name in _GEOMETRY[:4]))
            parameters = form.at_positions(parameters, ops.shape(patch)[1:-1])
        return self.similarity.matrix(parameters, form.taps)

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
    def turn(cls, layer: Any, is_inside: bool, kernel_trainable: bool, *args: Any) -> None:
        """Turns a built plain layer into this class; `args` go to `set_similarity`."""
        with turned_into(layer, cls) as input_shape:
            layer.set_similarity(*args)
            layer.is_inside = is_inside
            layer.build_similarity(input_shape)
            layer.kernel_trainable = kernel_trainable
            # `M^T W` is computed in the dtype of the variables.
            set_autocast(layer.kernel_variable, False)

    def turn_copy(self, layer: Any) -> None:
        """Turns a plain layer that already has this layer's kernel into a copy of it."""
        of_similarity = self.similarity, self.predictor, self.block_size
        self.turn(layer, self.is_inside, self.kernel_trainable, *of_similarity)
        forms = self.bilinear_form, layer.bilinear_form
        for variable, new in zip(*(each.variables for each in forms), strict=True):
            new.assign(variable)

    def folded_variables(self) -> list[tuple[keras.Variable, Tensor]]:
        self.bilinear_form.require("static", "fold")
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
        if self.is_inside:
            raise ValueError(
                f"`{self.path}` has a similarity inside a layer whose config does not "
                "contain it, so a file of the whole model would lose `M`. Call "
                "`convert.fold` and save the folded model, or call `convert.save_task`."
            )


def forms_in(layer: keras.layers.Layer) -> list[BilinearForm]:
    """Returns the `M` of each kernel in a layer, including its cells."""
    return [each for each in nesting.sublayers(layer) if isinstance(each, BilinearForm)]
