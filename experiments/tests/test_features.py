"""Maps of the feature space, cosines to prototypes, sub-categories: all that is drawn."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops
from matplotlib.colors import to_hex, to_rgba
from pictures import attention_of, drawn, offsets, small_model

import nsl_keras
from experiments.common.data import Split
from experiments.common.pictures import of_adaptation
from experiments.image_classification.features import (
    plot_feature_map,
    plot_prototype_cosines,
    rising_share,
)
from experiments.image_classification.pictures import BLUE, ORANGE, plot_subcategories

RNG = np.random.default_rng(4)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.integers(0, 3, size=40)
NAMES = ["ant", "bee", "cat"]


def places_of(axis, classes=3):
    """Examples of each class, then the undecided and the decided entries of each."""
    examples = [offsets(drawn) for drawn in axis.collections[:classes]]
    entries = axis.collections[classes : 4 * classes]
    return examples, [offsets(e) for e in entries[::3]], [offsets(e) for e in entries[1::3]]


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_feature_map(dtype, tmp_path, one_thread):
    keras.config.set_dtype_policy(dtype)
    model = small_model(keras.layers.Dense(3))
    values = np.tile([0.9, 0.05, 0.05], (12, 1))
    values[:4] = [0.3, 0.4, 0.3]  # Undecided, of class 1.
    model.dictionary.assign(values=values)
    # Two far groups of examples stay two groups.
    x = np.concatenate([X[:20] + 8, X[20:] - 8])
    groups = np.repeat([0, 1], 20)
    figure = plot_feature_map(model, Split(x, groups), NAMES)
    figure.savefig(tmp_path / "figure.png")
    (axis,) = figure.axes
    examples, undecided, decided = places_of(axis)
    places = np.concatenate(examples)
    centers = np.stack([places[groups == group].mean(axis=0) for group in (0, 1)])
    nearest = np.linalg.norm(places[:, None] - centers, axis=-1).argmin(axis=1)
    np.testing.assert_array_equal(nearest, groups)
    assert [len(each) for each in undecided] == [0, 4, 0]
    assert [len(each) for each in decided] == [8, 0, 0]
    again = plot_feature_map(model, Split(x, groups), NAMES)
    np.testing.assert_array_equal(examples[0], places_of(again.axes[0])[0][0])
    # Colors and shapes are classes.
    first, second, *_ = axis.collections
    color = to_rgba(first.get_facecolors()[0])[:3]
    assert color != to_rgba(second.get_facecolors()[0])[:3]
    assert to_rgba(axis.collections[4].get_facecolors()[0])[:3] == color
    assert len({len(each.get_paths()[0].vertices) for each in (first, second)}) == 2
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [*NAMES, "example", "learned neighbor", "undecided one"]


@pytest.mark.parametrize(
    "make_head",
    [lambda: nsl_keras.layers.CosineDense(3), lambda: keras.layers.Dense(3)],
    ids=["cosine", "dense"],
)
def test_prototype_cosines(make_head, tmp_path):
    model = small_model(make_head())
    figure = plot_prototype_cosines(model, Split(X, Y))
    figure.savefig(tmp_path / "figure.png")
    z = ops.convert_to_numpy(model.features(ops.convert_to_tensor(X)))
    kernel = ops.convert_to_numpy(model.head.kernel)
    adapted = ops.convert_to_numpy(model.neighborhood.adapted_weights(z)[0])

    def cosine(one, other):
        return one @ other / np.linalg.norm(one) / np.linalg.norm(other)

    expected = np.array(
        [
            (cosine(z[row], kernel[:, label]), cosine(z[row], adapted[row, :, label]))
            for row, label in enumerate(Y)
        ]
    )
    above = expected[:, 1] > expected[:, 0]
    assert 0 < above.sum() < len(Y)
    assert rising_share(model, Split(X, Y)) == above.mean()
    rising, falling, unchanged = figure.axes[0].collections
    np.testing.assert_allclose(offsets(rising), expected[above], atol=1e-5)
    np.testing.assert_allclose(offsets(falling), expected[~above], atol=1e-5)
    assert not len(offsets(unchanged))
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[0] == f"towards the example: {100 * above.mean():.1f} %"


def test_rounding_turns_no_prototype():
    model = small_model(nsl_keras.layers.CosineDense(3))
    model.neighborhood.learning_rate.weights[0].assign(1e-9)
    figure = plot_prototype_cosines(model, Split(X, Y))
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[2] == "unchanged: 100.0 %"


@pytest.mark.parametrize("described_by", ["features", "attention to 12 entries"])
def test_subcategories(described_by):
    train = Split(RNG.random((30, 4, 4, 1)).astype("float32"), RNG.integers(0, 4, size=30))
    labels = np.array([2, 2, 0, 1, 0])
    queries = Split(RNG.random((5, 4, 4, 1)).astype("float32"), labels)
    if described_by == "features":
        features = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten()])
        model = keras.Sequential([features, keras.layers.Dense(4)])
        one, other = queries.images.reshape(5, 16), train.images.reshape(30, 16)
    else:
        model = small_model(keras.layers.Dense(2), shape=(4, 4, 1))
        one, other = attention_of(model, queries.images), attention_of(model, train.images)
    figure = plot_subcategories(model, train, queries, "abcd", nearest=3)
    one, other = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (one, other))
    found = np.argsort(-one @ other.T, axis=1)[:, :3]
    # The first query of each label.
    for position, row in enumerate([0, 2, 3]):
        query, *others = figure.axes[4 * position : 4 * position + 4]
        np.testing.assert_array_equal(drawn(query), queries.images[row, :, :, 0])
        assert query.get_xlabel() == "abcd"[labels[row]]
        for axis, index in zip(others, found[row], strict=True):
            np.testing.assert_array_equal(drawn(axis), train.images[index, :, :, 0])
            color = to_hex(axis.spines["top"].get_edgecolor()).upper()
            assert color == (BLUE if train.labels[index] == labels[row] else ORANGE)
            assert axis.get_xlabel() == "abcd"[train.labels[index]]
    votes = [np.bincount(train.labels[each]).argmax() for each in found]
    share = 100 * np.mean(np.equal(votes, labels))
    assert figure.get_suptitle().startswith(f"By {described_by}: {share:.1f} % of 5 ")


def test_a_dictionary_may_be_smaller_than_the_picture_of_an_adaptation():
    flat = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten()])
    model = nsl_keras.MetaNeighborhoodModel(flat, keras.layers.Dense(2), dictionary=3)
    split = Split(RNG.random((6, 4, 4, 1)).astype("float32"), np.arange(6) % 2)
    data = SimpleNamespace(train=split, class_names=["ant", "bee"])
    assert of_adaptation(model, data, split).axes
