"""The dtype in which sensitive steps run under mixed precision."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

Tensor = Any


def at_least_float32(tensor: Tensor) -> Tensor:
    """Returns a floating-point tensor in float32, or unchanged if it is wider."""
    tensor = ops.convert_to_tensor(tensor)
    if keras.backend.standardize_dtype(tensor.dtype) in ("float16", "bfloat16"):
        return ops.cast(tensor, "float32")
    return tensor
