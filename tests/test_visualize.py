"""Figures: their panels, what is drawn in them, and that they can be saved."""

import sys

import keras
import numpy as np
import pytest
from keras import ops

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
            shape = layer.similarity_parameters.shape
            layer.similarity_parameters.assign(RNG.normal(size=shape))
    return model


def check_saved(figure, folder):
    path = folder / "figure.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


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
    figure = visualize.similarities(model)
    check_saved(figure, tmp_path)
    panels = panels_of(figure)
    # One panel a static layer, and the colour bar.
    assert list(panels) == ["masked\nmask", "mixed\nM"]
    assert len(figure.axes) == 3
    masked, mixed = (model.get_layer(name) for name in ("masked", "mixed"))
    for image, expected in zip(
        panels.values(),
        (
            ops.convert_to_numpy(masked.similarity_parameters).reshape(2, 3),
            ops.convert_to_numpy(mixed.similarity_parameters),
        ),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(image.get_array()), expected, rtol=1e-6)
        # The same scale in all panels, white at zero.
        assert image.get_clim() == (-image.get_clim()[1], image.get_clim()[1])
        assert image.get_clim() == next(iter(panels.values())).get_clim()
        assert image.get_clim()[1] >= max(2.0, np.abs(expected).max())
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    mask = ops.convert_to_numpy(masked.similarity_parameters)
    assert texts == [f"{value:.2f}" for value in mask]


def test_similarities_of_nested_models():
    inner = keras.Sequential([keras.Input((6, 5, 4)), convolution(name="deep")])
    model = model_of(convolution(name="top"), keras.Sequential([inner]))
    titles = list(panels_of(visualize.similarities(model)))
    assert titles == ["top\nmask", "deep\nmask"]


def test_similarities_of_a_backbone(tmp_path):
    model = nsl_keras.backbones.convnet4((8, 8, 1), similarity="unconstrained")
    figure = visualize.similarities(model)
    assert len(panels_of(figure)) == 4
    check_saved(figure, tmp_path)


def test_learned_kernel_shapes(tmp_path):
    model = model_of(
        convolution(learn_shape=True, name="static"),
        convolution(learn_shape=True, predictor="cnn", name="dynamic"),
    )
    dynamic = model.get_layer("dynamic")
    dynamic.shape_parameters.assign([1.0, 0.2, 1.0, 0.9, 0.5, 1.3])
    figure = visualize.similarities(model)
    check_saved(figure, tmp_path)
    panels = panels_of(figure)
    assert list(panels) == ["static\nmask", "static\nshape", "dynamic\nshape"]
    drawn = np.asarray(panels["dynamic\nshape"].get_array())
    np.testing.assert_array_equal(drawn, [[1, 0, 1], [1, 0, 1]])


def test_similarities_of_other_windows():
    inputs = keras.Input((6, 5, 3))
    outputs = nsl_keras.layers.NeuralSimilarityDepthwiseConv2D(3, name="depthwise")(inputs)
    outputs = keras.layers.Reshape((4, 9))(outputs)
    outputs = nsl_keras.layers.NeuralSimilarityConv1D(8, 3, name="line")(outputs)
    outputs = keras.layers.Reshape((2, 2, 2, 2))(outputs)
    outputs = nsl_keras.layers.NeuralSimilarityConv3D(2, (2, 1, 2), name="volume")(outputs)
    panels = panels_of(visualize.similarities(keras.Model(inputs, outputs)))
    shapes = {title: image.get_array().shape for title, image in panels.items()}
    assert shapes == {
        "depthwise\nmask": (3, 3),
        "line\nmask": (1, 3),
        "volume\nmask": (2, 2),
    }


@keras.saving.register_keras_serializable("tests")
class OneNumber(similarities.Similarity):
    """`M = a I`: one parameter, which is no mask."""

    def parameter_shape(self, taps):
        return (1,)

    def parameters_from(self, matrix):
        return matrix[:1, 0]

    def matrix(self, parameters):
        return parameters[..., None] * ops.eye(6)


def test_similarities_of_an_own_kind_with_other_parameters():
    model = model_of(convolution(OneNumber(), name="scaled"))
    (image,) = panels_of(visualize.similarities(model)).values()
    value = ops.convert_to_numpy(model.layers[0].similarity_parameters)[0]
    drawn = np.asarray(image.get_array())
    # As the matrix it is, or as its diagonal on the taps.
    expected = value * (np.eye(6) if drawn.shape == (6, 6) else np.ones((2, 3)))
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
        visualize.similarities(model)


def test_error_of_an_unbuilt_model():
    with pytest.raises(ValueError, match="built"):
        visualize.similarities(keras.Sequential([convolution()]))


CLASSES = 3
IMAGES = RNG.random((20, 8, 8, 1)).astype("float32")


@pytest.fixture
def model():
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.layers.CosineDense(CLASSES),
        nsl_keras.backbones.convnet4((8, 8, 1), (2, 3, 4, 5)),
        num_neighbors=12,
    )
    model.build(IMAGES.shape)
    dictionary = model.neighborhood.dictionary
    dictionary.value_logits.assign(RNG.normal(size=(12, CLASSES)))
    return model


def test_learned_neighbors(model, tmp_path):
    figure = visualize.learned_neighbors(model, IMAGES, [4, 0], nearest=5)
    check_saved(figure, tmp_path)
    assert len(figure.axes) == 2 * (1 + 5)
    dictionary = model.neighborhood.dictionary
    values = ops.convert_to_numpy(dictionary.values)
    features = model.features(ops.convert_to_tensor(IMAGES), training=False)
    attention = ops.convert_to_numpy(dictionary.attention(features))
    for row, entry in enumerate([4, 0]):
        bars, *pictures = figure.axes[6 * row : 6 * row + 6]
        assert bars.get_ylabel() == f"entry {entry}"
        heights = [bar.get_height() for bar in bars.patches]
        np.testing.assert_allclose(heights, values[entry], rtol=1e-5)
        (label,) = bars.get_xticklabels()
        assert label.get_text() == str(values[entry].argmax())
        nearest = np.argsort(-attention[:, entry])[:5]
        for picture, index in zip(pictures, nearest, strict=True):
            drawn = np.asarray(picture.images[0].get_array())
            np.testing.assert_array_equal(drawn, IMAGES[index, :, :, 0])


def test_learned_neighbors_take_an_entry_for_each_class(model):
    figure = visualize.learned_neighbors(model, IMAGES, nearest=2, class_names="abc")
    labels = [
        label.get_text() for axis in figure.axes[::3] for label in axis.get_xticklabels()
    ]
    dictionary = model.neighborhood.dictionary
    present = sorted(set(ops.convert_to_numpy(dictionary.values).argmax(axis=1)))
    assert labels == ["abc"[kind] for kind in present]
    assert len(figure.axes) == 3 * len(present)


def test_learned_neighbors_of_colour_images_in_bytes(tmp_path):
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.layers.CosineDense(CLASSES),
        nsl_keras.backbones.convnet4((8, 8, 3), (2, 3, 4, 5)),
        num_neighbors=6,
    )
    images = RNG.integers(0, 256, size=(7, 8, 8, 3)).astype("uint8")
    model.build(images.shape)
    figure = visualize.learned_neighbors(model, images, [1], nearest=7)
    check_saved(figure, tmp_path)
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    # Matplotlib clips what is above 1: compare with the images, not with the range.
    assert any(np.allclose(drawn, image / 255) for image in images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"nearest": 21},
            r"`nearest` must be at most the number of images, 20.*nearest=21",
        ),
        ({"nearest": 0}, r"`nearest` must be a positive integer.*nearest=0"),
        (
            {"entries": [0, 12]},
            r"`entries` must be dictionary entries 0 to 11.*entries=\[0, 12\]",
        ),
        ({"entries": [-1]}, r"`entries` must be dictionary entries .*entries=\[-1\]"),
    ],
    ids=str,
)
def test_errors_of_learned_neighbors(options, message, model):
    with pytest.raises(ValueError, match=message):
        visualize.learned_neighbors(model, IMAGES, **options)


def test_error_without_matplotlib(monkeypatch):
    # An entry of None makes the import fail as if nothing were installed.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"nsl_keras\[visualize\]"):
        visualize.similarities(model_of(convolution()))
