"""Time and peak memory of layers and networks, as multiples of the plain one's.

The memory of a candidate is the largest resident memory of its second call above that of
the process before the first, when inputs and weights are there and nothing is traced, in a
process of its own. Linux only.
"""

import ctypes
import functools
import itertools
import multiprocessing
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from experiments.common import rivals
from experiments.speed import measure, neighborhoods
from experiments.text import __main__ as text
from nsl_keras.layers import NeuralSimilarityConv2D, SphereConv2D
from nsl_keras.predictors import SimilarityPredictor

BATCH, CLASSES = 64, 10
UNCONSTRAINED = functools.partial(NeuralSimilarityConv2D, similarity="unconstrained")
#: What stands in place of a convolution.
LAYERS: dict[str, Callable[..., keras.layers.Layer]] = {
    "Conv2D": keras.layers.Conv2D,
    "static unconstrained similarity": UNCONSTRAINED,
    "dynamic diagonal similarity": functools.partial(
        NeuralSimilarityConv2D, predictor="sphere"
    ),
    "dynamic unconstrained similarity": functools.partial(
        UNCONSTRAINED, predictor="sphere"
    ),
    "dynamic unconstrained similarity, `downsampling=1`": functools.partial(
        UNCONSTRAINED, predictor=SimilarityPredictor(downsampling=1)
    ),
    "`SphereConv2D`, inputs normalized": functools.partial(SphereConv2D, normalize="input"),
    "squeeze-excite": rivals.SqueezeExciteConv2D,
    "CondConv of four kernels": rivals.ConditionalConv2D,
}


def of_layer(size: int, channels: int, xla: bool) -> Iterator[measure.Comparison]:
    layers = {name: make(channels, 3, padding="same") for name, make in LAYERS.items()}
    images = tf.random.normal((BATCH, size, size, channels))
    case, names = f"one layer of {channels} filters at {size}x{size}", measure.OF_MODELS
    return measure.passes(case, layers, images, xla, tuple(names))


def of_network(xla: bool) -> Iterator[measure.Comparison]:
    def network(make: Callable[..., keras.layers.Layer]) -> keras.Model:
        layers = [make(32, 3, padding="same", activation="relu") for _ in range(4)]
        head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)]
        return keras.Sequential([keras.Input((32, 32, 32)), *layers, *head])

    networks = {name: network(make) for name, make in LAYERS.items()}
    images = tf.random.normal((BATCH, 32, 32, 32))
    for name, step in measure.OF_MODELS.items():
        case = f"four layers of 32 filters at 32x32, {name}"
        yield measure.compared(case, networks, step, images, xla)


def of_transformer(xla: bool) -> Iterator[measure.Comparison]:
    """Yields what adapts a BERT of MiniLM-L6's size, with random weights."""
    import keras_hub

    def adapted(method: str) -> keras.Model:
        backbone = keras_hub.models.BertBackbone(
            30_522, 6, 12, 384, 1536, dropout=0.0, max_sequence_length=LENGTH
        )
        ids = keras.Input((LENGTH,), dtype="int32")
        ones = keras.ops.ones_like(ids)
        tokens = backbone({"token_ids": ids, "padding_mask": ones, "segment_ids": 0 * ones})
        features = keras.layers.GlobalAveragePooling1D()(tokens["sequence_output"])
        head = keras.layers.Dense(CLASSES)
        model = keras.Model(ids, head(features))
        change, _ = text.METHODS[method]
        return change(model, head) if change else model

    models = {name: adapted(name) for name in ADAPTED}
    ids = tf.random.uniform((16, LENGTH), maxval=30_000, dtype=tf.int32)
    case = f"MiniLM-L6, 16 sentences of {LENGTH} tokens, training step"
    yield measure.compared(case, models, measure.training_step, ids, xla)


LENGTH = 32
ADAPTED = (
    *("LoRA of rank 1 + head", "LoRA of rank 4 + head", "M diagonal + head"),
    *("M orthogonal, blocks of 4 + head", "M unconstrained, blocks of 4 + head"),
    *("biases + head", "everything"),
)

#: By group.
PARTS: dict[str, tuple[Callable[..., Iterator[measure.Comparison]], ...]] = {
    "prices": (
        functools.partial(of_layer, 32, 32),
        functools.partial(of_layer, 8, 128),
        of_network,
        functools.partial(neighborhoods.model, backbone="convnet4", batch=BATCH),
    ),
    "transformer": (of_transformer,),
}


def rows(group: str, xla: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of the comparisons; without XLA with the memory, measured last."""
    places, found = [], []
    for part, comparisons in enumerate(PARTS[group]):
        for number, comparison in enumerate(comparisons(xla=xla)):
            places.append((group, part, number))
            found.append(comparison.rows())
    if xla:
        yield from itertools.chain(*found)
        return
    print("Times are taken; now the memory.", flush=True)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for place, candidates in zip(places, found, strict=True):
            peak = functools.partial(pool.apply, growth_in_second_call)
            plain = peak((*place, candidates[0]["baseline"]))
            for row in candidates:
                mebibytes = peak((*place, row["candidate"]))
                yield {**row, "mebibytes": mebibytes, "baseline_mebibytes": plain}


def growth_in_second_call(group: str, part: int, number: int, name: str) -> float:
    """Mebibytes between the memory before the first call and the peak in the second."""
    tf.config.set_visible_devices([], "GPU")
    step = next(itertools.islice(PARTS[group][part](xla=False), number, None)).steps[name]
    ctypes.CDLL(None).malloc_trim(0)  # Else freed memory would be used again, uncounted.
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
