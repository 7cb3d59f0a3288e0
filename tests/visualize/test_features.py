"""Maps of the feature space, and cosines to prototypes: the points drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from matplotlib.colors import to_rgba
from pictures import offsets, small_model

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(4)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.integers(0, 3, size=40)


def features_of(model):
    return ops.convert_to_numpy(model.features(ops.convert_to_tensor(X)))


def places_of(axis, classes=3):
    """Examples of each class, then the undecided and the decided entries of each."""
    examples = [offsets(drawn) for drawn in axis.collections[:classes]]
    entries = axis.collections[classes : 4 * classes]
    return examples, [offsets(e) for e in entries[::3]], [offsets(e) for e in entries[1::3]]


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_principal_plane(metric, tmp_path):
    model = small_model(keras.layers.Dense(3), metric=metric)
    figure = visualize.plot_feature_map(model, X, Y, class_names=["ant", "bee", "cat"])
    figure.savefig(tmp_path / "figure.png")
    (axis,) = figure.axes
    values = ops.convert_to_numpy(model.dictionary.values)
    kinds, is_decided = values.argmax(axis=1), values.max(axis=1) >= 0.5
    features, keys = features_of(model), ops.convert_to_numpy(model.dictionary.keys)
    if metric == "cosine":
        features, keys = (
            each / np.linalg.norm(each, axis=1, keepdims=True) for each in (features, keys)
        )
    lengths, directions = np.linalg.eigh(np.cov(features.T))
    plane = directions[:, :-3:-1]
    features, keys = ((each - features.mean(axis=0)) @ plane for each in (features, keys))
    for kind, (examples, undecided, decided) in enumerate(
        zip(*places_of(axis), strict=True)
    ):
        for found, expected in (
            (examples, features[kind == Y]),
            (undecided, keys[(kinds == kind) & ~is_decided]),
            (decided, keys[(kinds == kind) & is_decided]),
        ):
            # A principal direction may point either way.
            np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-5)
    share = 100 * lengths[-1] / lengths.sum()
    assert f"({share:.0f} % of the variance)" in axis.get_xlabel()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    names = ["ant", "bee", "cat", "example", "learned neighbour", "undecided one"]
    assert legend == names


def test_colours_and_shapes_are_classes():
    model = small_model(keras.layers.Dense(3))
    values = np.tile([0.9, 0.05, 0.05], (12, 1))
    values[:4] = [0.3, 0.4, 0.3]  # Undecided, of class 1.
    model.dictionary.assign(values=values)
    drawn = visualize.plot_feature_map(model, X, Y).axes[0].collections
    colors = [to_rgba(each.get_facecolors()[0])[:3] for each in drawn[:3]]
    assert len(set(colors)) == 3
    assert len({len(each.get_paths()[0].vertices) for each in drawn[:3]}) == 3
    assert to_rgba(drawn[4].get_facecolors()[0])[:3] == colors[0]
    assert to_rgba(drawn[6].get_edgecolors()[0])[:3] == colors[1]


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_neighbor_embedding(dtype, tmp_path, one_thread):
    keras.config.set_dtype_policy(dtype)
    model = small_model(keras.layers.Dense(3))
    # Two far groups of examples stay two groups.
    x = np.concatenate([X[:20] + 8, X[20:] - 8])
    groups = np.repeat([0, 1], 20)
    figure = visualize.plot_feature_map(model, x, groups, method="tsne")
    figure.savefig(tmp_path / "figure.png")
    examples, undecided, decided = places_of(figure.axes[0])
    places = np.concatenate(examples)
    centers = np.stack([places[groups == group].mean(axis=0) for group in (0, 1)])
    nearest = np.linalg.norm(places[:, None] - centers, axis=-1).argmin(axis=1)
    np.testing.assert_array_equal(nearest, groups)
    assert len(np.concatenate([*undecided, *decided])) == 12
    again = visualize.plot_feature_map(model, x, groups, method="tsne")
    np.testing.assert_array_equal(examples[0], places_of(again.axes[0])[0][0])


@pytest.mark.parametrize(
    "make_head",
    [lambda: nsl_keras.layers.CosineDense(3), lambda: keras.layers.Dense(3)],
    ids=["cosine", "dense"],
)
def test_prototype_cosines(make_head, tmp_path):
    model = small_model(make_head())
    figure = visualize.plot_prototype_cosines(model, X, Y)
    figure.savefig(tmp_path / "figure.png")
    z = features_of(model)
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
    rising, falling, unchanged = figure.axes[0].collections
    np.testing.assert_allclose(offsets(rising), expected[above], atol=1e-5)
    np.testing.assert_allclose(offsets(falling), expected[~above], atol=1e-5)
    assert not len(offsets(unchanged))
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[0] == f"towards the example: {100 * above.mean():.1f} %"


def test_rounding_turns_no_prototype():
    model = small_model(nsl_keras.layers.CosineDense(3))
    model.neighborhood.rate.raw_rates[0].assign(1e-9)
    figure = visualize.plot_prototype_cosines(model, X, Y)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[2] == "unchanged: 100.0 %"
