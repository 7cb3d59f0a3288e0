"""A running server: what it answers, and what it refuses."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("mlserver")

from examples.common import data
from examples.serving import client

ROOT = pathlib.Path(__file__).parents[3]
MODEL = "digits_neighborhoods"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for version in ("1", "2"):
        shutil.copytree(ROOT / "saved_models" / MODEL / "1", folder / MODEL / version)
    return folder


@pytest.fixture(scope="module")
def server(models):
    with client.running_server(models) as running:
        yield running


@pytest.fixture(scope="module")
def served():
    return tf.saved_model.load(str(ROOT / "saved_models" / MODEL / "1"))


@pytest.fixture(scope="module")
def images():
    return data.load("digits").test.images[:64]


@pytest.fixture
def connection(server):
    with client.Connection(server.http_port) as opened:
        yield opened


def test_rest(connection, served, images):
    for size in (0, 1, 5, 64):
        status, body = connection.infer(MODEL, client.request(images[:size]))
        assert status == 200
        received = client.outputs_of(body)["output_0"]
        np.testing.assert_allclose(received, served.serve(images[:size]), rtol=1e-5)
    status, body = connection.infer(MODEL, client.request(images, signature="neighbors"))
    expected = served.signatures["neighbors"](inputs=images)
    for name, received in client.outputs_of(body).items():
        np.testing.assert_allclose(received, expected[name], rtol=1e-5)


def test_versions_health_and_metrics(server, connection, models, images):
    for version in ("1", "2"):
        path = f"/v2/models/{MODEL}/versions/{version}/infer"
        status, body = connection.post(path, client.request(images[:1]))
        assert (status, json.loads(body)["model_version"]) == (200, version)
    _, body = connection.infer(MODEL, client.request(images[:1]))
    assert json.loads(body)["model_version"] == "2"  # The newest.
    assert connection.get(f"/v2/models/{MODEL}/versions/3/ready")[0] == 404
    shutil.copytree(models / MODEL / "1", models / MODEL / "3")
    assert connection.post(f"/v2/repository/models/{MODEL}/load", b"{}")[0] == 200
    assert connection.get(f"/v2/models/{MODEL}/versions/3/ready")[0] == 200
    assert connection.get("/v2/health/live")[0] == 200
    metadata = json.loads(connection.get(f"/v2/models/{MODEL}")[1])
    assert metadata["inputs"][0]["name"] == "inputs"
    assert metadata["inputs"][0]["shape"] == [-1, 8, 8, 1]
    assert server.memory > 10


@pytest.mark.parametrize("kind", client.MALFORMED)
def test_malformed_requests_are_refused(connection, served, images, kind):
    status, body = connection.infer(MODEL, client.MALFORMED[kind](images[:2]))
    assert status in (400, 422) and body
    # It goes on.
    status, body = connection.infer(MODEL, client.request(images[:2]))
    received = client.outputs_of(body)["output_0"]
    np.testing.assert_allclose(received, served.serve(images[:2]), rtol=1e-5)


def test_grpc(server, served, images):
    import grpc
    from mlserver.grpc import dataplane_pb2, dataplane_pb2_grpc

    def ask(stub, shape, content):
        given = dataplane_pb2.ModelInferRequest.InferInputTensor(
            name="inputs", datatype="FP32", shape=shape
        )
        return stub.ModelInfer(
            dataplane_pb2.ModelInferRequest(
                model_name=MODEL, inputs=[given], raw_input_contents=[content]
            ),
            timeout=30,
        )

    with grpc.insecure_channel(f"{client.HOST}:{server.grpc_port}") as channel:
        stub = dataplane_pb2_grpc.GRPCInferenceServiceStub(channel)
        (content,) = ask(stub, images.shape, images.tobytes()).raw_output_contents
        received = np.frombuffer(content, "float32").reshape(len(images), -1)
        np.testing.assert_allclose(received, served.serve(images), rtol=1e-5)
        for bad in (images[0], images[:, 1:], np.full_like(images, np.nan)):
            with pytest.raises(grpc.RpcError) as error:
                ask(stub, bad.shape, bad.tobytes())
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert ask(stub, images.shape, images.tobytes()).outputs
