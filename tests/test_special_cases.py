"""What similarities are exactly in special cases: the formulas of docs/special_cases.md."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_close, normal
from numpy_reference import patches
from scipy import ndimage

from nsl_keras import similarities
from nsl_keras.layers import GlobalNeuralSimilarity2D, NeuralSimilarityConv2D, SphereConv2D

IMAGES = normal(2, 6, 5, 2)
PATCHES = patches(IMAGES, 3, padding="same")
CONV = {"kernel_size": 3, "padding": "same", "use_bias": False}
MIDDLE = np.eye(9)[4]


def layer_of(kernel, matrix, similarity=similarities.Unconstrained, **options):
    """A layer with a kernel and `M`, a matrix or one for each position."""
    if np.ndim(matrix) > 2:
        change = np.reshape(matrix - np.eye(9), (2, 6, 5, 81)).astype("float32")
        predictor = keras.layers.Lambda(lambda inputs: change, (6, 5, 81))
    else:
        predictor = None
        options["initializer"] = lambda shape, dtype: np.float32(matrix)
    layer = NeuralSimilarityConv2D(
        kernel.shape[-1],
        len(kernel),
        padding="same",
        similarity=similarity(**options),
        predictor=predictor,
    )
    layer.build(IMAGES.shape)
    layer.kernel.assign(kernel)
    return layer


@pytest.mark.parametrize("learned", [False, True])
def test_dilated_convolution(learned):
    dilated, kept = keras.layers.Conv2D(3, **CONV, dilation_rate=2), np.zeros((5, 5))
    expected = dilated(IMAGES)
    kept[::2, ::2] = 1
    kernel = normal(5, 5, 2, 3)  # Anything where nothing is kept.
    kernel[::2, ::2] = as_numpy(dilated.kernel)
    matrix = np.eye(25) if learned else np.diag(kept.ravel())
    layer = layer_of(kernel, matrix, similarities.Diagonal, learn_shape=learned)
    if learned:
        layer.bilinear_form.shape_parameters.assign(kept.ravel())
    assert_close(layer(IMAGES), expected)


def test_linear_predictor_makes_a_quadratic_function():
    predictor = keras.layers.Conv2D(81, **CONV)
    options = {"similarity": "unconstrained", "predictor": predictor}
    layer = NeuralSimilarityConv2D(3, **CONV, **options)
    line = [IMAGES + step * normal(*IMAGES.shape, seed=1) for step in range(4)]
    outputs = np.stack([as_numpy(layer(images)) for images in line])
    weights = as_numpy(predictor.kernel).reshape(9, 2, 9, 9)
    kernel = as_numpy(layer.kernel).reshape(9, 2, 3)
    forms = np.einsum("tco,sdtu->sduco", kernel, weights)
    bilinear = np.einsum("sduco,...sd,...uc->...o", forms, PATCHES, PATCHES)
    assert_close(outputs[0], np.einsum("tco,...tc->...o", kernel, PATCHES) + bilinear)
    assert np.abs(np.diff(outputs, 3, axis=0)).max() < 1e-5 * np.abs(outputs).max()


def test_dynamic_filters():
    generator = keras.layers.Conv2D(9 * 2 * 3, **CONV)
    filters = as_numpy(generator(IMAGES)).reshape(2, 6, 5, 9, 2 * 3)
    kernel = normal(9, 2 * 3)
    matrices = np.swapaxes(filters @ np.linalg.pinv(kernel), -1, -2)
    layer = layer_of(kernel.reshape(3, 3, 2, 3), matrices)
    filters = filters.reshape(2, 6, 5, 9, 2, 3)
    assert_close(layer(IMAGES), np.einsum("...uco,...uc->...o", filters, PATCHES))


def test_hyperspherical_convolution():
    sphere = SphereConv2D(3, **CONV, normalize="input")
    expected = sphere(IMAGES)
    norms = np.sqrt((PATCHES**2).sum(axis=(-2, -1)) + 1e-4)[..., None, None]
    assert_close(layer_of(as_numpy(sphere.kernel), np.eye(9) / norms)(IMAGES), expected)


def test_spatial_transformation():
    def resample(images):
        scales = np.diag([1, 0.7, 1.3, 1])
        return ndimage.affine_transform(images, scales, (0, 0, 1, 0), order=1)

    layer = GlobalNeuralSimilarity2D("unconstrained")
    layer.build(IMAGES.shape)
    pixels = np.eye(30).reshape(30, 6, 5, 1)
    layer.similarity_parameters.assign(resample(pixels).reshape(30, 30).T)
    assert_close(layer(IMAGES), resample(IMAGES))


def test_sampling_at_predicted_offsets():
    offsets = as_numpy(keras.layers.Conv2D(2, **CONV, activation="tanh")(IMAGES))
    taps = np.stack(np.mgrid[-1:2, -1:2], axis=-1).reshape(9, 2)
    weights = np.maximum(1 - np.abs(taps - offsets[..., None, :]), 0).prod(axis=-1)
    kernel = normal(3, 3, 2, 3)
    places = np.indices(IMAGES.shape).astype("float64")
    places[1:3] += np.moveaxis(offsets, -1, 0)[..., None]
    sampled = ndimage.map_coordinates(IMAGES, places, order=1, mode="grid-constant")
    matrices = MIDDLE[:, None] * weights[..., None, :]
    assert_close(layer_of(kernel, matrices)(IMAGES), sampled @ kernel[1, 1])


def test_self_attention():
    layer = GlobalNeuralSimilarity2D("attention", sphere=False)
    outputs, features = layer(IMAGES), IMAGES.reshape(2, 30, 2)
    first, second = (features @ weight for weight in layer.get_weights())
    expected = first @ second.swapaxes(1, 2) @ features
    assert_close(outputs, expected.reshape(IMAGES.shape))


@pytest.mark.parametrize("similarity", [similarities.Full, similarities.Unconstrained])
def test_residual_layer_is_an_euler_step(similarity):
    kernel = normal(3, 3, 2, 2)
    weights, wanted = kernel.reshape(9, 2 * 2), np.outer(np.eye(2), MIDDLE)
    if similarity is similarities.Full:
        weights = kernel.reshape(9, 2, 2).swapaxes(0, 1).reshape(2 * 9, 2)
        wanted = np.kron(np.eye(2), MIDDLE)
    through = np.linalg.pinv(weights.T) @ wanted
    change = normal(*through.shape, seed=1)
    slope = as_numpy(layer_of(kernel, change, similarity)(IMAGES))
    step = layer_of(kernel, through + 0.1 * change, similarity)
    assert_close(step(IMAGES), IMAGES + 0.1 * slope)
