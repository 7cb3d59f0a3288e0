"""The similarity that a dynamic layer predicts for one image: the numbers drawn."""

import keras
import numpy as np
import pytest
from pictures import drawn, written

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(2)
IMAGE = RNG.random((8, 9, 1)).astype("float32")


def dynamic(kernel_size=3, similarity="diagonal", predictor="sphere", **options):
    return nsl_keras.layers.NeuralSimilarityConv2D(
        4, kernel_size, similarity=similarity, predictor=predictor, **options
    )


def model_of(*layers):
    model = keras.Sequential([keras.Input((8, 9, 1)), *layers])
    for variable in model.trainable_variables:
        variable.assign(variable + RNG.normal(scale=0.2, size=variable.shape))
    return model


@pytest.mark.parametrize(
    ("kernel_size", "similarity", "title"),
    [(3, "diagonal", "mask"), ((1, 3), "unconstrained", "M"), (3, "symmetric", "M")],
)
def test_maps_of_taps_and_the_furthest_matrix(kernel_size, similarity, title, tmp_path):
    layer = dynamic(kernel_size, similarity, name="seen", strides=2, padding="same")
    model = model_of(keras.layers.Conv2D(3, 3, padding="same"), layer)
    figure = visualize.plot_dynamic_similarity(model, IMAGE)
    figure.savefig(tmp_path / "figure.png")
    predicted = layer.predicted_matrices(model.layers[0](IMAGE[None]))
    matrices = keras.ops.convert_to_numpy(predicted)[0]
    taps = matrices.shape[-1]
    differences = matrices - np.eye(taps)
    image, distances, *rest = (axis for axis in figure.axes if axis.images)
    np.testing.assert_allclose(drawn(image), IMAGE[..., 0])
    expected = np.sqrt((differences**2).mean(axis=(-2, -1)))
    np.testing.assert_allclose(drawn(distances), expected, atol=1e-5)
    for tap in range(taps):
        expected_map = differences[..., tap, tap]
        np.testing.assert_allclose(drawn(rest[tap]), expected_map, atol=1e-5)
    place = np.unravel_index(expected.argmax(), expected.shape)
    furthest = differences[place]
    if title == "mask":
        furthest = furthest.diagonal().reshape(layer.kernel_size)
    np.testing.assert_allclose(drawn(rest[taps]), furthest, atol=1e-5)
    if taps < 9 or title == "mask":
        numbers = furthest + (1 if title == "mask" else np.eye(taps))
        np.testing.assert_allclose(written(rest[taps]), numbers.ravel(), atol=0.006)
    assert rest[taps].get_title() == f"{title} at the cross"
    assert figure.get_suptitle() == "seen for one image"


def test_a_layer_by_name_in_a_backbone():
    layers = dynamic(name="first"), dynamic(name="second"), keras.layers.Flatten()
    backbone = model_of(*layers)
    model = nsl_keras.MetaNeighborhoodModel(backbone, nsl_keras.layers.CosineDense(3), 5)
    for name, asked in (("second", "second"), ("first", None)):
        figure = visualize.plot_dynamic_similarity(model, IMAGE, asked)
        assert figure.get_suptitle() == f"{name} for one image"


def test_one_matrix_for_the_whole_image():
    pooled = nsl_keras.predictors.SimilarityPredictor(pooled=True)
    figure = visualize.plot_dynamic_similarity(model_of(dynamic(predictor=pooled)), IMAGE)
    shapes = [drawn(axis).shape for axis in figure.axes if axis.images]
    assert shapes == [(8, 9)] + [(1, 1)] * 10 + [(3, 3)]
