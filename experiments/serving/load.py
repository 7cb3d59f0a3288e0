"""Requests to a server on this machine, a tenth of them malformed.

    python -m experiments.serving.load --output_dir=.

Good ones must get what the model predicts, malformed ones status 400 or 422. Measures the
server's memory, latency at batch 1, and images a second. Writes results/serving.jsonl below
--output_dir. The extra `serving` has what it needs.
"""

import concurrent.futures
import os
import pathlib
import random
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from examples.serving import client
from experiments.common import command, data, runs, tables

FLAGS = flags.FLAGS
MODEL = pathlib.Path(__file__).parents[2] / "saved_models" / "digits_neighborhoods" / "1"
PLACE = "serving.jsonl"
NAME = MODEL.parent.name
#: Signatures of a prediction with adaptation and without.
SIGNATURES = {"adapted": "serving_default", "plain": "unadapted"}
CONNECTIONS = 4
#: What is counted: the requests that were answered as they should be, and all of a kind.
COUNTED = {
    "good requests that got what the model predicts": ("equal", "good"),
    "malformed ones that got status 400 or 422": ("refused", "malformed"),
}


def requests_at_random(
    server: client.Server, images: np.ndarray, count: int, seed: int
) -> dict[str, Any]:
    """Sends good and malformed requests, and counts what comes back."""
    import tensorflow as tf

    chosen = random.Random(seed)
    model = tf.saved_model.load(str(MODEL))
    predicted = model.serve(images).numpy()
    found = {"good": 0, "equal": 0, "malformed": 0, "refused": 0}
    before = server.memory
    with client.Connection(server.http_port) as connection:
        for _ in range(count):
            first, size = chosen.randrange(len(images) - 16), chosen.choice((1, 2, 5, 16))
            part = slice(first, first + size)
            if chosen.random() < 0.1:
                malformed = chosen.choice(list(client.MALFORMED.values()))
                status, _ = connection.infer(NAME, malformed(images[part]))
                found["malformed"] += 1
                found["refused"] += status in (400, 422)
            else:
                status, body = connection.infer(NAME, client.request(images[part]))
                received = client.outputs_of(body)["output_0"] if status == 200 else np.nan
                difference = np.max(np.abs(received - predicted[part]))
                found["good"] += 1
                found["equal"] += bool(difference <= 1e-5 * np.abs(predicted).max())
    return {**found, "memory": [round(each, 2) for each in (before, server.memory)]}


def answered(connection: client.Connection, body: bytes) -> None:
    """Sends a good request; raises if it is not answered."""
    status, text = connection.infer(NAME, body)
    if status != 200:
        raise RuntimeError(f"Status {status}: {text!r}")


def latency(server: client.Server, body: bytes, count: int) -> list[float]:
    """Milliseconds of requests one after the other: the median, and the 99th percentile."""
    seconds = []
    with client.Connection(server.http_port) as connection:
        for _ in range(count):
            start = time.perf_counter()
            answered(connection, body)
            seconds.append(time.perf_counter() - start)
    return [round(1000 * float(np.percentile(seconds, share)), 3) for share in (50, 99)]


def images_per_second(
    server: client.Server, images: np.ndarray, signature: str, seconds: float
) -> float:
    """At saturation, from several connections at once."""
    body, start = client.request(images, signature=signature), time.perf_counter()

    def send(_: int) -> int:
        done = 0
        with client.Connection(server.http_port) as connection:
            while time.perf_counter() < start + seconds:
                answered(connection, body)
                done += len(images)
        return done

    with concurrent.futures.ThreadPoolExecutor(CONNECTIONS) as pool:
        sent = sum(pool.map(send, range(CONNECTIONS)))
    return round(sent / (time.perf_counter() - start), 1)


def section(results: pathlib.Path) -> str:
    (found,) = runs.read(results / PLACE)
    count = "{:,} of {:,}".format
    rows = {what: count(*(found[key] for key in keys)) for what, keys in COUNTED.items()}
    rows["server's memory, MiB, before and after"] = "{}, {}".format(*found["memory"])
    for name in SIGNATURES:
        latencies = ", ".join(f"{each:.2f}" for each in found["latency"][name])
        rows[f"1 image, {name}, ms: median and 99th percentile"] = latencies
        rows[f"images a second in batches of 64, {name}"] = f"{found['speed'][name]:,.0f}"
    how = f"{tables.commands([found])}, {found['cores']} cores, shared with the client."
    return f"{how}\n\n{tables.markdown(['what', 'found'], rows.items())}"


def main(_arguments: list[str]) -> None:
    images = data.load("digits").test.images
    with client.running_server(MODEL.parents[1]) as server:
        requests_at_random(server, images, 1000, seed=1)  # To warm up.
        record = {
            **runs.about("serving.load"),
            "cores": os.cpu_count(),
            **requests_at_random(server, images, FLAGS.requests, seed=0),
            "latency": {
                name: latency(server, client.request(images[:1], each), FLAGS.requests // 5)
                for name, each in SIGNATURES.items()
            },
            "speed": {
                name: images_per_second(server, images[:64], each, seconds=10)
                for name, each in SIGNATURES.items()
            },
        }
    results = runs.results_folder(FLAGS.output_dir)
    runs.RunRecords(results / PLACE).add(("load",), record)
    print(section(results))
    sys.exit(any(record[one] != record[other] for one, other in COUNTED.values()))


if __name__ == "__main__":
    flags.DEFINE_integer("requests", 10000, "Requests that are measured.", 100)
    command.run(main)
