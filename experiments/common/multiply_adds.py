"""What a network takes for one example, in multiply-adds."""

import math
from typing import Any

import keras
import numpy as np

import nsl_keras

_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")


def multiply_adds(model: keras.Model) -> tuple[int, int]:
    """The multiply-adds of one example, with `M` and its predictors, and without.

    Of functional and Sequential models, nested ones included, whose layers are called once.
    Convolutions, dense layers, predictors, and `M x` where `M` is not folded count, and an
    iFiLM's attention, scales and shifts; normalizations, activations, sums and other layers
    do not. Section 3.3.1 of Neural Similarity Learning counts this way.
    """
    plain, added = _of(model, model.input_shape)
    return int(plain + added), int(plain)


def _of(layer: Any, shape: Any) -> np.ndarray:
    """The plain multiply-adds, and those of `M` and its predictor."""
    layer = getattr(layer, "shared_network", layer)
    if isinstance(layer, keras.Sequential):
        found = np.zeros(2)
        for each in layer.layers:
            found += _of(each, shape)
            shape = each.compute_output_shape(shape)
        return found
    if isinstance(layer, keras.Model):
        counted = [each for each in layer.layers if _counts(each)]
        names = {each.name for each in counted}
        for each in layer.get_config()["layers"]:
            if each["name"] in names and len(each["inbound_nodes"]) > 1:
                raise ValueError(f"`model` must call {each['name']} once.")
        return sum((_of(each, each.input.shape) for each in counted), np.zeros(2))
    film = getattr(layer, "film", layer)
    if isinstance(film, nsl_keras.layers.InstanceFiLM):
        return np.array([3 * math.prod(film.keys.shape), 0])
    if not _counts(layer):
        return np.zeros(2)
    # A transposed convolution puts its kernel at each position of its input.
    transposed = hasattr(layer, "output_padding")
    sizes = shape if transposed else layer.compute_output_shape(shape)
    first = getattr(layer, "data_format", "") == "channels_first"
    sizes = sizes[2:] if first else sizes[1:-1]
    if None in sizes:
        raise ValueError(f"`model` must have known sizes. Received: {layer.name}, {shape}")
    positions = math.prod(sizes)
    # A separable layer may have one kernel under two names.
    found = [getattr(layer, name) for name in _KERNELS if hasattr(layer, name)]
    kernels = {id(each): each for each in found}.values()
    plain = positions * sum(math.prod(kernel.shape) for kernel in kernels)
    form = getattr(layer, "bilinear_form", None)
    if form is None or form.network is None:  # A static `M` folds into the kernel.
        return np.array([plain, 0])
    diagonal = isinstance(form.similarity, nsl_keras.similarities.Diagonal)
    entries = form.taps if diagonal else form.taps**2
    of_predictor, _ = _of(form.network, shape)
    return np.array([plain, positions * entries * form.channels + of_predictor])


def _counts(layer: Any) -> bool:
    is_convolution, is_dense = hasattr(layer, "kernel_size"), hasattr(layer, "units")
    kinds = keras.Model, nsl_keras.layers.InstanceFiLM
    has_film = hasattr(layer, "film")
    return is_convolution or is_dense or has_film or isinstance(layer, kinds)
