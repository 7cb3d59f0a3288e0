"""Maps of the feature space, and cosines to prototypes: the points drawn."""

import sys

import keras
import numpy as np
import pytest
from keras import ops
from matplotlib.colors import to_rgba
from pictures import check_saved, offsets, small_model

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(4)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.integers(0, 3, size=40)


def model_of(metric="cosine", classes=3):
    return small_model(nsl_keras.layers.CosineDense(classes), metric=metric)


def vectors_of(model, metric):
    features = ops.convert_to_numpy(model.features(ops.convert_to_tensor(X)))
    keys = ops.convert_to_numpy(model.dictionary.keys.value)
    if metric == "euclidean":
        return features, keys
    return tuple(v / np.linalg.norm(v, axis=1, keepdims=True) for v in (features, keys))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_principal_plane(metric, tmp_path):
    model = model_of(metric)
    figure = visualize.plot_feature_map(model, X, Y, class_names=["ant", "bee", "cat"])
    check_saved(figure, tmp_path)
    (axis,) = figure.axes
    values = ops.convert_to_numpy(model.dictionary.values)
    kinds, is_decided = values.argmax(axis=1), values.max(axis=1) >= 0.5
    # Class by class; the entries of each the undecided ones first.
    examples = np.concatenate([offsets(drawn) for drawn in axis.collections[:3]])
    keys = np.concatenate([offsets(drawn) for drawn in axis.collections[3:9]])
    order = [
        np.argsort(Y, kind="stable"),
        np.lexsort((np.arange(12), is_decided, kinds)),
    ]
    features, entries = vectors_of(model, metric)
    covariance = np.cov(features.T)
    lengths, directions = np.linalg.eigh(covariance)
    for column, direction in enumerate((directions[:, -1], directions[:, -2])):
        for drawn, vectors, places in zip(
            (examples, keys), (features, entries), order, strict=True
        ):
            expected = ((vectors - features.mean(axis=0)) @ direction)[places]
            found = drawn[:, column]
            # A principal direction may point either way.
            sign = np.sign(found @ expected)
            np.testing.assert_allclose(sign * found, expected, atol=1e-5)
    share = 100 * lengths[-1] / lengths.sum()
    assert f"({share:.0f} % of the variance)" in axis.get_xlabel()
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert legend[:3] == ["ant", "bee", "cat"]
    assert not axis.texts  # Nothing on the map that could hide something.


def test_colours_and_shapes_are_classes():
    model = model_of()
    values = np.tile([0.9, 0.05, 0.05], (12, 1))
    values[:4] = [0.3, 0.4, 0.3]
    model.dictionary.assign(values=values)
    (axis,) = visualize.plot_feature_map(model, X, Y).axes
    examples, entries = axis.collections[:3], axis.collections[3:9]
    colors = [to_rgba(drawn.get_facecolors()[0])[:3] for drawn in examples]
    shapes = {len(drawn.get_paths()[0].vertices) for drawn in examples}
    assert len(set(colors)) == 3 and len(shapes) == 3
    # Eight decided entries of class 0, four undecided ones of class 1.
    counts = [len(offsets(drawn)) for drawn in entries]
    assert counts == [0, 8, 4, 0, 0, 0]
    assert to_rgba(entries[1].get_facecolors()[0])[:3] == colors[0]
    assert to_rgba(entries[2].get_facecolors()[0])[:3] == (1, 1, 1)
    assert to_rgba(entries[2].get_edgecolors()[0])[:3] == colors[1]


def test_one_hot_labels_and_many_classes():
    model = model_of(classes=12)
    labels = np.arange(40) % 12
    drawn = [
        visualize.plot_feature_map(model, X, each).axes[0]
        for each in (labels, np.eye(12)[labels])
    ]
    one, other = (
        [offsets(collection).tolist() for collection in axis.collections[:12]]
        for axis in drawn
    )
    assert one == other
    assert sorted(map(len, one)) == [3] * 8 + [4] * 4


def test_a_map_of_a_data_set():
    model = model_of()
    one, other = (
        visualize.plot_feature_map(model, *arguments).axes[0]
        for arguments in ((X, Y), (iter([(X[:30], Y[:30]), (X[30:], Y[30:])]),))
    )
    for first, second in zip(one.collections, other.collections, strict=True):
        np.testing.assert_allclose(offsets(first), offsets(second), atol=1e-6)
    with pytest.raises(ValueError, match=r"`y` must be given, or come with the data set"):
        visualize.plot_feature_map(model, iter([X]))


def test_neighbor_embedding(tmp_path, one_thread):
    model = model_of()
    # Two far groups of examples stay two groups.
    features = np.concatenate([X[:20] + 8, X[20:] - 8])
    groups = np.repeat([0, 1], 20)
    figure = visualize.plot_feature_map(model, features, groups, method="tsne")
    check_saved(figure, tmp_path)
    places = np.concatenate([offsets(d) for d in figure.axes[0].collections[:2]])
    assert places.shape == (40, 2)
    centers = np.stack([places[groups == group].mean(axis=0) for group in (0, 1)])
    nearest = np.linalg.norm(places[:, None] - centers, axis=-1).argmin(axis=1)
    np.testing.assert_array_equal(nearest, groups)
    entries = figure.axes[0].collections[3:9]
    assert sum(len(offsets(drawn)) for drawn in entries) == 12
    again = visualize.plot_feature_map(model, features, groups, method="tsne")
    np.testing.assert_array_equal(places[:20], offsets(again.axes[0].collections[0]))


def test_error_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ImportError, match=r'`method="tsne"` needs scikit-learn'):
        visualize.plot_feature_map(model_of(), X, Y, method="tsne")


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (X, Y, {"method": "umap"}, r"`method` must be one of 'pca', 'tsne'.*'umap'"),
        (X, Y[:5], {}, r"`x` and `y` must have the same length.*len\(x\)=40"),
        (X, Y + 3, {}, r"`y` must hold classes 0 to 2"),
        (X, Y, {"class_names": "ab"}, r"`class_names` must hold 3 names.*2 names"),
        (X[:1], Y[:1], {}, r"`x` must have at least two examples.*\(1, 5\)"),
    ],
    ids=str,
)
def test_errors_of_maps(x, y, options, message):
    with pytest.raises(ValueError, match=message):
        visualize.plot_feature_map(model_of(), x, y, **options)


@pytest.mark.parametrize(
    "make_head",
    [lambda: nsl_keras.layers.CosineDense(3), lambda: keras.layers.Dense(3)],
    ids=["cosine", "dense"],
)
def test_prototype_cosines(make_head, tmp_path):
    model = small_model(make_head())
    figure = visualize.plot_prototype_cosines(model, X, Y)
    check_saved(figure, tmp_path)
    z = ops.convert_to_numpy(model.features(ops.convert_to_tensor(X)))
    kernel = ops.convert_to_numpy(model.head.kernel.value)
    adapted = ops.convert_to_numpy(model.neighborhood.adapted_weights(z)[0])
    expected = []
    for row, label in enumerate(Y):
        expected.append(
            [
                z[row] @ column / np.linalg.norm(z[row]) / np.linalg.norm(column)
                for column in (kernel[:, label], adapted[row, :, label])
            ]
        )
    expected = np.asarray(expected)
    above = expected[:, 1] > expected[:, 0]
    assert 0 < above.sum() < len(Y)
    rising, falling = figure.axes[0].collections
    np.testing.assert_allclose(offsets(rising), expected[above], atol=1e-5)
    np.testing.assert_allclose(offsets(falling), expected[~above], atol=1e-5)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[0] == f"towards the example: {100 * above.mean():.1f} %"
    lowest, _ = figure.axes[0].get_xlim()
    assert lowest < expected.min()


def test_a_rate_of_almost_zero_leaves_the_points_on_the_diagonal():
    model = small_model(nsl_keras.layers.CosineDense(3))
    model.neighborhood.rate.raw_rates[0].assign(1e-9)
    figure = visualize.plot_prototype_cosines(model, X, Y)
    places = np.concatenate([offsets(drawn) for drawn in figure.axes[0].collections])
    np.testing.assert_allclose(places[:, 0], places[:, 1], atol=1e-6)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == [
        "towards the example: 0.0 %",
        "away from it: 0.0 %",
        "unchanged: 100.0 %",
    ]


def test_errors_of_prototypes():
    head = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"one CosineDense or Dense layer.*Sequential"):
        visualize.plot_prototype_cosines(small_model(head), X, Y)
    model = small_model(keras.layers.Dense(3))
    with pytest.raises(ValueError, match="`y` must hold classes 0 to 2"):
        visualize.plot_prototype_cosines(model, X, Y + 1)
    regression = small_model(keras.layers.Dense(3), task="regression")
    with pytest.raises(ValueError, match=r"`model` must be a classifier"):
        visualize.plot_prototype_cosines(regression, X, Y)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_a_map_of_half_precision(method, one_thread):
    backbone = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, dtype="mixed_float16")]
    )
    model = nsl_keras.MetaNeighborhoodModel(
        backbone, nsl_keras.layers.CosineDense(3), 12, dtype="mixed_float16"
    )
    model.build(X.shape)
    assert keras.backend.standardize_dtype(model.features(X).dtype) == "float16"
    (axis,) = visualize.plot_feature_map(model, X, Y, method=method).axes
    places = np.concatenate([offsets(drawn) for drawn in axis.collections[:9]])
    assert places.shape == (52, 2) and np.isfinite(places).all()
