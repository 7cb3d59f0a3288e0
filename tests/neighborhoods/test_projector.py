"""The projector's files: read back as TensorBoard reads them."""

import re

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from nsl_keras.callbacks import NeighborProjector

RNG = np.random.default_rng(8)
X = RNG.normal(size=(150, 6)).astype("float32")
Y = RNG.integers(0, 3, size=150)


def make_model(task="classification"):
    backbone = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
    head = keras.layers.Dense(2 if task == "regression" else 3)
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, 10, task=task)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss="mse"
        if task == "regression"
        else keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def read(folder):
    """Vectors, header and rows, found by way of the configuration."""
    config = (folder / "projector_config.pbtxt").read_text()
    paths = dict(re.findall(r'(\w+_path): "(.*)"', config))
    vectors = np.loadtxt(folder / paths["tensor_path"], delimiter="\t", ndmin=2)
    lines = (folder / paths["metadata_path"]).read_text().splitlines()
    header, *rows = [line.split("\t") for line in lines]
    assert len(rows) == len(vectors)
    assert all(len(row) == len(header) for row in rows)
    return vectors, header, rows


def test_keys_after_each_epoch(tmp_path):
    model = make_model()
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            keys = ops.convert_to_numpy(self.model.neighborhood.dictionary.keys.value)
            seen.append((read(tmp_path / "logs")[0], keys.copy()))

    model.fit(
        *(X, Y),
        epochs=2,
        verbose=0,
        callbacks=[NeighborProjector(tmp_path / "logs"), Reader()],
    )
    for vectors, keys in seen:
        np.testing.assert_allclose(vectors, keys, rtol=1e-6, atol=1e-9)
    (first, _), (second, _) = seen
    assert np.abs(first - second).max() > 1e-4
    _, header, rows = read(tmp_path / "logs")
    values = ops.convert_to_numpy(model.neighborhood.dictionary.values)
    assert header == ["kind", "number", "class", "probability"]
    assert rows == [
        ["entry", str(number), str(value.argmax()), f"{value.max():.3f}"]
        for number, value in enumerate(values)
    ]
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert names == {"neighbors.tsv", "neighbors_metadata.tsv", "projector_config.pbtxt"}


@pytest.mark.parametrize("y", [Y, Y[:, None], np.eye(3)[Y]], ids=["1d", "2d", "one-hot"])
def test_examples_and_names(y, tmp_path):
    model = make_model()
    names = ["ant", "bumble\tbee", "cat"]
    projector = NeighborProjector(str(tmp_path), X, y, class_names=names)
    model.fit(X, Y, verbose=0, callbacks=[projector])
    vectors, _, rows = read(tmp_path)
    features = ops.convert_to_numpy(model.features(ops.convert_to_tensor(X)))
    np.testing.assert_allclose(vectors[10:], features, rtol=1e-5, atol=1e-6)
    shown = ["ant", "bumble bee", "cat"]
    assert rows[10:] == [
        ["example", str(number), shown[label], "1"] for number, label in enumerate(Y)
    ]


def test_regression(tmp_path):
    model = make_model("regression")
    targets = RNG.normal(size=(150, 2)).astype("float32")
    model.fit(
        X, targets, verbose=0, callbacks=[NeighborProjector(tmp_path, X[:20], targets[:20])]
    )
    vectors, header, rows = read(tmp_path)
    assert header == ["kind", "number", "value"]
    assert vectors.shape == (30, 5)
    found = np.array([[float(part) for part in row[2].split()] for row in rows])
    values = ops.convert_to_numpy(model.neighborhood.dictionary.values)
    np.testing.assert_allclose(
        found, np.concatenate([values, targets[:20]]), rtol=1e-3, atol=1e-4
    )


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"given together.*Received: `x` alone"):
        NeighborProjector(tmp_path, X)
    with pytest.raises(ValueError, match="Received: `y` alone"):
        NeighborProjector(tmp_path, y=Y)
    with pytest.raises(ValueError, match="`x` and `y` must have the same length"):
        NeighborProjector(tmp_path, X, Y[:3])
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)], name="plain")
    plain.compile(loss="mse")
    with pytest.raises(ValueError, match=r"a MetaNeighborhoodModel.*Sequential"):
        plain.fit(X, np.eye(3)[Y], verbose=0, callbacks=[NeighborProjector(tmp_path)])
    for projector, message in (
        (NeighborProjector(tmp_path, X, Y + 1), "`y` must hold classes 0 to 2"),
        (NeighborProjector(tmp_path, class_names="ab"), "`class_names` must hold 3"),
    ):
        with pytest.raises(ValueError, match=message):
            make_model().fit(X, Y, verbose=0, callbacks=[projector])
