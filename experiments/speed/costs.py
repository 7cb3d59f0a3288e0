"""Cost against batch, entries and channels, one size at a time, and its picture.

One rule: sizes that do not grow stay those of the other groups.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import matplotlib.pyplot as plt
import tensorflow as tf

import nsl_keras
from experiments.speed import measure, neighborhoods

BATCHES = (8, 32, 128, 512)
ENTRIES = (100, 1_000, 10_000)
CHANNELS = (8, 32, 128)
#: Entries where the batch grows, and height and width of what convolutions get.
NEIGHBORS, PIXELS, IMAGES = 1_000, 16, 32


def comparisons(xla: bool) -> Iterator[measure.Comparison]:
    passes = functools.partial(
        measure.passes, xla=xla, names=("inference", "training"), calls_per_round=3
    )
    heads = [(f"batch={batch}", batch, NEIGHBORS) for batch in BATCHES]
    heads += [(f"entries={entries}", neighborhoods.BATCH, entries) for entries in ENTRIES]
    for case, batch, entries in heads:
        layers = {
            "CosineDense": neighborhoods.cosine_head(),
            "Meta-Neighborhoods": neighborhoods.neighborhood_head(entries),
        }
        features = tf.random.normal((batch, neighborhoods.FEATURES))
        yield from passes(case, layers, features)
    similar = nsl_keras.layers.NeuralSimilarityConv2D
    for channels in CHANNELS:
        options: dict[str, Any] = {"filters": channels, "kernel_size": 3, "padding": "same"}
        layers = {
            "Conv2D": keras.layers.Conv2D(**options),
            "static similarity": similar(**options),
            "dynamic similarity": similar(**options, predictor="sphere"),
        }
        images = tf.random.normal((IMAGES, PIXELS, PIXELS, channels))
        yield from passes(f"channels={channels}", layers, images)


def picture(rows: Iterable[Mapping[str, Any]]) -> Any:
    costs: dict[str, dict[str, dict[float, Any]]] = {}
    for row in rows:
        case, what = row["case"].split(", ")
        along, size = case.split("=")
        curve = costs.setdefault(along, {}).setdefault(f"{row['candidate']}, {what}", {})
        curve[int(size)] = (row["median"], row["low"], row["high"])
    figure, axes = plt.subplots(
        1, len(costs), figsize=(3.6 * len(costs), 3.8), squeeze=False, layout="constrained"
    )
    for axis, (along, curves) in zip(axes.flat, costs.items(), strict=True):
        axis.axhline(1, color="gray", lw=1)
        for number, (name, curve) in enumerate(curves.items()):
            sizes = sorted(curve)
            medians, lows, highs = zip(*(curve[size] for size in sizes), strict=True)
            color = f"C{number}"
            axis.plot(sizes, medians, "o-", color=color, ms=5, label=name)
            axis.fill_between(sizes, lows, highs, color=color, alpha=0.2, lw=0)
        axis.loglog()
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.set_xlabel(along)
        axis.legend(fontsize=7, frameon=False)
    axes[0, 0].set_ylabel("time, as a multiple of the plain layer's")
    return figure
