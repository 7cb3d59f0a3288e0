"""The losses of the inner loop, written out.

A fused softmax cross-entropy has label gradients that are zero in the second derivative:
with it the dictionary's values would never train.
"""

from __future__ import annotations

from keras import ops

from nsl_keras.backend import Tensor


def cross_entropy(values: Tensor, logits: Tensor) -> Tensor:
    """Returns `logsumexp(f) * sum(v) - sum(v * f)` over the last axis.

    Args:
        values: Class probabilities, of shape `(..., classes)`.
        logits: Logits of that shape.

    Returns:
        Tensor of shape `(...)`.
    """
    return ops.logsumexp(logits, axis=-1) * ops.sum(values, axis=-1) - ops.sum(
        values * logits, axis=-1
    )


def squared_error(values: Tensor, outputs: Tensor) -> Tensor:
    """Returns `sum((f - v)^2)` over the last axis.

    Args:
        values: Targets, of shape `(..., outputs)`.
        outputs: Outputs of that shape.

    Returns:
        Tensor of shape `(...)`.
    """
    return ops.sum(ops.square(outputs - values), axis=-1)


#: The inner loss of each task.
LOSSES = {"classification": cross_entropy, "regression": squared_error}
