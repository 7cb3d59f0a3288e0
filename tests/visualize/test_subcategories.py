"""Images found for queries: which ones, their frames, and the accuracy."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops
from matplotlib.colors import to_hex
from pictures import check_saved

import nsl_keras
from nsl_keras import visualize
from nsl_keras.visualize.figures import BLUE, ORANGE

RNG = np.random.default_rng(9)
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


def test_images_and_labels_from_data_sets():
    model = backbone()
    one, other = (
        visualize.plot_subcategories(model, *arguments, nearest=3).get_suptitle()
        for arguments in (
            (IMAGES, LABELS, QUERIES, QUERY_LABELS),
            (iter([(IMAGES, LABELS)]), None, iter([(QUERIES, QUERY_LABELS)]), None),
        )
    )
    assert one == other


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
        ({"labels": LABELS.astype(str)}, r"`labels` must hold numbers"),
        ({"query_labels": QUERY_LABELS.astype(str)}, r"`query_labels` must hold numbers"),
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


def test_a_class_that_does_not_occur():
    figure = visualize.plot_subcategories(
        backbone(), IMAGES, LABELS, QUERIES, QUERY_LABELS, 5, [0], "abcdefghij"
    )
    assert figure.axes[0].get_ylabel() == "abcd"[QUERY_LABELS[0]]


@pytest.mark.parametrize("nearest", [1, 2])
@pytest.mark.parametrize("prefix", ["", "a rather long name of class "])
def test_what_is_written_has_room(nearest, prefix, check_inside):
    names = [f"{prefix}{number}" for number in range(4)]
    figure = visualize.plot_subcategories(
        backbone(), IMAGES, LABELS, QUERIES, QUERY_LABELS, nearest, class_names=names
    )
    check_inside(figure)
    boxes = [axis.yaxis.label.get_window_extent() for axis in figure.axes[:: nearest + 1]]
    for above, below in itertools.pairwise(boxes):
        assert above.ymin > below.ymax
    first, last = (axis.xaxis.label.get_window_extent() for axis in figure.axes[:2])
    assert first.xmax <= last.xmin
