"""Entries, one prediction taken apart, and images found: every number that is drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from matplotlib.colors import to_hex
from pictures import check_saved, small_model

import nsl_keras
from nsl_keras import visualize
from nsl_keras.visualize.figures import BLUE, ORANGE

RNG = np.random.default_rng(9)


# Entries with their nearest images.

CLASSES = 3
PICTURES = RNG.random((20, 8, 8, 1)).astype("float32")


@pytest.fixture
def classifier():
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.backbones.convnet4((8, 8, 1), (2, 3, 4, 5)),
        nsl_keras.layers.CosineDense(CLASSES),
        dictionary=12,
    )
    model.build(PICTURES.shape)
    dictionary = model.dictionary
    dictionary.value_logits.assign(RNG.normal(size=(12, CLASSES)))
    return model


def test_learned_neighbors(classifier, tmp_path):
    figure = visualize.plot_learned_neighbors(classifier, PICTURES, [4, 0], nearest=5)
    check_saved(figure, tmp_path)
    assert len(figure.axes) == 2 * (1 + 5)
    dictionary = classifier.dictionary
    values = ops.convert_to_numpy(dictionary.values)
    features = classifier.features(ops.convert_to_tensor(PICTURES), training=False)
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
            np.testing.assert_array_equal(drawn, PICTURES[index, :, :, 0])


def test_learned_neighbors_take_an_entry_for_each_class(classifier):
    figure = visualize.plot_learned_neighbors(
        classifier, PICTURES, nearest=2, class_names="abc"
    )
    labels = [
        label.get_text() for axis in figure.axes[::3] for label in axis.get_xticklabels()
    ]
    dictionary = classifier.dictionary
    present = sorted(set(ops.convert_to_numpy(dictionary.values).argmax(axis=1)))
    assert labels == ["abc"[kind] for kind in present]
    assert len(figure.axes) == 3 * len(present)


def test_learned_neighbors_of_colour_images_in_bytes(tmp_path):
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.backbones.convnet4((8, 8, 3), (2, 3, 4, 5)),
        nsl_keras.layers.CosineDense(CLASSES),
        dictionary=6,
    )
    images = RNG.integers(0, 256, size=(7, 8, 8, 3)).astype("uint8")
    model.build(images.shape)
    figure = visualize.plot_learned_neighbors(model, images, [1], nearest=7)
    check_saved(figure, tmp_path)
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    # Matplotlib clips what is above 1: compare with the images, not with the range.
    assert any(np.allclose(drawn, image / 255) for image in images)
    standardized = (images / 127.5 - 1).astype("float32")
    figure = visualize.plot_learned_neighbors(model, standardized, [1], nearest=7)
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    whole = (standardized - standardized.min()) / np.ptp(standardized)
    assert any(np.allclose(drawn, image, atol=1e-6) for image in whole)
    figure = visualize.plot_learned_neighbors(model, 0 * standardized - 1, [1], nearest=7)
    assert np.all(np.asarray(figure.axes[1].images[0].get_array()) == 0)


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
def test_errors_of_learned_neighbors(options, message, classifier):
    with pytest.raises(ValueError, match=message):
        visualize.plot_learned_neighbors(classifier, PICTURES, **options)


def test_error_of_a_regression():
    regression = nsl_keras.MetaNeighborhoodModel(
        None, keras.layers.Dense(2), dictionary=4, task="regression"
    )
    with pytest.raises(ValueError, match=r"`model` must be a classifier.*'regression'"):
        visualize.plot_learned_neighbors(regression, PICTURES)


# One prediction taken apart.

X = RNG.normal(size=(20, 6)).astype("float32")


def outputs_of(model, example):
    return [
        ops.convert_to_numpy(model(example[None], adapt=adapt))[0]
        for adapt in (False, True)
    ]


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_numbers_of_an_adaptation(task, tmp_path):
    model = small_model(keras.layers.Dense(3), task=task)
    figure = visualize.plot_adaptation(model, X[3], k=4, class_names=["ant", "bee", "cat"])
    check_saved(figure, tmp_path)
    top, bars, each, whole, others = figure.axes
    before, after = outputs_of(model, X[3])
    found = model.neighbors(X[3:4], k=4)
    drawn = np.reshape([bar.get_height() for bar in top.patches], (2, 3))
    shown = (before, after)
    if task == "classification":
        shown = (softmax(before), softmax(after))
    np.testing.assert_allclose(drawn, shown, atol=1e-5)
    assert top.get_ylabel() == ("probability" if task == "classification" else "output")
    widths = [bar.get_width() for bar in bars.patches]
    np.testing.assert_allclose(widths, found.weights[0], rtol=1e-5)
    names = ["ant", "bee", "cat"]
    expected = [f"entry {index}" for index in found.indices[0]]
    if task == "classification":
        kinds = found.values[0].argmax(axis=1)
        expected = [
            f"{label}: {names[kind]}" for label, kind in zip(expected, kinds, strict=True)
        ]
    assert [label.get_text() for label in bars.get_yticklabels()] == expected
    changes = np.asarray(each.images[0].get_array())
    np.testing.assert_allclose(changes, found.output_changes[0], atol=1e-6)
    rest, total = np.asarray(whole.images[0].get_array())
    np.testing.assert_allclose(total, after - before, atol=1e-6)
    np.testing.assert_allclose(rest + changes.sum(axis=0), after - before, atol=1e-5)
    np.testing.assert_allclose(
        [float(text.get_text()) for text in each.texts], changes.reshape(-1), atol=0.006
    )
    low, high = each.images[0].get_clim()
    assert low == -high < 0
    weight = 1 - found.weights.sum()
    assert others.texts[0].get_text() == f"8 others, weight {weight:.2f}"


def test_images_of_an_adaptation(tmp_path):
    images = RNG.random((20, 4, 4, 3)).astype("float32")
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(5)]),
        nsl_keras.layers.CosineDense(14),
        dictionary=9,
    )
    model.build(images.shape)
    model.dictionary.keys.assign(RNG.normal(size=(9, 5)))
    figure = visualize.plot_adaptation(model, images[5], k=3, images=images)
    check_saved(figure, tmp_path)
    titled = {axis.get_title(): axis for axis in figure.axes}
    drawn = np.asarray(titled["example"].images[0].get_array())
    np.testing.assert_allclose(drawn, images[5])
    insets = titled["nearest image"].child_axes
    assert len(insets) == 3
    attention = ops.convert_to_numpy(model.dictionary.attention(model.features(images)))
    found = model.neighbors(images[5:6], k=3)
    for inset, entry in zip(insets, found.indices[0], strict=True):
        drawn = np.asarray(inset.images[0].get_array())
        np.testing.assert_allclose(drawn, images[attention[:, entry].argmax()])
    # Fourteen classes leave no room for numbers.
    assert not titled["change of each logit"].texts


def test_errors_of_an_adaptation():
    model = small_model(keras.layers.Dense(3))
    with pytest.raises(ValueError, match=r"`k` must be at most `num_neighbors`.*k=13"):
        visualize.plot_adaptation(model, X[0], k=13)
    with pytest.raises(ValueError, match=r"`k` must be a positive integer"):
        visualize.plot_adaptation(model, X[0], k=0)
    with pytest.raises(ValueError, match=r"`class_names` must hold 3 names"):
        visualize.plot_adaptation(model, X[0], class_names="ab")


# Images found for queries.

IMAGES = RNG.random((30, 4, 4, 1)).astype("float32")
LABELS = RNG.integers(0, 4, size=30)
QUERIES = RNG.random((11, 4, 4, 1)).astype("float32")
QUERY_LABELS = RNG.integers(0, 4, size=11)


def backbone():
    layers = [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(5)]
    return keras.Sequential(layers)


def descriptions(model, images):
    images = ops.convert_to_tensor(images)
    if isinstance(model, nsl_keras.MetaNeighborhoodModel):
        found = model.dictionary.attention(model.features(images))
    else:
        found = model(images)
    found = ops.convert_to_numpy(found)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.fixture(params=["neighborhoods", "features"])
def model(request):
    if request.param == "features":
        return backbone()
    model = nsl_keras.MetaNeighborhoodModel(
        backbone(), nsl_keras.layers.CosineDense(2), dictionary=9
    )
    model.build(IMAGES.shape)
    model.dictionary.keys.assign(RNG.normal(size=(9, 5)))
    return model


def test_images_frames_and_accuracy(model, tmp_path):
    figure = visualize.plot_subcategories(
        model, IMAGES, LABELS, QUERIES, QUERY_LABELS, nearest=4, rows=[2, 7, 0]
    )
    check_saved(figure, tmp_path)
    cosines = descriptions(model, QUERIES) @ descriptions(model, IMAGES).T
    found = np.argsort(-cosines, axis=1)[:, :4]
    for position, row in enumerate([2, 7, 0]):
        query, *others = figure.axes[5 * position : 5 * position + 5]
        np.testing.assert_array_equal(
            np.asarray(query.images[0].get_array()), QUERIES[row, :, :, 0]
        )
        assert query.get_ylabel() == str(QUERY_LABELS[row])
        for axis, index in zip(others, found[row], strict=True):
            drawn = np.asarray(axis.images[0].get_array())
            np.testing.assert_array_equal(drawn, IMAGES[index, :, :, 0])
            right = LABELS[index] == QUERY_LABELS[row]
            color = to_hex(axis.spines["top"].get_edgecolor()).upper()
            assert color == (BLUE if right else ORANGE)
            assert axis.get_xlabel() == str(LABELS[index])
    votes = []
    for labels in LABELS[found]:
        kinds, counts = np.unique(labels, return_counts=True)
        best = kinds[counts == counts.max()]
        votes.append(next(label for label in labels if label in best))
    share = 100 * np.mean(np.asarray(votes) == QUERY_LABELS)
    assert f"{share:.1f} % of 11 queries" in figure.get_suptitle()
    is_plain = not isinstance(model, nsl_keras.MetaNeighborhoodModel)
    what = "By features:" if is_plain else "By attention over 9 entries:"
    assert figure.get_suptitle().startswith(what)


def test_the_first_query_of_each_label_is_drawn():
    labels = np.array([2, 2, 0, 1, 0])
    figure = visualize.plot_subcategories(
        backbone(), IMAGES, LABELS, QUERIES[:5], labels, nearest=2, class_names="abcd"
    )
    drawn = [axis.get_ylabel() for axis in figure.axes[::3]]
    assert drawn == ["c", "a", "b"]


def test_an_image_finds_itself():
    figure = visualize.plot_subcategories(
        backbone(), IMAGES, LABELS, IMAGES, LABELS, nearest=1, rows=[0]
    )
    assert "100.0 % of 30 queries" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nearest": 31}, r"`nearest` must be at most the number of images, 30"),
        ({"rows": [11]}, r"`rows` must be numbers of queries, 0 to 10.*\[11\]"),
        ({"labels": LABELS[:3]}, r"`images` and `labels` must have the same length"),
        ({"query_labels": LABELS}, r"`queries` and `query_labels` must have the same"),
        ({"labels": LABELS - 1}, r"`labels` must hold classes"),
        ({"class_names": ["one"]}, r"`class_names` must hold 4 names"),
    ],
    ids=str,
)
def test_errors_of_subcategories(changes, message):
    arguments = {
        "images": IMAGES,
        "labels": LABELS,
        "queries": QUERIES,
        "query_labels": QUERY_LABELS,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        visualize.plot_subcategories(backbone(), **arguments)
