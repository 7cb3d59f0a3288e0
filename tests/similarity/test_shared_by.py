"""Several `M` in a layer: one for each filter, or for each block of channels."""

import keras
import numpy as np
import pytest
from finite_differences import check_gradients
from golden_files import DTYPES
from helpers import refusing
from keras import ops
from similarity_layers import (
    SIMILARITIES,
    TOLERANCES,
    assert_close,
    randomize,
    to_matrix,
    with_arguments,
)

from nsl_keras import layers
from nsl_keras.convert import add_similarity, fold
from nsl_keras.visualize import plot_similarities

INPUTS = np.random.default_rng(5).normal(size=(2, 5, 5, 4))
#: Layers, and the number of `M` for each `shared_by`.
LAYERS = {
    "conv2d": (lambda **o: layers.NeuralSimilarityConv2D(6, (2, 3), **o), 6, 4),
    "groups": (lambda **o: layers.NeuralSimilarityConv2D(6, 2, groups=2, **o), 6, 2),
    "depthwise": (
        lambda **o: layers.NeuralSimilarityDepthwiseConv2D(2, depth_multiplier=3, **o),
        12,
        4,
    ),
    "separable": (
        lambda **o: layers.NeuralSimilaritySeparableConv2D(5, 2, depth_multiplier=3, **o),
        12,
        4,
    ),
    "transpose": (lambda **o: layers.NeuralSimilarityConv2DTranspose(6, 2, **o), 6, 4),
    "dense": (lambda **o: layers.NeuralSimilarityDense(6, block_size=2, **o), 6, 2),
}


def built(name, similarity="unconstrained", **arguments):
    """A layer with random weights; arguments are those of the similarity."""
    similarity = with_arguments(similarity, **arguments)
    layer = LAYERS[name][0](similarity=similarity, dtype=DTYPES[0])
    layer.build(INPUTS.shape)
    randomize(layer)
    return layer


def inputs():
    return ops.convert_to_tensor(INPUTS, DTYPES[0])


def looped(name, layer, matrices):
    """`M^T W`, number by number."""
    shape, taps = layer.kernel.shape, matrices.shape[-1]
    kernel = ops.convert_to_numpy(layer.kernel)
    kernel = (
        kernel.reshape(-1, taps, shape[-1]).swapaxes(0, 1)
        if name == "dense"
        else kernel.reshape(taps, *shape[-2:])
    )
    result = np.zeros(kernel.shape)
    for first, second in np.ndindex(kernel.shape[1:]):
        channel, filter_ = (second, first) if name == "transpose" else (first, second)
        if layer.similarity.shared_by == "filter":
            number = filter_ + (3 * channel if name in ("depthwise", "separable") else 0)
        else:
            number = channel // layer.similarity.shared_by
        result[:, first, second] = matrices[number].T @ kernel[:, first, second]
    return (result.swapaxes(0, 1) if name == "dense" else result).reshape(shape)


@pytest.mark.parametrize(
    ("name", "shared_by", "similarity"),
    [
        *((name, by, "unconstrained") for name in LAYERS for by in ("filter", 1, 2)),
        *(("conv2d", 2, name) for name, s in SIMILARITIES.items() if s.shared_by_channels),
    ],
)
def test_equals_the_loop_and_folds(name, shared_by, similarity):
    layer = built(name, similarity, shared_by=shared_by)
    _, filters, channels = LAYERS[name]
    count = filters if shared_by == "filter" else channels // shared_by
    parameters = ops.convert_to_numpy(layer.bilinear_form.similarity_parameters)
    matrices = np.stack([to_matrix(layer.similarity, each) for each in parameters])
    assert matrices.shape[:1] == (count,)
    assert_close(layer.similarity_matrix, matrices, TOLERANCES[DTYPES[0]])
    expected = looped(name, layer, matrices)
    assert_close(layer.equivalent_kernel, expected, TOLERANCES[DTYPES[0]])
    assert_close(layer.fold()(inputs()), layer(inputs()), TOLERANCES[DTYPES[0]])


def test_full_matrices_of_blocks():
    layer = built("conv2d", similarity="full", shared_by=2)
    assert layer.similarity_matrix.shape == (2, 12, 12)
    whole = built("conv2d", similarity="full")
    whole.kernel.assign(layer.kernel)
    matrix = np.zeros((24, 24))
    for number, block in enumerate(ops.convert_to_numpy(layer.similarity_matrix)):
        place = slice(12 * number, 12 * number + 12)
        matrix[place, place] = block
    whole.bilinear_form.similarity_parameters.assign(matrix)
    assert_close(layer.equivalent_kernel, whole.equivalent_kernel, TOLERANCES[DTYPES[0]])


@pytest.mark.skipif("float64" not in DTYPES, reason="needs float64")
@pytest.mark.parametrize("shared_by", ["filter", 2])
@pytest.mark.parametrize("similarity", ["diagonal", "positive_semidefinite"])
def test_gradients(similarity, shared_by):
    layer = built("conv2d", shared_by=shared_by, similarity=similarity)
    check_gradients(layer, inputs(), "float64", 1e-5, 1e-7)


def test_conversion():
    plain = keras.Sequential(
        [
            keras.Input((9, 9, 3)),
            keras.layers.Conv2D(4, 3, groups=1),
            keras.layers.DepthwiseConv2D(3),
            keras.layers.Conv2DTranspose(2, 3),
        ]
    )
    images = np.random.default_rng(1).normal(size=(2, 9, 9, 3)).astype("float32")
    model = add_similarity(plain, with_arguments("sparse", shared_by="filter"))
    assert_close(model(images), plain(images), 1e-6)
    randomize(model)
    folded = fold(model)
    assert not any("NeuralSimilarity" in type(each).__name__ for each in folded.layers)
    assert_close(folded(images), model(images), 1e-5)
    figure = plot_similarities(model)
    assert sum(bool(axes.get_title()) for axes in figure.axes) == 4 + 4 + 2


test_errors = refusing(
    (lambda: built("conv2d", shared_by="channel"), "must be one of 'layer', 'filter'"),
    (lambda: built("conv2d", shared_by=0), "`shared_by` must be a positive integer"),
    (
        lambda: built("conv2d", shared_by=3),
        "`shared_by` must be a divisor of the 4 channels .*=3",
    ),
)
