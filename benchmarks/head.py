"""The Meta-Neighborhoods head against the plain `CosineDense` head, on given features.

One rule: the dual form and the nested tape compute the same, and each is compared with
the plain head in rounds of its own, so that the slow one does not stretch the other's.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import tensorflow as tf

import nsl_keras
from benchmarks import measure

BATCH = 128
FEATURES = 256
CLASSES = 10
NEIGHBORS = 5000


def comparisons(xla: bool) -> Iterator[measure.Comparison]:
    """Yields the comparisons of this group, one at a time."""
    features = tf.random.normal((BATCH, FEATURES))
    plain = nsl_keras.layers.CosineDense(CLASSES)
    plain.build(features.shape)
    for title, inner_loop in (("dual form", "dual"), ("nested tape", "tape")):
        adapting = neighborhood_head(inner_loop)
        for what, make in (
            ("forward", measure.forward),
            ("forward+backward", measure.forward_backward),
        ):
            calls_per_round, most_rounds = 5, None
            if inner_loop == "tape":
                calls_per_round, most_rounds = 2, 5
                if xla and make is measure.forward_backward:
                    # XLA takes what enters a differentiated `vectorized_map` for
                    # constants: each draw of dropout is compiled anew, for seconds.
                    calls_per_round, most_rounds = 1, 2
            yield measure.Comparison(
                f"S={NEIGHBORS}, d={FEATURES}, C={CLASSES}, B={BATCH}, {what}",
                {
                    "CosineDense": make(plain, features, xla),
                    f"Meta-Neighborhoods, {title}": make(adapting, features, xla),
                },
                calls_per_round=calls_per_round,
                most_rounds=most_rounds,
            )


def neighborhood_head(inner_loop: str) -> keras.layers.Layer:
    """A built head; it leaves half of the dictionary out in training, none in inference."""
    head = nsl_keras.layers.MetaNeighborhoodHead(
        nsl_keras.layers.CosineDense(CLASSES),
        NEIGHBORS,
        dictionary_dropout=0.5,
        inner_loop=inner_loop,
        seed=0,
    )
    head.build((BATCH, FEATURES))
    return head
