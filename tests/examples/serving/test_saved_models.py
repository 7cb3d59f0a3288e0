"""What is in saved_models/ answers as it did when it was trained."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from examples.common import data
from examples.serving import train_models

ROOT = pathlib.Path(__file__).parents[3]


def test_one_model_of_each_kind():
    found = {path.name for path in (ROOT / "saved_models").iterdir()}
    assert found == {f"digits_{name}" for name in train_models.SERVED}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "static" else pytest.mark.long)
        for name in train_models.SERVED
    ],
)
def test_recorded_predictions_and_cards(name):
    folder = train_models.folder_of(ROOT, name)
    files = list((folder / "1").rglob("*"))
    assert sum(file.stat().st_size for file in files) <= 2**20
    served = tf.saved_model.load(str(folder / "1"))
    test = data.load("digits").test
    recorded = json.loads((folder / "predictions.json").read_text())
    expected = np.array(recorded["logits"])
    received = served.serve(test.images[: recorded["test_images"]])
    np.testing.assert_allclose(received, expected, atol=1e-4 * np.abs(expected).max())

    record = json.loads((ROOT / f"results/saved_models/{name}.json").read_text())
    correct = np.mean(np.argmax(served.serve(test.images), axis=1) == test.labels)
    assert abs(correct - record["test_accuracy"]) <= 1 / len(test.labels)
    card = (folder / "README.md").read_text()
    assert f"{100 * record['test_accuracy']:.2f} %" in card
    assert record["command"] in card
