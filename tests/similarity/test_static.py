"""A static `M`, or one for each filter or block of channels: `M^T W` by numbers."""

import keras
import numpy as np
import pytest
from helpers import DTYPES, as_numpy, assert_close, normal, refusing
from layer_cases import (
    KERNELS,
    SIMILARITIES,
    TOLERANCES,
    built,
    static_matrix,
    with_arguments,
)

from nsl_keras import layers, similarities

#: Geometries of each layer; tuples are cut to its number of axes.
GEOMETRIES = {
    "conv1d": [{"padding": "causal", "dilation_rate": 2}],
    "conv2d": [
        {"padding": "same", "strides": 2},
        {"dilation_rate": (1, 2)},
        {"kernel_size": 2, "groups": 2},
    ],
    "conv3d": [{"kernel_size": (1, 3, 2), "padding": "same", "strides": 2}],
    "depthwise": [{"dilation_rate": 2}],
    "separable": [],
    "transposed": [
        {"padding": "same", "strides": 3, "output_padding": 1},
        {"strides": 2, "output_padding": 1},
    ],
    "dense": [{"block_size": 3}],
}
each_layer = pytest.mark.parametrize("name", KERNELS)
SMALL = {"kernel_size": (2, 3, 1)}


def made(name, similarity="unconstrained", options=SMALL, **arguments):
    """A layer with random weights, and inputs; `arguments` are those of the similarity."""
    options = {} if name == "dense" and options is SMALL else options
    similarity = with_arguments(similarity, **arguments)
    layer, inputs = built(name, similarity=similarity, dtype=DTYPES[0], **options)
    if layer.similarity.learn_shape:
        kept = np.arange(layer.bilinear_form.taps) % 3 == 0
        layer.bilinear_form.shape_parameters.assign(0.2 + 0.6 * kept)
    return layer, inputs


def equivalent_kernel(name, layer):
    """`M^T D W` of each channel and filter, or of several channels if `M` is full."""
    taps, by = layer.bilinear_form.taps, layer.similarity.shared_by
    full = not layer.similarity.shared_by_channels
    shape = (-1, taps, layer.units) if name == "dense" else (taps, *layer.kernel.shape[-2:])
    # Taps, channels and filters; a full `M` of a transposed layer mixes its filters.
    axes = {"dense": (0, 1), "transposed": (0, 0) if full else (1, 2)}.get(name, (0, 0))
    kernel = as_numpy(layer.kernel).reshape(shape).swapaxes(*axes)
    if layer.similarity.learn_shape:
        kernel = kernel * as_numpy(layer.learned_shape)[:, None, None]
    _, channels, filters = kernel.shape
    together = 1
    if full:
        together = by if isinstance(by, int) else channels
    matrices = static_matrix(layer)
    matrices = matrices.reshape(-1, *matrices.shape[-2:])
    result = np.zeros(kernel.shape)
    for first, filter_ in np.ndindex(channels // together, filters):
        place = slice(first * together, (first + 1) * together)
        number = 0
        if by == "filter":
            of_channel = name in ("depthwise", "separable")
            number = filter_ + filters * first * of_channel
        elif by != "layer":
            number = first * together // by
        numbers = matrices[number].T @ kernel[:, place, filter_].T.ravel()
        result[:, place, filter_] = numbers.reshape(together, taps).T
    return result.swapaxes(*axes).reshape(layer.kernel.shape)


def check(name, *args, **arguments):
    layer, inputs = made(name, *args, **arguments)
    tolerance, what = TOLERANCES[DTYPES[0]], f"{args}, {arguments}"
    assert_close(layer.similarity_matrix, static_matrix(layer), tolerance, what)
    expected = equivalent_kernel(name, layer)
    assert_close(layer.equivalent_kernel, expected, tolerance, what)
    outputs, plain = layer(inputs), layer.fold()
    assert type(plain) is layer.plain
    assert_close(plain(inputs), outputs, tolerance, what)


@each_layer
def test_equals_the_plain_layer_with_the_equivalent_kernel(name):
    mixes = name in ("conv1d", "conv2d", "conv3d", "transposed")
    # How parameters make `M` is the same in every layer.
    every = [each for each in SIMILARITIES if each != "full"]
    for similarity in every if name == "conv2d" else ["unconstrained", "sparse_of_3"]:
        check(name, similarity)
    if mixes:
        check(name, "full")
    for options in GEOMETRIES[name]:
        check(name, "unconstrained", options)
    check(name, "full" if mixes else "symmetric", learn_shape=True)


@each_layer
def test_several_matrices_in_a_layer(name):
    options = {"block_size": 3} if name == "dense" else SMALL
    for shared_by in ("filter", 1, 2):
        check(name, "unconstrained", options, shared_by=shared_by)
        if name == "conv2d":
            check(name, "full", shared_by=shared_by)
    if name == "conv2d":
        check(name, "sparse_of_3", {"kernel_size": 2, "groups": 2}, shared_by=2)


def test_bias_goes_along_the_channels_where_the_width_equals_the_filters():
    options = {"padding": "same", "data_format": "channels_first"}
    layer = layers.NeuralSimilarityConv2D(12, 3, bias_initializer="normal", **options)
    inputs = normal(2, 4, 12, 12)
    with_bias, bias = as_numpy(layer(inputs)), as_numpy(layer.bias)
    layer.bias.assign(np.zeros(12))
    assert_close(with_bias, as_numpy(layer(inputs)) + bias[:, None, None], 1e-5)


test_errors = refusing(
    (lambda: made("conv2d", shared_by="channel"), "must be one of 'layer', 'filter'"),
    (lambda: made("conv2d", shared_by=0), "`shared_by` must be a positive integer"),
    (lambda: made("conv2d", shared_by=3), "`shared_by` must be a divisor of the 4 ch.*=3"),
    (lambda: made("depthwise", "full"), "shared .*'Full'"),
    (lambda: layers.NeuralSimilarityConv1D(4, 3).build((2, 5, None)), "known at the chan"),
)


@pytest.mark.jax
def test_a_constraint_sees_one_matrix():
    options = {"shared_by": "filter", "constraint": keras.constraints.UnitNorm()}
    layer = layers.NeuralSimilarityConv2D(
        4, 3, similarity=similarities.Unconstrained(**options)
    )
    model = keras.Sequential([keras.Input((5, 5, 2)), layer])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(normal(4, 5, 5, 2), normal(4, 3, 3, 4), verbose=0)
    norms = np.linalg.norm(as_numpy(layer.bilinear_form.similarity_parameters), axis=1)
    np.testing.assert_allclose(norms, np.ones((4, 9)), rtol=1e-5)
