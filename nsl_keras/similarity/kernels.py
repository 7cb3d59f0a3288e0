"""What layers that stand on Keras's own do differently with their kernel.

Keras's class keeps the arguments, weights, shapes, config and errors; ours computes with
the kernel in another way, in float32, and refuses what would go round that.
"""

from __future__ import annotations

from typing import Any, NoReturn

import keras

from nsl_keras import validation
from nsl_keras.inheritance import StandsOnKeras


class FloatKernel(StandsOnKeras):
    """Private mixin, in front of a Keras layer whose `call` the subclass replaces.

    The kernel is kept out of Keras's autocast: what is made of it, an equivalent kernel or
    norms, is made in float32. LoRA and quantization, which are made for the plain product
    with the kernel, are refused by name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first = getattr(self, "data_format", None) == "channels_first"
        self.channel_axis = 1 if first else -1
        if hasattr(self, "kernel_size"):
            validation.geometry(self)
        if getattr(self, "lora_rank", None) is not None:
            raise ValueError(
                f"`lora_rank` must be None: {type(self).__name__} cannot take LoRA. "
                f"Received: lora_rank={self.lora_rank}"
            )
        self._refuse_quantized_policy()

    def _refuse_quantized_policy(self) -> None:
        if self.quantization_mode is not None:
            raise ValueError(
                f"`dtype` must not be a quantized policy: {type(self).__name__} cannot be "
                f"quantized. Received: dtype={self.dtype_policy}"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self._refuse_quantized_policy()  # Policies may go by the layer's path.
        name = "last axis" if self.channel_axis == -1 else "channel axis"
        validation.known_axis(input_shape, self.channel_axis, name)
        super().build(input_shape)

    def add_weight(self, *args: Any, **kwargs: Any) -> keras.Variable:
        if kwargs.get("name") == "kernel":
            kwargs["autocast"] = False
        return super().add_weight(*args, **kwargs)

    # Keras's convolutions and dense layers save and load the kernel and the bias alone.
    save_own_variables = keras.layers.Layer.save_own_variables
    load_own_variables = keras.layers.Layer.load_own_variables

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"`enable_lora` is not available: {type(self).__name__} cannot take LoRA. "
            f"Received: layer {self.name!r}"
        )

    def quantize(self, mode: Any = None, **kwargs: Any) -> NoReturn:
        # The error with which Keras's layers say so: `Model.quantize` passes over them.
        raise NotImplementedError(
            f"`quantize` is not available: {type(self).__name__} cannot be quantized. "
            f"Received: mode={mode!r} for layer {self.name!r}"
        )
