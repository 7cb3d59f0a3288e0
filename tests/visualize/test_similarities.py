"""Panels of similarity matrices: what is drawn in them, and that they can be saved."""

import functools
import sys

import keras
import numpy as np
import pytest
from keras import ops
from pictures import check_saved

import nsl_keras
from nsl_keras import similarities, visualize

RNG = np.random.default_rng(9)


def convolution(similarity="diagonal", **options):
    return nsl_keras.layers.NeuralSimilarityConv2D(
        4, similarity=similarity, **{"kernel_size": (2, 3), "padding": "same", **options}
    )


def model_of(*layers):
    model = keras.Sequential([keras.Input((6, 5, 3)), *layers])
    for layer in model.layers:
        if getattr(layer, "predictor", True) is None:
            shape = layer.comparison.similarity_parameters.shape
            layer.comparison.similarity_parameters.assign(RNG.normal(size=shape))
    return model


def panels_of(figure):
    """Axes with a title, and the image in each: the colour bar has none."""
    return {axis.get_title(): axis.images[0] for axis in figure.axes if axis.get_title()}


def test_similarities(tmp_path):
    model = model_of(
        convolution("diagonal", name="masked"),
        keras.layers.ReLU(),
        convolution("unconstrained", name="mixed"),
        keras.layers.Conv2D(4, 3),
        convolution(predictor="sphere", name="moving"),
    )
    figure = visualize.plot_similarities(model)
    check_saved(figure, tmp_path)
    panels = panels_of(figure)
    # One panel a static layer, and the colour bar.
    assert list(panels) == ["masked\nmask of the taps", "mixed\nM[t, u]: t down, u right"]
    assert len(figure.axes) == 3
    masked, mixed = (model.get_layer(name) for name in ("masked", "mixed"))
    mask = ops.convert_to_numpy(masked.comparison.similarity_parameters).reshape(2, 3)
    matrix = ops.convert_to_numpy(mixed.comparison.similarity_parameters)
    differences = (mask - 1, matrix - np.eye(6))
    largest = max(np.abs(each).max() for each in differences)
    for image, expected in zip(panels.values(), differences, strict=True):
        np.testing.assert_allclose(np.asarray(image.get_array()), expected, atol=1e-6)
        # The same scale in all panels, as wide as the data, white at the identity.
        assert image.get_clim() == pytest.approx((-largest, largest))
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    np.testing.assert_allclose([float(text) for text in texts], mask.ravel(), atol=0.05)


def test_an_identity_is_named_and_has_no_colours():
    layers = [
        nsl_keras.layers.NeuralSimilarityConv2D(2, 3, similarity=kind, name=kind)
        for kind in ("diagonal", "unconstrained")
    ]
    figure = visualize.plot_similarities(
        keras.Sequential([keras.Input((6, 5, 3)), *layers])
    )
    for image in panels_of(figure).values():
        assert not np.asarray(image.get_array()).any()
        assert image.get_clim()[1] > 0
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert texts.count("identity") == 1


def test_many_panels_are_wrapped():
    layers = [
        nsl_keras.layers.NeuralSimilarityConv2D(
            2, 1, padding="same", name=f"block_{number}_of_a_very_long_name_convolution"
        )
        for number in range(19)
    ]
    figure = visualize.plot_similarities(
        keras.Sequential([keras.Input((6, 5, 3)), *layers])
    )
    width, height = figure.get_size_inches()
    assert width < 12 and height < 8
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert len(titles) == 19
    assert max(len(line) for title in titles for line in title.splitlines()) <= 19
    assert (
        titles[3].replace("\n", "")
        == "block_3_of_a_very_long_name_convolutionmask of the taps"
    )


def test_similarities_of_recurrent_cells_and_of_a_backbone_with_neighbours():
    cell = nsl_keras.layers.NeuralSimilarityGRUCell(4)
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.RNN(cell, name="gru")])
    assert len(panels_of(visualize.plot_similarities(model))) == 2
    backbone = model_of(convolution(name="deep"), keras.layers.Flatten())
    model = nsl_keras.MetaNeighborhoodModel(backbone, nsl_keras.layers.CosineDense(3), 5)
    assert list(panels_of(visualize.plot_similarities(model))) == ["deep\nmask of the taps"]


def test_similarities_of_nested_models():
    inner = keras.Sequential([keras.Input((6, 5, 4)), convolution(name="deep")])
    model = model_of(convolution(name="top"), keras.Sequential([inner]))
    titles = list(panels_of(visualize.plot_similarities(model)))
    assert titles == ["top\nmask of the taps", "deep\nmask of the taps"]


def test_similarities_of_a_backbone(tmp_path):
    layer = functools.partial(
        nsl_keras.layers.NeuralSimilarityConv2D, similarity="unconstrained"
    )
    model = nsl_keras.backbones.convnet4((8, 8, 1), 4, layer)
    figure = visualize.plot_similarities(model)
    assert len(panels_of(figure)) == 4
    check_saved(figure, tmp_path)


def test_learned_kernel_shapes(tmp_path):
    model = model_of(
        convolution(learn_shape=True, name="static"),
        convolution(learn_shape=True, predictor="cnn", name="dynamic"),
    )
    dynamic = model.get_layer("dynamic")
    dynamic.comparison.shape_parameters.assign([1.0, 0.2, 1.0, 0.9, 0.5, 1.3])
    figure = visualize.plot_similarities(model)
    check_saved(figure, tmp_path)
    panels = panels_of(figure)
    assert list(panels) == [
        "static\nmask of the taps",
        "static\ntaps that are kept",
        "dynamic\ntaps that are kept",
    ]
    # Dark where a tap is left out.
    drawn = np.asarray(panels["dynamic\ntaps that are kept"].get_array())
    np.testing.assert_array_equal(drawn, [[0, 1, 0], [0, 1, 0]])


def test_similarities_of_other_windows():
    inputs = keras.Input((6, 5, 3))
    outputs = nsl_keras.layers.NeuralSimilarityDepthwiseConv2D(3, name="depthwise")(inputs)
    outputs = keras.layers.Reshape((4, 9))(outputs)
    outputs = nsl_keras.layers.NeuralSimilarityConv1D(8, 3, name="line")(outputs)
    outputs = keras.layers.Reshape((2, 2, 2, 2))(outputs)
    outputs = nsl_keras.layers.NeuralSimilarityConv3D(2, (2, 1, 2), name="volume")(outputs)
    panels = panels_of(visualize.plot_similarities(keras.Model(inputs, outputs)))
    shapes = {title: image.get_array().shape for title, image in panels.items()}
    assert shapes == {
        "depthwise\nmask of the taps": (3, 3),
        "line\nmask of the taps": (1, 3),
        "volume\nmask of the taps": (2, 2),
    }


@keras.saving.register_keras_serializable("tests")
class OneNumber(similarities.Similarity):
    """`M = a I`: one parameter, which is no mask."""

    def parameters_from(self, matrix):
        return matrix[:1, 0]

    def matrix(self, parameters, size):
        return parameters[..., None] * ops.eye(size)


def test_similarities_of_an_own_kind_with_other_parameters():
    model = model_of(convolution(OneNumber(), name="scaled"))
    (image,) = panels_of(visualize.plot_similarities(model)).values()
    value = ops.convert_to_numpy(model.layers[0].comparison.similarity_parameters)[0]
    drawn = np.asarray(image.get_array())
    # As the matrix it is, or as its diagonal on the taps.
    expected = (value - 1) * (np.eye(6) if drawn.shape == (6, 6) else np.ones((2, 3)))
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [keras.layers.Conv2D(4, 3)],
        lambda: [convolution(predictor="sphere")],
    ],
    ids=["plain", "dynamic"],
)
def test_error_of_a_model_without_static_layers(layers):
    model = keras.Sequential([keras.Input((6, 5, 3)), *layers()], name="bare")
    with pytest.raises(ValueError, match=r"`model` must have static .*'bare'"):
        visualize.plot_similarities(model)


def test_error_of_an_unbuilt_model():
    with pytest.raises(ValueError, match="built"):
        visualize.plot_similarities(keras.Sequential([convolution()]))


def test_error_without_matplotlib(monkeypatch):
    # An entry of None makes the import fail as if nothing were installed.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"nsl_keras\[visualize\]"):
        visualize.plot_similarities(model_of(convolution()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.Bidirectional(
            keras.layers.RNN(nsl_keras.layers.NeuralSimilarityGRUCell(4))
        ),
        lambda: keras.layers.RNN(
            [nsl_keras.layers.NeuralSimilarityGRUCell(4) for _ in range(2)]
        ),
        lambda: keras.layers.Bidirectional(
            keras.layers.RNN(
                [
                    nsl_keras.layers.NeuralSimilarityGRUCell(4, similarity=similarity)
                    for similarity in ("unconstrained", "diagonal")
                ]
            )
        ),
    ],
    ids=["bidirectional", "stacked", "both"],
)
def test_similarities_of_one_layer_have_different_titles(make, check_inside):
    layer = make()
    figure = visualize.plot_similarities(keras.Sequential([keras.Input((5, 3)), layer]))
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert len(set(titles)) == len(titles) >= 4
    assert all(t.replace("\n", "").startswith(layer.name) for t in titles)
    check_inside(figure)


@pytest.mark.parametrize(
    ("features", "shape"), [(32, (1, 32)), (64, (8, 8)), (72, (8, 9)), (67, (1, 67))]
)
def test_long_masks_can_be_seen(features, shape):
    layer = nsl_keras.layers.NeuralSimilarityDense(2, name="dense")
    model = keras.Sequential([keras.Input((features,)), layer])
    mask = RNG.normal(size=features)
    layer.comparison.similarity_parameters.assign(mask)
    figure = visualize.plot_similarities(model)
    (image,) = panels_of(figure).values()
    np.testing.assert_allclose(image.get_array(), mask.reshape(shape) - 1, atol=1e-6)
    figure.canvas.draw()
    assert image.get_window_extent().height > 5
    is_long = shape[1] > 32
    assert (image.axes.get_aspect() == "auto") == is_long
