"""The workers of a `TF_CONFIG`: read, checked, and waited for within a time limit.

TensorFlow waits for the workers of a cluster without a limit, in a call that no signal
but SIGKILL ends. So workers look for one another here, before it starts.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any, NamedTuple


class Cluster(NamedTuple):
    """The addresses of all workers, and which of them this process is."""

    workers: list[str]
    own: int


def read() -> Cluster:
    """Returns the cluster that the environment variable `TF_CONFIG` describes.

    Raises:
        ValueError: If it is missing, is no JSON, or describes no cluster of workers.
    """
    text = os.environ.get("TF_CONFIG", "")
    try:
        found = json.loads(text)
        jobs, task = found["cluster"], found["task"]
        workers, index = list(jobs["worker"]), task["index"]
        _require(set(jobs) == {"worker"} and task["type"] == "worker")
        _require(type(index) is int and 0 <= index < len(workers))
        _require(len(set(workers)) == len(workers))
        for worker in workers:
            _host_and_port(worker)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "The environment variable `TF_CONFIG` must hold the addresses of all workers, "
            "each once, and which of them this is, as "
            '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
            '"task": {"type": "worker", "index": 0}}. '
            f"Received: TF_CONFIG={text!r}"
        ) from error
    return Cluster(workers, index)


def _require(condition: Any) -> None:
    if not condition:
        raise ValueError


def _host_and_port(worker: str) -> tuple[str, int]:
    host, _, port = worker.rpartition(":")
    _require(host and port.isdigit() and 0 < int(port) < 2**16)
    return host, int(port)


def wait_for_workers(cluster: Cluster, seconds: float) -> None:
    """Waits until every worker was there.

    Args:
        cluster: The workers.
        seconds: How long to wait.

    Raises:
        RuntimeError: If the port of this worker is taken.
        TimeoutError: If workers are missing when the time is over.
    """
    own = cluster.workers[cluster.own]
    deadline = time.monotonic() + seconds
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", _host_and_port(own)[1]))
        except OSError as error:
            raise RuntimeError(
                f"The port of worker {cluster.own}, {own}, must be free: {error}. "
                "Another process, perhaps of an earlier run, holds it."
            ) from error
        listener.listen()
        listener.settimeout(0.1)
        missing = set(range(len(cluster.workers))) - {cluster.own}
        while missing := missing - {_greeted_by(listener)}:
            # One greeting is enough for both: who has met all is here no longer.
            missing = {each for each in missing if not _greet(cluster, each)}
            if missing and time.monotonic() > deadline:
                absent = ", ".join(cluster.workers[each] for each in sorted(missing))
                raise TimeoutError(
                    f"Workers must all start within {seconds:g} seconds. Received: none at "
                    f"{absent}, of the {len(cluster.workers)} in TF_CONFIG"
                )


def _greet(cluster: Cluster, other: int) -> bool:
    """Tells another worker that this one is there; returns whether it listens."""
    address = _host_and_port(cluster.workers[other])
    try:
        with socket.create_connection(address, timeout=1) as connection:
            connection.sendall(b"%d" % cluster.own)
            return True
    except OSError:
        return False


def _greeted_by(listener: socket.socket) -> int | None:
    """Returns the number of a worker that greets, if one does."""
    try:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(1)
            return int(connection.recv(16))
    except (OSError, ValueError):
        return None
