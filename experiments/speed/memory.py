"""Peak memory of one forward and backward pass, each case in a separate process.

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

import tensorflow as tf

from experiments.speed import measure, neighborhoods, similarity

BATCH = 128
SIZE, CHANNELS = 32, 32
PARTS = ("core", "layer", "layer, in blocks")
CASES = (
    "Conv2D",
    *(f"dynamic {name}, {part}" for name in ("DNS", "UNS") for part in PARTS),
    *neighborhoods.IN_MEMORY,
)


def rows(xla: bool) -> Iterator[dict[str, Any]]:
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            mebibytes = pool.apply(growth_in_second_call, (case, xla))
        convolution = f"{SIZE}x{SIZE}, {CHANNELS}->{CHANNELS}, B={BATCH}"
        sizes = neighborhoods.CASE if case in neighborhoods.IN_MEMORY else convolution
        yield {
            "case": f"{sizes}, forward+backward",
            "candidate": case,
            "mebibytes": mebibytes,
        }


def step_of(case: str, xla: bool) -> measure.Step:
    """The pass to be measured, its inputs and weights made."""
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
