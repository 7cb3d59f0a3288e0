"""Served models answer without Keras and this package, in every engine, alike.

The models are those of saved_models/: folded, dynamic, Meta-Neighborhoods, and iFiLM.
"""

import json
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, run_python

from examples.serving import client, convert
from experiments.common import data, runs
from experiments.serving import load, train_models

MODELS = {path.parent.name: path for path in sorted(ROOT.glob("saved_models/*/1"))}
SERVER_MODEL = "digits_neighborhoods"
BATCHES = (1, 5, 64)
GUIDE = (ROOT / "docs" / "guides" / "serving.md").read_text()
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture(scope="module")
def served():
    return {name: tf.saved_model.load(str(path)) for name, path in MODELS.items()}


def assert_agree(received, expected):
    np.testing.assert_allclose(received, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", train_models.SERVED)
def test_recorded_predictions_and_cards(name, digits, served):
    folder = ROOT / "saved_models" / f"digits_{name}"
    files = list((folder / "1").rglob("*"))
    assert sum(file.stat().st_size for file in files) <= 2**20
    serve, test = served[folder.name].serve, digits.test
    recorded = json.loads((folder / "predictions.json").read_text())
    expected = np.array(recorded["logits"])
    received = serve(test.images[: recorded["test_images"]])
    np.testing.assert_allclose(received, expected, atol=1e-4 * np.abs(expected).max())
    found = runs.read(ROOT / "results" / "saved_models.jsonl")
    record = next(each for each in found if each["method"] == name)
    correct = np.mean(np.argmax(serve(test.images), axis=1) == test.labels)
    assert abs(correct - record["test_accuracy"]) <= 1 / len(test.labels)
    card = (folder / "README.md").read_text()
    assert f"{100 * record['test_accuracy']:.2f} %" in card and record["command"] in card


SERVE_ALL = """
import sys
from examples.serving import __main__ as served  # Blocks the two packages.
for folder, predictions in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
    served.main(folder, sys.argv[1], predictions)
"""


def test_tensorflow_alone(digits, served, tmp_path):
    images = digits.test.images[:100]
    np.save(tmp_path / "images.npy", images)
    files = {name: tmp_path / f"{name}.npy" for name in MODELS}
    pairs = (each for name in MODELS for each in (MODELS[name], files[name]))
    run_python("-c", SERVE_ALL, tmp_path / "images.npy", *pairs)
    for name, file in files.items():
        assert_agree(np.load(file), served[name].serve(images))


def interpret(content, images):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    (given,) = interpreter.get_input_details()
    interpreter.resize_tensor_input(given["index"], images.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], images)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


@every_model
def test_litert(name, digits, served):
    pytest.importorskip("ai_edge_litert")
    images, labels = digits.test.images, digits.test.labels
    content = convert.to_litert(MODELS[name])
    for size in BATCHES:
        received = interpret(content, images[:size])
        assert_agree(received, served[name].serve(images[:size]))
    small = convert.to_litert(MODELS[name], digits.train.images[:200])
    assert len(small) < len(content) / 2
    accuracies = [
        np.mean(np.argmax(logits, axis=1) == labels)
        for logits in (interpret(small, images), served[name].serve(images))
    ]
    assert abs(accuracies[0] - accuracies[1]) <= 0.01


@every_model
def test_onnx_runtime(name, digits, served):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    session = onnxruntime.InferenceSession(convert.to_onnx(MODELS[name]))
    (given,) = session.get_inputs()
    for size in BATCHES:
        (received,) = session.run(None, {given.name: digits.test.images[:size]})
        assert_agree(received, served[name].serve(digits.test.images[:size]))


# A server of MLServer.


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("mlserver")
    folder = tmp_path_factory.mktemp("saved_models")
    for name, path in MODELS.items():
        shutil.copytree(path, folder / name / "1")
    shutil.copytree(MODELS[SERVER_MODEL], folder / SERVER_MODEL / "2")
    with client.running_server(folder) as running:
        yield running


@pytest.fixture
def connection(server):
    with client.Connection(server.http_port) as opened:
        yield opened


def test_rest(connection, served, digits):
    serve = served[SERVER_MODEL]
    for size in (0, *BATCHES):
        images = digits.test.images[:size]
        status, body = connection.infer(SERVER_MODEL, client.request(images))
        assert status == 200
        received = client.outputs_of(body)["output_0"]
        np.testing.assert_allclose(received, serve.serve(images), rtol=1e-4, atol=1e-4)
    request = client.request(digits.test.images[:64], signature="neighbors")
    _, body = connection.infer(SERVER_MODEL, request)
    expected = serve.signatures["neighbors"](inputs=digits.test.images[:64])
    for name, received in client.outputs_of(body).items():
        np.testing.assert_allclose(received, expected[name], rtol=1e-5)


def test_malformed_requests_are_refused(connection, served, digits):
    images = digits.test.images[:2]
    for malformed in client.MALFORMED.values():
        status, body = connection.infer(SERVER_MODEL, malformed(images))
        assert status in (400, 422) and body
    status, body = connection.infer(SERVER_MODEL, client.request(images))  # It goes on.
    received = client.outputs_of(body)["output_0"]
    assert_agree(received, served[SERVER_MODEL].serve(images))


def test_load(server, digits):
    images = digits.test.images
    found = load.requests_at_random(server, images, 100, seed=0)
    assert found["good"] == found["equal"] > 60
    assert found["malformed"] == found["refused"] > 0
    assert min(found["memory"]) > 50
    median, slow = load.latency(server, client.request(images[:1]), 10)
    assert 0 < median <= slow
    assert load.images_per_second(server, images[:64], "unadapted", seconds=0.2) > 0


# The guide to serving.


def test_the_code_of_the_guide_runs(server, tmp_path):
    for package in ("ai_edge_litert", "onnxruntime", "tf2onnx"):
        pytest.importorskip(package)
    (tmp_path / "saved_models").symlink_to(ROOT / "saved_models")
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.S))
    code = f"import os; os.chdir({str(tmp_path)!r})\n{code}"
    printed = run_python("-c", code.replace(":8080", f":{server.http_port}"))
    assert printed.splitlines() == [
        "(5, 10) (5, 5)",
        "['classes', 'entries', 'values', 'weights']",
        "(5, 10)",
        "(5, 10)",
    ]
