"""The transposed convolution with a neural similarity, against loops and Keras's own."""

import itertools

import keras
import numpy as np
import pytest
from finite_differences import check_gradients
from golden_files import DTYPES
from helpers import IS_TENSORFLOW, keras_3_15, run_litert
from keras import ops
from similarity_layers import TOLERANCES, assert_close, randomize

from nsl_keras import layers, predictors, similarities

# More filters than any width, as in `similarity_layers`.
CHANNELS, FILTERS = 3, 13
INPUTS = np.random.default_rng(5).normal(size=(2, 4, 3, CHANNELS))
# Kernel size, strides, padding, and other arguments.
GEOMETRIES = [
    (3, 1, "valid", {}),
    ((2, 3), 1, "same", {}),
    (3, 2, "same", {}),
    (4, 2, "same", {"output_padding": 1}),
    (4, 2, "valid", {}),
    ((3, 2), 2, "valid", {"output_padding": 1}),
    ((1, 2), 3, "valid", {}),
]
#: TensorFlow cannot dilate them on a CPU.
DILATED = [
    (2, 1, "same", {"dilation_rate": 2}),
    ((3, 2), 1, "valid", {"dilation_rate": (1, 2)}),
]
POSSIBLE = GEOMETRIES if IS_TENSORFLOW else DILATED


def inputs():
    return ops.convert_to_tensor(INPUTS, DTYPES[0])


def built(geometry=GEOMETRIES[2], **options):
    """A layer with random weights."""
    size, strides, padding, more = geometry
    layer = layers.NeuralSimilarityConv2DTranspose(
        FILTERS, size, strides, padding, dtype=DTYPES[0], **more, **options
    )
    layer.build(INPUTS.shape)
    randomize(layer)
    return layer


def looped(layer, matrices, sizes):
    """The outputs by the formula, with an `M` for each example and input position."""
    kernel = ops.convert_to_numpy(layer.kernel).reshape(-1, FILTERS, CHANNELS)
    outputs = np.zeros((len(INPUTS), *sizes, FILTERS))
    before = []
    for axis, size in enumerate(sizes):
        reach = (layer.kernel_size[axis] - 1) * layer.dilation_rate[axis] + 1
        written = (INPUTS.shape[1 + axis] - 1) * layer.strides[axis] + reach
        # As a convolution of the outputs pads them.
        before.append(max(written - size, 0) // 2 if layer.padding == "same" else 0)
    for example, *place in itertools.product(*map(range, INPUTS.shape[:-1])):
        matrix = matrices[(example, *place)]
        for u, tap in enumerate(np.ndindex(*layer.kernel_size)):
            q = [
                place[a] * layer.strides[a] + tap[a] * layer.dilation_rate[a] - before[a]
                for a in range(2)
            ]
            if all(0 <= q[a] < sizes[a] for a in range(2)):
                for t in range(len(kernel)):
                    patch = kernel[t] @ INPUTS[(example, *place)]
                    outputs[(example, *q)] += matrix[t, u] * patch
    return outputs + ops.convert_to_numpy(layer.bias)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("geometry", "options"),
    [
        *((geometry, {}) for geometry in POSSIBLE),
        # For blocks of positions, and for whole examples.
        *((GEOMETRIES[2], options) for options in ({"downsampling": 2}, {"pooled": True})),
    ],
    ids=str,
)
def test_dynamic_equals_the_loop(geometry, options):
    predictor = predictors.SimilarityPredictor("cnn", **options)
    layer = built(geometry, similarity="unconstrained", predictor=predictor)
    matrices = ops.convert_to_numpy(layer.predicted_matrices(inputs()))
    matrices = np.broadcast_to(matrices, (*INPUTS.shape[:-1], *matrices.shape[-2:]))
    received = ops.convert_to_numpy(layer(inputs()))
    expected = looped(layer, matrices, received.shape[1:-1])
    assert_close(received, expected, 10 * TOLERANCES[DTYPES[0]])


@pytest.mark.skipif("float64" not in DTYPES, reason="needs float64")
@pytest.mark.parametrize("predictor", [None, "cnn"])
@pytest.mark.parametrize("geometry", [GEOMETRIES[2], GEOMETRIES[0]], ids=str)
def test_gradients(geometry, predictor):
    layer = built(geometry, similarity="unconstrained", predictor=predictor)
    check_gradients(layer, inputs(), "float64", 1e-5, 1e-7)


@pytest.mark.parametrize("geometry", POSSIBLE, ids=str)
def test_fold(geometry):
    layer = built(geometry, similarity=similarities.Unconstrained(learn_shape=True))
    plain, outputs = layer.fold(), layer(inputs())
    assert type(plain) is keras.layers.Conv2DTranspose
    assert_close(plain(inputs()), outputs, TOLERANCES[DTYPES[0]])
    shape = ops.convert_to_numpy(layer.learned_shape)[:, None]
    matrix = shape * ops.convert_to_numpy(layer.similarity_matrix)
    matrices = np.broadcast_to(matrix, (*INPUTS.shape[:-1], *matrix.shape))
    expected = looped(layer, matrices, outputs.shape[1:-1])
    assert_close(outputs, expected, 10 * TOLERANCES[DTYPES[0]])


@keras_3_15
@pytest.mark.skipif(not IS_TENSORFLOW, reason="LiteRT's converter is TensorFlow's")
def test_unknown_sizes_run_in_litert(tmp_path):
    layer = layers.NeuralSimilarityConv2DTranspose(2, 3, predictor="cnn")
    model = keras.Sequential([keras.Input((None, None, 3)), layer])
    randomize(model)
    model.export(tmp_path / "model.tflite", format="litert", verbose=False)
    images = INPUTS.astype("float32")
    assert_close(run_litert(tmp_path / "model.tflite", images), model(images), 1e-4)
