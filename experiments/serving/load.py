"""Ten thousand requests to a server on this machine, a tenth of them malformed.

    python -m experiments.serving.load --output_dir=.

Every request must be answered: good ones with what the model predicts, malformed ones with
status 400 or 422. Measures the server's memory in the first and the last tenth, after 1,000
requests to warm up; latency at batch 1; and examples a second at saturation, adapted and
unadapted. All on 127.0.0.1. Writes a line of results/serving.jsonl.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags

from examples.serving import client
from experiments.common import data, runs

FLAGS = flags.FLAGS
MODEL = "digits_neighborhoods"
#: Signatures of a prediction with adaptation and without.
SIGNATURES = {"adapted": "serving_default", "plain": "unadapted"}
SIZES = (1, 2, 5, 16)
WARM_UP = 1000
REFUSED = (400, 422)


def requests_at_random(
    server: client.Server, images: np.ndarray, count: int, seed: int
) -> dict:
    """Sends good and malformed requests, and counts what comes back."""
    chosen = random.Random(seed)
    model = tf.saved_model.load(str(pathlib.Path(FLAGS.models) / MODEL / "1"))
    predicted = model.serve(images).numpy()
    tolerance = 1e-5 * np.abs(predicted).max()
    counts: collections.Counter = collections.Counter()
    answers: collections.Counter = collections.Counter()
    memory = []
    largest = 0.0
    with client.Connection(server.http_port) as connection:
        for number in range(count):
            if number % (count // 100) == 0:
                memory.append(server.memory)
            size = chosen.choice(SIZES)
            first = chosen.randrange(len(images) - size)
            batch = images[first : first + size]
            if chosen.random() < 0.1:
                kind = chosen.choice(list(client.MALFORMED))
                status, _ = connection.infer(MODEL, client.MALFORMED[kind](batch))
                counts["malformed"] += 1
                answers[f"{kind}: {status}"] += 1
                counts["malformed_refused"] += status in REFUSED
                continue
            status, body = connection.infer(MODEL, client.request(batch))
            counts["good"] += 1
            received = client.outputs_of(body)["output_0"] if status == 200 else np.nan
            difference = np.max(np.abs(received - predicted[first : first + size]))
            counts["good_equal_to_the_model"] += bool(difference <= tolerance)
            largest = max(largest, float(difference))
    tenth = len(memory) // 10
    first_tenth, last_tenth = np.mean(memory[:tenth]), np.mean(memory[-tenth:])
    return {
        "requests": count,
        "answered": sum(answers.values()) + counts["good"],
        **counts,
        "largest_difference": largest,
        "statuses_of_malformed": dict(sorted(answers.items())),
        "memory_mib_first_tenth": round(float(first_tenth), 2),
        "memory_mib_last_tenth": round(float(last_tenth), 2),
        "memory_growth_percent": round(100 * float(last_tenth / first_tenth - 1), 3),
    }


def latencies(server: client.Server, images: np.ndarray, count: int) -> dict:
    """Milliseconds of requests of one image, one after the other; signatures in turn."""
    bodies = {
        name: client.request(images[:1], signature=signature)
        for name, signature in SIGNATURES.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    with client.Connection(server.http_port) as connection:
        for _ in range(count):
            for name, body in bodies.items():
                start = time.perf_counter()
                connection.infer(MODEL, body)
                seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            f"p{share}_ms": round(1000 * float(np.percentile(each, share)), 3)
            for share in (50, 99)
        }
        for name, each in seconds.items()
    }


def throughputs(server: client.Server, images: np.ndarray, seconds: float) -> dict:
    """Images a second in requests of 64, from several connections at once."""

    def send(body: bytes, end: float) -> int:
        done = 0
        with client.Connection(server.http_port) as connection:
            while time.perf_counter() < end:
                connection.infer(MODEL, body)
                done += len(images)
        return done

    found = {}
    with concurrent.futures.ThreadPoolExecutor(FLAGS.connections) as pool:
        for name, signature in SIGNATURES.items():
            body = client.request(images, signature=signature)
            start = time.perf_counter()
            sent = [
                pool.submit(send, body, start + seconds) for _ in range(FLAGS.connections)
            ]
            total = sum(each.result() for each in sent)
            found[name] = round(total / (time.perf_counter() - start), 1)
    return found


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    images = data.load("digits").test.images
    start = time.perf_counter()
    with client.running_server(FLAGS.models) as server:
        requests_at_random(server, images, WARM_UP, seed=1)
        record = {
            "command": runs.command("serving.load"),
            "versions": runs.versions(),
            "cores": os.cpu_count(),
            "server": "MLServer, one process, client on the same machine",
            "model": MODEL,
            **requests_at_random(server, images, FLAGS.requests, seed=0),
            "latency_at_batch_1": latencies(server, images, FLAGS.requests // 10),
            "images_a_second_in_batches_of_64": throughputs(
                server, images[:64], FLAGS.seconds
            ),
            "connections": FLAGS.connections,
        }
    record["seconds"] = round(time.perf_counter() - start, 1)
    path = runs.results_folder(FLAGS.output_dir) / "serving.jsonl"
    runs.RunRecords(path).add(("load",), record)
    print(json.dumps(record, indent=1))
    held = (
        record["answered"] == record["requests"]
        and record["good_equal_to_the_model"] == record["good"]
        and record["malformed_refused"] == record["malformed"]
        and abs(record["memory_growth_percent"]) <= 2
    )
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    flags.DEFINE_integer("requests", 10000, "Requests after the first 1,000.", 100, 10**5)
    flags.DEFINE_float("seconds", 10, "Seconds of saturation, each signature.", 1, 60)
    flags.DEFINE_integer("connections", 4, "Connections at saturation.", 1, 16)
    flags.DEFINE_string("models", "saved_models", "Folder of the models.")
    flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
    app.run(main)
