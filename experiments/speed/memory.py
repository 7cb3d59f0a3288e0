"""Peak memory of one forward and backward pass, each case in a separate process.

Of networks of four such layers, that of a training step.

A case's figure is the largest resident memory of its second pass above that of the process
before the first, when layer and inputs are there and nothing is compiled. Figures of a few
tens of MiB are lower bounds: freed memory is used again. Linux only.
"""

from __future__ import annotations

import multiprocessing
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from experiments.speed import measure, neighborhoods, similarity

BATCH = 128
SIZE, CHANNELS = 32, 32
PARTS = ("core", "layer", "layer, in blocks")
#: Networks of four layers, and the layer of each.
NETWORKS = {
    "Conv2D, network": "Conv2D",
    "dynamic DNS, network": "dynamic DNS, layer",
    "dynamic UNS, network": "dynamic UNS, layer, in blocks",
}
OF_NETWORKS = 64
CASES = (
    *NETWORKS,
    "Conv2D",
    *(f"dynamic {name}, {part}" for name in ("DNS", "UNS") for part in PARTS),
    *neighborhoods.IN_MEMORY,
)


def rows(xla: bool) -> Iterator[dict[str, Any]]:
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            mebibytes = pool.apply(growth_in_second_call, (case, xla))
        convolution = f"{SIZE}x{SIZE}, {CHANNELS}->{CHANNELS}, B={BATCH}"
        sizes, step = convolution, "forward+backward"
        if case in neighborhoods.IN_MEMORY:
            sizes = neighborhoods.CASE
        elif case in NETWORKS:
            sizes, step = f"{SIZE}x{SIZE}, 4x{CHANNELS}, B={OF_NETWORKS}", "training step"
        yield {"case": f"{sizes}, {step}", "candidate": case, "mebibytes": mebibytes}


def step_of(case: str, xla: bool) -> measure.Step:
    """The pass to be measured, its inputs and weights made."""
    if case in NETWORKS:
        inputs = tf.random.normal((OF_NETWORKS, SIZE, SIZE, CHANNELS))
        return measure.training_step(network(NETWORKS[case]), inputs, xla)
    if case in neighborhoods.IN_MEMORY:
        inputs = tf.random.normal((neighborhoods.BATCH, neighborhoods.FEATURES))
        entries, steps, chunk = neighborhoods.IN_MEMORY[case]
        options = {"inner_steps": steps, "chunk_size": chunk}
        layer = neighborhoods.neighborhood_head(entries, **options)
    else:
        inputs = tf.random.normal((BATCH, SIZE, SIZE, CHANNELS))
        layer = similarity.layers_of(CHANNELS)[case]
    layer.build(tuple(inputs.shape))
    return measure.forward_backward(layer, inputs, xla)


def network(layer: str) -> keras.Model:
    convolutions = [similarity.layers_of(CHANNELS)[layer] for _ in range(4)]
    parts = [each for one in convolutions for each in (one, keras.layers.ReLU())]
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(similarity.CLASSES)]
    return keras.Sequential([keras.Input((SIZE, SIZE, CHANNELS)), *parts, *head])


def growth_in_second_call(case: str, xla: bool) -> float:
    """Mebibytes between the memory before the first call and the peak in the second."""
    tf.config.set_visible_devices([], "GPU")
    step = step_of(case, xla)
    before = _resident("VmRSS")
    step()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
    step()
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB$", status, flags=re.M)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no line for {name}: not on Linux?")
    return int(match[1]) / 1024
