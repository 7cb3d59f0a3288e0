"""Served models in engines other than Keras: the same numbers, without this package.

The models are those of saved_models/: folded, dynamic, Meta-Neighborhoods, and iFiLM.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import nsl_keras
from examples.common import data
from examples.serving import convert

ROOT = pathlib.Path(__file__).parents[3]
MODELS = {path.parent.name: path for path in sorted(ROOT.glob("saved_models/*/1"))}
BATCHES = (1, 5, 64)

pytestmark = pytest.mark.long
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture(scope="module")
def served():
    return {name: tf.saved_model.load(str(path)) for name, path in MODELS.items()}


def assert_agree(received, expected):
    np.testing.assert_allclose(received, expected, atol=1e-5 * np.abs(expected).max())


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    ).stdout


#: TensorFlow alone: the two packages cannot be imported.
BARE = """
import json, sys
sys.modules["keras"] = sys.modules["nsl_keras"] = None
import numpy as np, tensorflow as tf
images, answers = np.load(sys.argv[1]), {}
for path in sys.argv[2:]:
    serve = tf.saved_model.load(path).signatures["serving_default"]
    answers[path] = [
        serve(inputs=tf.constant(images[:size]))["output_0"].numpy().tolist()
        for size in (1, 5, 64)
    ]
print(json.dumps(answers))
"""


def test_bare_tensorflow(digits, served, tmp_path):
    np.save(tmp_path / "images.npy", digits.test.images[:64])
    output = run(sys.executable, "-c", BARE, tmp_path / "images.npy", *MODELS.values())
    answers = json.loads(output)
    for name, path in MODELS.items():
        for size, received in zip(BATCHES, answers[str(path)], strict=True):
            assert_agree(received, served[name].serve(digits.test.images[:size]))


@every_model
def test_saved_model_cli(name, digits, served, tmp_path):
    size = BATCHES[list(MODELS).index(name) % len(BATCHES)]
    np.save(tmp_path / "images.npy", digits.test.images[:size])
    run(
        *(pathlib.Path(sys.executable).with_name("saved_model_cli"), "run"),
        *("--dir", MODELS[name], "--tag_set", "serve"),
        *("--signature_def", "serving_default", "--outdir", tmp_path),
        *("--inputs", f"inputs={tmp_path / 'images.npy'}"),
    )
    received = np.load(tmp_path / "output_0.npy")
    assert_agree(received, served[name].serve(digits.test.images[:size]))


#: TensorFlow's C API, by the library alone: Python's TensorFlow is not imported.
C_API = """
import ctypes, importlib.util, json, pathlib, sys
import numpy as np
folder = pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent
ctypes.CDLL(str(next(folder.glob("libtensorflow_framework.so*"))), ctypes.RTLD_GLOBAL)
tf = ctypes.CDLL(str(next(folder.glob("libtensorflow_cc.so*"))))
P, I, S = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
for name in ("NewStatus", "NewGraph", "NewSessionOptions", "LoadSessionFromSavedModel",
             "GraphOperationByName", "AllocateTensor", "TensorData"):
    getattr(tf, "TF_" + name).restype = P
tf.TF_GetCode.argtypes, tf.TF_Message.argtypes = [P], [P]
tf.TF_Message.restype = ctypes.c_char_p
tf.TF_TensorByteSize.restype, tf.TF_TensorByteSize.argtypes = S, [P]
tf.TF_TensorData.argtypes = [P]
tf.TF_AllocateTensor.argtypes = [I, P, I, S]
tf.TF_GraphOperationByName.argtypes = [P, ctypes.c_char_p]
tf.TF_LoadSessionFromSavedModel.argtypes = [P, P, ctypes.c_char_p, P, I, P, P, P]
tf.TF_SessionRun.argtypes = [P, P, P, P, I, P, P, I, P, I, P, P]

class Output(ctypes.Structure):
    _fields_ = [("operation", P), ("index", I)]

status = tf.TF_NewStatus()
def check():
    if tf.TF_GetCode(status):
        raise SystemExit(tf.TF_Message(status).decode())

images, answers = np.load(sys.argv[1]), {}
for path, source, target, index in json.loads(sys.argv[2]):
    graph = tf.TF_NewGraph()
    tags = (ctypes.c_char_p * 1)(b"serve")
    session = tf.TF_LoadSessionFromSavedModel(
        tf.TF_NewSessionOptions(), None, path.encode(), tags, 1, graph, None, status)
    check()
    inputs = Output(tf.TF_GraphOperationByName(graph, source.encode()), 0)
    outputs = Output(tf.TF_GraphOperationByName(graph, target.encode()), index)
    def serve(batch):
        shape = (ctypes.c_int64 * batch.ndim)(*batch.shape)
        tensor = tf.TF_AllocateTensor(1, shape, batch.ndim, batch.nbytes)
        ctypes.memmove(tf.TF_TensorData(tensor), batch.ctypes.data, batch.nbytes)
        given, found = (P * 1)(tensor), (P * 1)()
        tf.TF_SessionRun(session, None, ctypes.byref(inputs), given, 1,
                         ctypes.byref(outputs), found, 1, None, 0, None, status)
        check()
        size = tf.TF_TensorByteSize(found[0])
        answer = ctypes.string_at(tf.TF_TensorData(found[0]), size)
        return np.frombuffer(answer, "float32").reshape(len(batch), -1).tolist()
    answers[path] = [serve(np.ascontiguousarray(images[:size])) for size in (1, 5, 64)]
    try:
        serve(np.zeros((8, 8, 1), "float32"))
    except SystemExit as error:
        assert "is not compatible with expected shape" in str(error), error
    else:
        raise SystemExit("An input of another rank was answered.")
assert "tensorflow" not in sys.modules
print(json.dumps(answers))
"""


def test_c_api(digits, served, tmp_path):
    np.save(tmp_path / "images.npy", digits.test.images[:64])
    calls = []
    for path in MODELS.values():
        with tf.compat.v1.Session(graph=tf.Graph()) as session:
            graph = tf.compat.v1.saved_model.load(session, ["serve"], str(path))
        signature = graph.signature_def["serving_default"]
        source = signature.inputs["inputs"].name.partition(":")[0]
        target, _, index = signature.outputs["output_0"].name.partition(":")
        calls.append([str(path), source, target, int(index)])
    output = run(sys.executable, "-c", C_API, tmp_path / "images.npy", json.dumps(calls))
    answers = json.loads(output)
    for name, path in MODELS.items():
        for size, received in zip(BATCHES, answers[str(path)], strict=True):
            assert_agree(received, served[name].serve(digits.test.images[:size]))


def interpret(content, images):
    """What LiteRT's own runtime answers."""
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    interpreter = litert.Interpreter(model_content=content)
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
    bad = images[:3].copy()
    bad[1, 0] = np.nan
    assert np.isnan(interpret(content, bad)).all(axis=1).tolist() == [False, True, False]

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


@pytest.mark.parametrize("options", [{"inner_steps": 2}, {"inner_loop": "tape"}])
def test_what_onnx_cannot_hold_is_refused(options, tmp_path):
    model = nsl_keras.MetaNeighborhoodModel(
        None, keras.layers.Dense(3), dictionary=6, **options
    )
    model.build((None, 4))
    with pytest.raises(ValueError, match=r'`format` must not be "onnx".*Flex'):
        model.export(tmp_path / "model.onnx", format="onnx")
    assert not list(tmp_path.iterdir())
    pytest.importorskip("tf2onnx")
    path = nsl_keras.export.save_model(model, tmp_path)
    with pytest.raises(ValueError, match="ONNX has no operations for its gradients"):
        convert.to_onnx(path)


@every_model
def test_messages_of_tensorflow_serving(name, digits, served):
    """What the guide says of a server that is not at hand: the messages fit."""
    pytest.importorskip("tensorflow_serving")
    from tensorflow_serving.apis import predict_pb2

    images = digits.test.images[:5]
    sent = predict_pb2.PredictRequest()
    sent.model_spec.name = name
    sent.model_spec.signature_name = "serving_default"
    sent.inputs["inputs"].CopyFrom(tf.make_tensor_proto(images))
    received = predict_pb2.PredictRequest.FromString(sent.SerializeToString())
    serve = served[name].signatures[received.model_spec.signature_name]
    outputs = serve(
        **{key: tf.constant(tf.make_ndarray(each)) for key, each in received.inputs.items()}
    )
    answer = predict_pb2.PredictResponse()
    for key, each in outputs.items():
        answer.outputs[key].CopyFrom(tf.make_tensor_proto(each.numpy()))
    logits = tf.make_ndarray(answer.outputs["output_0"])
    assert_agree(logits, served[name].serve(images))
