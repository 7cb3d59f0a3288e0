"""Convolutions of one tap as a shift and a 1x1 convolution (Section 3.4)."""

import keras
import numpy as np
from keras import ops


def with_shifts(model: keras.Model) -> keras.Model:
    """A plain model with padding, cropping and 1x1 convolutions for kernels of one tap.

    Folding an `M` with a single entry leaves such kernels. Strides must be 1, padding
    "same", images channels last. All other layers are the model's own.
    """
    return keras.models.clone_model(model, clone_function=_shifted)


def _shifted(layer: keras.layers.Layer) -> keras.layers.Layer:
    kinds = keras.layers.Conv2D, keras.layers.DepthwiseConv2D
    if type(layer) not in kinds or layer.padding != "same" or max(layer.strides) > 1:
        return layer
    kernel = ops.convert_to_numpy(layer.kernel)
    (rows, columns) = kernel.any(axis=(2, 3)).nonzero()
    if kernel.shape[:2] == (1, 1) or len(rows) != 1:
        return layer
    dilation, size = np.array(layer.dilation_rate), np.array(layer.kernel_size)
    offset = np.array([rows[0], columns[0]]) * dilation - (size - 1) * dilation // 2
    config = {**layer.get_config(), "kernel_size": 1, "dilation_rate": 1}
    plain = type(layer).from_config(config)
    plain.build_from_config(layer.get_build_config())
    _, *bias = layer.get_weights()
    plain.set_weights([kernel[rows, columns][None], *bias])
    ahead, behind = np.maximum(-offset, 0), np.maximum(offset, 0)
    zeros, rest = (
        np.stack(ends, axis=1).tolist() for ends in ((ahead, behind), (behind, ahead))
    )
    padding, cropping = keras.layers.ZeroPadding2D(zeros), keras.layers.Cropping2D(rest)
    layers = [padding, cropping, plain] if offset.any() else [plain]
    return keras.Sequential(layers, name=f"{layer.name}_shifted")
