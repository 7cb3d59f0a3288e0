"""The similarity that a dynamic layer predicts for one image: the numbers drawn."""

import functools

import keras
import numpy as np
import pytest
from pictures import check_saved

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(2)
IMAGE = RNG.random((8, 9, 1)).astype("float32")


def dynamic(filters=4, similarity="diagonal", **options):
    layer = nsl_keras.layers.NeuralSimilarityConv2D(
        filters, 3, similarity=similarity, predictor="sphere", padding="same", **options
    )
    return layer


def model_of(*layers):
    model = keras.Sequential([keras.Input((8, 9, 1)), *layers])
    for variable in model.trainable_variables:
        variable.assign(variable + RNG.normal(scale=0.2, size=variable.shape))
    return model


def maps_of(figure):
    """Everything drawn as an image, in order."""
    return [np.asarray(axis.images[0].get_array()) for axis in figure.axes if axis.images]


def test_a_mask_at_every_position(tmp_path):
    layer = dynamic(name="seen", strides=2)
    model = model_of(keras.layers.Conv2D(3, 3, padding="same"), layer)
    figure = visualize.plot_dynamic_similarity(model, IMAGE)
    check_saved(figure, tmp_path)
    matrices = keras.ops.convert_to_numpy(
        layer.predicted_matrices(model.layers[0](IMAGE[None]))
    )[0]
    assert matrices.shape == (4, 5, 9, 9)
    masks = matrices.diagonal(axis1=-2, axis2=-1) - 1
    image, distances, *rest = maps_of(figure)
    np.testing.assert_allclose(image, IMAGE[..., 0])
    expected = np.sqrt((masks**2).sum(axis=-1) / 81)
    np.testing.assert_allclose(distances, expected, atol=1e-5)
    for number in range(9):
        np.testing.assert_allclose(rest[number], masks[..., number], atol=1e-5)
    furthest = np.unravel_index(expected.argmax(), expected.shape)
    np.testing.assert_allclose(rest[9], masks[furthest].reshape(3, 3), atol=1e-5)
    nearest = np.unravel_index(expected.argmin(), expected.shape)
    np.testing.assert_allclose(rest[11], masks[nearest].reshape(3, 3), atol=1e-5)
    assert "'seen'" in figure.get_suptitle()


def test_a_matrix_in_a_nested_backbone_by_name():
    inner = keras.Sequential([keras.Input((8, 9, 4)), dynamic(2, "symmetric", name="deep")])
    backbone = model_of(dynamic(name="first"), inner, keras.layers.Flatten())
    model = nsl_keras.MetaNeighborhoodModel(backbone, nsl_keras.layers.CosineDense(3), 5)
    figure = visualize.plot_dynamic_similarity(model, IMAGE, "deep")
    assert maps_of(figure)[-1].shape == (9, 9)
    assert "'first'" in visualize.plot_dynamic_similarity(model, IMAGE).get_suptitle()


def test_one_matrix_an_example():
    pooled = nsl_keras.predictors.SimilarityPredictor(pooled=True)
    layer = nsl_keras.layers.NeuralSimilarityConv2D(2, 3, predictor=pooled)
    figure = visualize.plot_dynamic_similarity(model_of(layer), IMAGE)
    assert [drawn.shape for drawn in maps_of(figure)[1:]] == [(1, 1)] * 10 + [(3, 3)]


def test_the_layers_that_can_be_drawn_are_named():
    static = nsl_keras.layers.NeuralSimilarityConv2D(2, 3, name="static")
    model = model_of(dynamic(name="moving"), static)
    with pytest.raises(ValueError, match=r"`layer` must be .*: 'moving'.*layer='static'"):
        visualize.plot_dynamic_similarity(model, IMAGE, "static")
    alone = nsl_keras.layers.NeuralSimilarityConv2D(2, 3)
    static_model = model_of(alone)
    with pytest.raises(ValueError, match=r"there are none. Received: layer=None"):
        visualize.plot_dynamic_similarity(static_model, IMAGE)


def test_matrices_of_a_static_layer_are_refused():
    with pytest.raises(ValueError, match=r"`predicted_matrices` needs a dynamic"):
        nsl_keras.layers.NeuralSimilarityConv2D(2, 3).predicted_matrices(IMAGE[None])


def test_channels_first_and_a_layer_that_is_not_built():
    layer = functools.partial(dynamic, data_format="channels_first")()
    images = np.moveaxis(IMAGE[None], -1, 1)
    assert tuple(layer.predicted_matrices(images).shape) == (1, 8, 9, 9, 9)


@pytest.mark.parametrize(
    ("kernel_size", "similarity", "title"),
    [
        ((1, 3), "unconstrained", "M"),
        ((2, 2), "unconstrained", "M"),
        (2, "diagonal", "mask"),
    ],
    ids=str,
)
def test_numbers_are_entries_of_the_matrix_or_of_the_mask(kernel_size, similarity, title):
    layer = nsl_keras.layers.NeuralSimilarityConv2D(
        2, kernel_size, similarity=similarity, predictor="sphere"
    )
    figure = visualize.plot_dynamic_similarity(model_of(layer), IMAGE)
    matrices = keras.ops.convert_to_numpy(layer.predicted_matrices(IMAGE[None]))[0]
    distances = ((matrices - np.eye(matrices.shape[-1])) ** 2).sum(axis=(-2, -1))
    expected = matrices[np.unravel_index(distances.argmax(), distances.shape)]
    if title == "mask":
        expected = expected.diagonal()
    (axis,) = (axis for axis in figure.axes if axis.get_ylabel() == "at A")
    texts = [text.get_text() for text in axis.texts]
    np.testing.assert_allclose([float(t) for t in texts], expected.ravel(), atol=0.006)
    assert not {"-0.00", "-0.000"}.intersection(texts)
    assert figure.subfigs[-1].get_suptitle() == title


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_pictures_of_wide_kernels_are_wide(size, check_inside):
    layer = nsl_keras.layers.NeuralSimilarityConv2D(
        2, (1, size), similarity="diagonal", predictor="sphere"
    )
    figure = visualize.plot_dynamic_similarity(model_of(layer), IMAGE)
    check_inside(figure)
    (axis,) = (axis for axis in figure.axes if axis.get_ylabel() == "at A")
    assert axis.texts[0].get_fontsize() > 6
