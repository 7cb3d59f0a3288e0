"""Small heads that adapt, with weights far from zero."""

import keras
import numpy as np
from helpers import IS_TENSORFLOW
from keras import ops

from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary

#: JAX computes in float32 unless told otherwise for the whole process.
DTYPE = "float64" if IS_TENSORFLOW else "float32"
ENTRIES, FEATURES, OUTPUTS, BATCH = 7, 5, 3, 4


def stack(*kinds, use_bias=True, dtype=DTYPE):
    """A head of dense layers, e.g. `stack("tanh", "linear")` or `stack("cosine")`."""
    layers = []
    for index, kind in enumerate(kinds):
        units = OUTPUTS if index == len(kinds) - 1 else 6
        if kind == "cosine":
            layers.append(CosineDense(units, scale=3.0, dtype=dtype))
        elif isinstance(kind, str):
            layers.append(keras.layers.Dense(units, kind, use_bias, dtype=dtype))
        else:
            layers.append(type(kind).from_config(kind.get_config() | {"dtype": dtype}))
    return layers[0] if len(layers) == 1 else keras.Sequential(layers)


def build(*kinds, dictionary=None, use_bias=True, dtype=DTYPE, seed=0, **options):
    """A built head with random weights, the same for the same seed.

    Its dictionary drops nothing, unless `dictionary`, arguments of its own, says so.
    """
    arguments = {"dropout": 0.0, "seed": 1, "dtype": dtype, **(dictionary or {})}
    layer = MetaNeighborhoodHead(
        stack(*kinds, use_bias=use_bias, dtype=dtype),
        NeighborDictionary(ENTRIES, **arguments),
        **{"inner_learning_rate": 0.3, **options},
        dtype=dtype,
    )
    layer.build((None, FEATURES))
    rng = np.random.default_rng(seed)
    for variable in layer.trainable_variables:
        value = 0.5 * rng.normal(size=variable.shape)
        variable.assign(value + 3.0 if variable.name == "scale" else value)
    return layer


def features(dtype=DTYPE):
    values = np.random.default_rng(3).normal(size=(BATCH, FEATURES))
    return ops.convert_to_tensor(values, dtype=dtype)


def parts(layer):
    """Keys, values, kernel and bias of a head of one layer, and attention to entries."""
    dictionary = layer.dictionary
    attention = dictionary.attention(features())
    tensors = (dictionary.keys, dictionary.values, *layer.head.weights, attention)
    return [ops.convert_to_numpy(ops.convert_to_tensor(tensor)) for tensor in tensors]


def outer_loss(layer, z):
    """A loss of what the head predicts after its inner steps."""
    targets = ops.reshape(ops.arange(BATCH * OUTPUTS, dtype=z.dtype), (BATCH, OUTPUTS))
    return ops.mean(ops.square(layer(z) - 0.3 * targets))


def assert_close(found, expected, tolerance, tolerance32=1e-4):
    """Asserts that tensors agree, each relative to its largest entry."""
    for one, other in zip(found, expected, strict=True):
        one, other = ops.convert_to_numpy(one), ops.convert_to_numpy(other)
        atol = tolerance if one.dtype == "float64" else max(tolerance, tolerance32)
        scale = max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol * scale)
