"""Static similarities, kernel shapes, and what a dynamic layer predicts for one image."""

import keras
import numpy as np
import pytest
from keras import ops
from layer_harness import stack
from pictures import drawn, written

import nsl_keras
from nsl_keras import similarities, visualize

RNG = np.random.default_rng(3)
IMAGE = RNG.random((8, 9, 1)).astype("float32")


def convolution(similarity="diagonal", filters=4, kernel_size=(2, 3), **options):
    return nsl_keras.layers.NeuralSimilarityConv2D(
        filters, kernel_size, similarity=similarity, padding="same", **options
    )


def panels_of(figure):
    return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}


def test_masks_and_matrices(tmp_path):
    model = stack(
        convolution("diagonal", name="masked"),
        convolution("unconstrained", name="mixed"),
        keras.layers.Conv2D(4, 3),
        convolution(predictor="sphere", name="moving"),
    )
    figure = visualize.plot_similarities(model)
    figure.savefig(tmp_path / "figure.png")
    panels = panels_of(figure)
    assert list(panels) == ["masked\nmask of the taps", "mixed\nM[t, u]: t down, u right"]
    mask, matrix = (
        ops.convert_to_numpy(model.get_layer(name).similarity_matrix)
        for name in ("masked", "mixed")
    )
    mask = mask.diagonal().reshape(2, 3)
    differences = (mask - 1, matrix - np.eye(6))
    largest = max(np.abs(each).max() for each in differences)
    for axis, expected in zip(panels.values(), differences, strict=True):
        np.testing.assert_allclose(drawn(axis), expected, atol=1e-6)
        # One scale for all panels, white at the identity.
        assert axis.images[0].get_clim() == pytest.approx((-largest, largest))
    masked, mixed = panels.values()
    np.testing.assert_allclose(written(masked), mask.ravel(), atol=0.006)
    assert not mixed.texts  # Too many to be read.


def test_learned_kernel_shapes():
    shaped = similarities.Diagonal(learn_shape=True)
    model = stack(
        convolution(similarity=shaped, name="static"),
        convolution(similarity=shaped, predictor="cnn", name="dynamic"),
    )
    dynamic = model.get_layer("dynamic")
    dynamic.bilinear_form.shape_parameters.assign([1.0, 0.2, 1.0, 0.9, 0.5, 1.3])
    panels = panels_of(visualize.plot_similarities(model))
    assert list(panels) == [
        "static\nmask of the taps",
        "static\ntaps that are kept",
        "dynamic\ntaps that are kept",
    ]
    np.testing.assert_array_equal(written(panels.popitem()[1]), [1, 0, 1, 1, 0, 1])


def test_other_windows():
    inputs = keras.Input((6, 5, 3))
    outputs = nsl_keras.layers.NeuralSimilarityDepthwiseConv2D(3, name="depthwise")(inputs)
    outputs = keras.layers.Reshape((4, 9))(outputs)
    outputs = nsl_keras.layers.NeuralSimilarityConv1D(8, 3, name="line")(outputs)
    outputs = keras.layers.Reshape((2, 2, 2, 2))(outputs)
    outputs = nsl_keras.layers.NeuralSimilarityConv3D(9, (2, 1, 2), name="volume")(outputs)
    outputs = nsl_keras.layers.NeuralSimilarityDense(2, name="dense")(outputs)
    by_filter = similarities.Sparse(shared_by="filter")
    layer = nsl_keras.layers.NeuralSimilarityDense(3, similarity=by_filter, name="several")
    figure = visualize.plot_similarities(keras.Model(inputs, layer(outputs)))
    panels = panels_of(figure)
    shapes = {title.split("\n")[0]: drawn(axis).shape for title, axis in panels.items()}
    expected = {"depthwise": (3, 3), "line": (1, 3), "volume": (2, 2), "dense": (1, 9)}
    assert shapes == {**expected, "several": (2, 2)}
    assert sum(each.get_title().startswith("several") for each in figure.axes) == 3


def test_nested_models_and_backbones():
    inner = keras.Sequential([keras.Input((8, 9, 4)), convolution(name="deep")])
    moving = (convolution(predictor="sphere", name=name) for name in ("first", "second"))
    parts = convolution(name="top"), inner, *moving, keras.layers.Flatten()
    backbone = stack(*parts, shape=IMAGE.shape)
    model = nsl_keras.MetaNeighborhoodModel(backbone, nsl_keras.layers.CosineDense(3), 5)
    titles = list(panels_of(visualize.plot_similarities(model)))
    assert [title.splitlines()[-2] for title in titles] == ["top", "deep"]
    for name, asked in (("second", "second"), ("first", None)):
        figure = visualize.plot_dynamic_similarity(model, IMAGE, asked)
        assert figure.get_suptitle() == f"{name} for one image"


@pytest.mark.parametrize(
    ("kernel_size", "similarity", "title"),
    [((1, 3), "diagonal", "mask"), ((1, 3), "unconstrained", "M"), (3, "symmetric", "M")],
)
def test_maps_of_taps_and_the_furthest_matrix(kernel_size, similarity, title, tmp_path):
    options = {"kernel_size": kernel_size, "strides": 2, "predictor": "sphere"}
    layer = convolution(similarity, name="seen", **options)
    model = stack(keras.layers.Conv2D(3, 3, padding="same"), layer, shape=IMAGE.shape)
    figure = visualize.plot_dynamic_similarity(model, IMAGE)
    figure.savefig(tmp_path / "figure.png")
    predicted = layer.predicted_matrices(model.layers[0](IMAGE[None]))
    matrices = keras.ops.convert_to_numpy(predicted)[0]
    taps = matrices.shape[-1]
    differences = matrices - np.eye(taps)
    image, distances, last, *rest = (axis for axis in figure.axes if axis.images)
    np.testing.assert_allclose(drawn(image), IMAGE[..., 0])
    expected = np.abs(differences).max(axis=(-2, -1))
    np.testing.assert_allclose(drawn(distances), expected, atol=1e-5)
    for tap in range(taps):
        np.testing.assert_allclose(drawn(rest[tap]), differences[..., tap, tap], atol=1e-5)
        assert rest[tap].get_title() == f"M[{tap}, {tap}]"
    place = np.unravel_index(expected.argmax(), expected.shape)
    furthest = differences[place]
    if title == "mask":
        furthest = furthest.diagonal().reshape(layer.kernel_size)
    np.testing.assert_allclose(drawn(last), furthest, atol=1e-5)
    if taps < 9 or title == "mask":
        numbers = furthest + (1 if title == "mask" else np.eye(taps))
        np.testing.assert_allclose(written(last), numbers.ravel(), atol=0.0006)
    assert last.get_title().startswith(f"at the cross: {title}")
    assert figure.get_suptitle() == "seen for one image"
