"""Static similarities and kernel shapes: the numbers drawn, and their titles."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import drawn, written

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(3)


def convolution(similarity="diagonal", filters=4, kernel_size=(2, 3), **options):
    return nsl_keras.layers.NeuralSimilarityConv2D(
        filters, kernel_size, similarity=similarity, padding="same", **options
    )


def model_of(*layers):
    model = keras.Sequential([keras.Input((6, 5, 3)), *layers])
    for variable in model.trainable_variables:
        variable.assign(variable + RNG.normal(scale=0.2, size=variable.shape))
    return model


def panels_of(figure):
    return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}


def test_masks_and_matrices(tmp_path):
    model = model_of(
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
    model = model_of(
        convolution(learn_shape=True, name="static"),
        convolution(learn_shape=True, predictor="cnn", name="dynamic"),
    )
    dynamic = model.get_layer("dynamic")
    dynamic.comparison.shape_parameters.assign([1.0, 0.2, 1.0, 0.9, 0.5, 1.3])
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
    panels = panels_of(visualize.plot_similarities(keras.Model(inputs, outputs)))
    shapes = {title.split("\n")[0]: drawn(axis).shape for title, axis in panels.items()}
    expected = {"depthwise": (3, 3), "line": (1, 3), "volume": (2, 2), "dense": (1, 9)}
    assert shapes == expected


def test_nested_models_and_backbones():
    inner = keras.Sequential(
        [keras.Input((6, 5, 4)), convolution(name="deep")], name="inner"
    )
    backbone = model_of(convolution(name="top"), inner, keras.layers.Flatten())
    model = nsl_keras.MetaNeighborhoodModel(backbone, nsl_keras.layers.CosineDense(3), 5)
    for each in (backbone, model):
        titles = list(panels_of(visualize.plot_similarities(each)))
        assert [title.splitlines()[-2] for title in titles] == ["top", "deep"]


def test_recurrent_cells_have_different_titles():
    cells = [nsl_keras.layers.NeuralSimilarityGRUCell(4) for _ in range(2)]
    layer = keras.layers.Bidirectional(keras.layers.RNN(cells), name="both")
    model = keras.Sequential([keras.Input((5, 3)), layer])
    titles = list(panels_of(visualize.plot_similarities(model)))
    assert len(titles) == 8
    assert all(title.startswith("both\n") for title in titles)
