"""Requests to a server of the Open Inference Protocol on this machine, good and bad."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

HOST = "127.0.0.1"
ROOT = pathlib.Path(__file__).parents[2]


class Server:
    """A running server, with its ports of REST, gRPC and metrics."""

    def __init__(self, ports: list[int], process: subprocess.Popen) -> None:
        self.http_port, _, self.metrics_port = ports
        self.process = process

    @property
    def memory(self) -> float:
        """Resident memory in MiB, from the server's metrics."""
        with Connection(self.metrics_port) as connection:
            _, body = connection.get("/metrics")
        (line,) = (
            each
            for each in body.decode().splitlines()
            if each.startswith("process_resident_memory_bytes ")
        )
        return float(line.split()[1]) / 2**20


@contextlib.contextmanager
def running_server(folder: str | pathlib.Path, seconds: float = 120) -> Iterator[Server]:
    """Starts a server of a folder of models on free ports, and ends it."""
    with contextlib.ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(3)]
        for each in found:
            each.bind((HOST, 0))
        ports = [each.getsockname()[1] for each in found]
    names = ("http_port", "grpc_port", "metrics_port")
    flags = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    command = [sys.executable, "-m", "examples.serving.server", str(folder), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        server = Server(ports, process)
        try:
            end = time.monotonic() + seconds
            while not _is_ready(server):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(log.read().decode()[-3000:])
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            process.wait(30)


def _is_ready(server: Server) -> bool:
    try:
        with Connection(server.http_port) as connection:
            return connection.get("/v2/health/ready")[0] == 200
    except OSError:
        return False


class Connection:
    """A connection to a port that stays open until it is left."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=60)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def get(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        return response.status, response.read()

    def infer(self, model: str, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()


def request(
    images: np.ndarray, signature: str = "serving_default", **changes: Any
) -> bytes:
    """A request for images; `changes` are to the description of the input."""
    given = {
        "name": "inputs",
        "shape": list(images.shape),
        "datatype": "FP32",
        # As numbers of the type they have, which JSON then holds exactly.
        "data": images.astype("float64").ravel().tolist(),
        **changes,
    }
    return json.dumps({"parameters": {"signature": signature}, "inputs": [given]}).encode()


def outputs_of(body: bytes) -> dict[str, np.ndarray]:
    """The outputs of an answer, by name."""
    return {
        each["name"]: np.array(each["data"]).reshape(each["shape"])
        for each in json.loads(body)["outputs"]
    }


#: Malformed requests by what is wrong with them, made from good images.
MALFORMED: dict[str, Callable[[np.ndarray], bytes]] = {
    "rank": lambda images: request(images[0]),
    "size": lambda images: request(images[:, 1:]),
    "fewer numbers": lambda images: request(images[1:], shape=list(images.shape)),
    "negative size": lambda images: request(images, shape=[-1, *images.shape[1:]]),
    "type": lambda images: request(images, datatype="INT32"),
    "strings": lambda images: request(images, data=["one"] * images.size),
    "not JSON": lambda images: request(images)[:-9],
    "NaN": lambda images: request(np.full_like(images, np.nan)),
    "null": lambda images: request(images, data=[None] * images.size),
    "overflow": lambda images: request(images, data=[1e300] * images.size),
    "empty": lambda images: b"",
    "no input": lambda images: b'{"inputs": []}',
    "other input": lambda images: request(images, name="others"),
    "no signature": lambda images: request(images, signature="none"),
    "huge": lambda images: request(np.repeat(images[:1], 1500, axis=0)),
    "huge size": lambda images: request(images, shape=[10**15, *images.shape[1:]]),
}
