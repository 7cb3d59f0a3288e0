"""Peak memory of one forward and backward pass, each case in a separate process.

A case's figure is the largest resident memory of its second pass above that of the process
before the first, when layer and inputs are there and nothing is compiled. Figures of a few
tens of MiB are lower bounds: freed memory is used again. Linux only.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import flags

from experiments.common import command
from experiments.speed import measure, neighborhoods, similarity

BATCH = 128
SIZE, CHANNELS = 32, 32
PARTS = ("core", "layer", "layer, in blocks")
CASES = (
    "Conv2D",
    *(f"dynamic {name}, {part}" for name in ("DNS", "UNS") for part in PARTS),
    *neighborhoods.IN_MEMORY,
)

FLAGS = flags.FLAGS


def rows(xla: bool) -> Iterator[dict[str, Any]]:
    for case in CASES:
        command = [sys.executable, "-m", "experiments.speed.memory", f"--case={case}"]
        command.append("--xla" if xla else "--noxla")
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        convolution = f"{SIZE}x{SIZE}, {CHANNELS}->{CHANNELS}, B={BATCH}"
        sizes = neighborhoods.CASE if case in neighborhoods.IN_MEMORY else convolution
        yield {
            "case": f"{sizes}, forward+backward",
            "candidate": case,
            "mebibytes": float(answer.stdout),
        }


def step_of(case: str, xla: bool) -> Callable[[], float]:
    """The pass to be measured, its inputs and weights made."""
    if case in neighborhoods.IN_MEMORY:
        return neighborhoods.pass_in_memory(case, xla)
    inputs = tf.random.normal((BATCH, SIZE, SIZE, CHANNELS))
    if case == "Conv2D":
        layer = keras.layers.Conv2D(CHANNELS, similarity.KERNEL_SIZE, padding="same")
    else:
        layer = similarity.similarity_layers(CHANNELS)[case]
    layer.build(inputs.shape)
    return measure.forward_backward(layer, inputs, xla)


def growth_in_second_call(step: Callable[[], float]) -> float:
    """Mebibytes between the memory before the first call and the peak in the second."""
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


def main(_arguments: list[str]) -> None:
    tf.config.set_visible_devices([], "GPU")
    print(growth_in_second_call(step_of(FLAGS.case, FLAGS.xla)))


if __name__ == "__main__":
    flags.DEFINE_enum("case", CASES[0], list(CASES), "What to measure.")
    flags.DEFINE_boolean("xla", False, "Whether to compile with XLA.")
    command.run(main)
