"""What moved a prediction: what each dictionary entry adds to a finetuned head's outputs.

With the query held, the outputs are a function `F(a)` of the weights `a` that the inner
loss gives to the entries: `F(0)` is the head as it is, `F(w)` the finetuned one. Along
the straight path from 0 to `w`, the change is an integral over all entries' shares,

    F(w) - F(0) = sum_j w_j * integral_0^1 dF/da_j (t w) dt

and entry `j`'s share is its term. Shares of all entries sum to the whole change, whatever
the head and the number of steps (the Aumann-Shapley value of the entry, or "integrated
gradients"). Where outputs are linear in the head's weights, one inner step on a dense
layer, the share is `-rate * w_j (k_j . z + 1) dL_j/df`: what the entry does on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from nsl_keras import data, validation
from nsl_keras.backend import Tensor, gradients_of_columns

#: Gauss-Legendre nodes of the integral: exact for polynomials in `t` up to degree 63.
PATH_POINTS = 32
#: How many of them are computed at once: memory grows with these.
_POINTS_AT_ONCE = 8


class Nearest(NamedTuple):
    """The dictionary entries of largest attention for an example, the heaviest first.

    Attributes:
        indices: Entry numbers, of shape `(batch, k)`.
        weights: Attention weights, of that shape.
        values: Class probabilities (targets, in regression) of the entries, of shape
            `(batch, k, outputs)`.
    """

    indices: Any
    weights: Any
    values: Any


class Neighbors(NamedTuple):
    """The dictionary entries of largest attention for an example, the heaviest first.

    Attributes:
        indices: Entry numbers, of shape `(batch, k)`.
        weights: Attention weights, of that shape.
        values: Class probabilities (targets, in regression) of the entries, of shape
            `(batch, k, outputs)`.
        output_changes: What each entry adds to the logits (outputs, in regression) of
            the example, of shape `(batch, k, outputs)`. Over all entries of the
            dictionary these sum to the outputs after, minus those before adaptation.
            Where an inner step is linear in the head's weights, a single step on a
            `Dense` layer, it is what the step on this entry's loss alone does; elsewhere
            the entry's share along the straight path from no attention to this one.
            The integral over the path takes 32 points. It is exact where the outputs are
            a polynomial in the attention of degree 64 at most: one step on a `Dense`
            layer, and up to 64 steps of a regression on one. Elsewhere its error grows
            with rate and steps. On a `CosineDense` layer it is rounding for one step, and
            three steps at 0.9 leave up to a few percent of an example's change. Several
            steps through ReLU layers, or on cosines after a hidden layer, may leave much
            more. To see it, compare the sum over all entries with the change of the
            outputs.
    """

    indices: Any
    weights: Any
    values: Any
    output_changes: Any


def output_changes(
    adapted_outputs: Callable[[Tensor, Tensor], Tensor],
    attention: Tensor,
    queries: Tensor,
    indices: Tensor,
) -> Tensor:
    """Returns the shares of chosen entries in the change of the outputs.

    Some points of the path are computed in one batch: once through the head, and as many
    times back as it has outputs.

    Args:
        adapted_outputs: Callable from weights of the entries, of shape `(rows, entries)`,
            and queries, of shape `(rows, features)`, to outputs of shape `(rows,
            outputs)`, each row for itself.
        attention: The weights at the end of the path, of shape `(batch, entries)`.
        queries: The examples' features, of shape `(batch, features)`.
        indices: Entry numbers, of shape `(batch, k)`.

    Returns:
        Tensor of shape `(batch, k, outputs)`.
    """
    nodes, node_weights = (
        ops.convert_to_tensor(values / 2, dtype=attention.dtype)
        for values in np.polynomial.legendre.leggauss(PATH_POINTS)
    )
    entries, features = attention.shape[1], queries.shape[1]
    repeated = ops.broadcast_to(queries, (_POINTS_AT_ONCE, *ops.shape(queries)))
    repeated = ops.reshape(repeated, (-1, features))
    parts = []
    for start in range(0, PATH_POINTS, _POINTS_AT_ONCE):
        some = slice(start, start + _POINTS_AT_ONCE)
        along_path = (nodes[some, None, None] + 0.5) * attention
        slopes = gradients_of_columns(
            lambda weights: adapted_outputs(weights, repeated),
            ops.reshape(along_path, (-1, entries)),
        )
        by_point = (_POINTS_AT_ONCE, -1, entries)
        parts.append(
            [ops.tensordot(node_weights[some], ops.reshape(s, by_point), 1) for s in slopes]
        )
    averages = [sum(columns) for columns in zip(*parts, strict=True)]
    shares = [
        ops.take_along_axis(attention * average, indices, axis=-1) for average in averages
    ]
    return ops.stack(shares, axis=-1)


# What pictures and callbacks read off a built `MetaNeighborhoodModel` and its data.


def require_classifier(model: keras.Model) -> None:
    """Raises unless a model has classes."""
    if model.task != "classification":
        raise ValueError(
            f"`model` must be a classifier. Received: a model with task={model.task!r}"
        )


def class_numbers(labels: Any, classes: int, name: str = "y") -> np.ndarray:
    """Returns class numbers, of shape `(n,)`, for any labels that `fit` takes."""
    labels = np.asarray(labels)
    validation.class_labels(labels, classes, name)
    if labels.ndim == 2 and labels.shape[1] == classes:
        return labels.argmax(axis=1)
    return labels.reshape(-1).astype("int64")


def names_of(classes: int, class_names: Sequence[str] | None) -> list[str]:
    """The classes' names; their numbers where none are given."""
    if class_names is None:
        return [str(number) for number in range(classes)]
    if len(class_names) != classes:
        raise ValueError(
            f"`class_names` must hold {classes} names, one a class. "
            f"Received: {len(class_names)} names"
        )
    return [str(name) for name in class_names]


def in_batches(function: Callable[[Any], Tensor], x: Any) -> np.ndarray:
    """What a function of a batch returns for all examples, as an array."""
    return np.concatenate(
        [
            ops.convert_to_numpy(function(data.as_tensors(batch)))
            for batch, _ in data.batches(x)
        ]
    )


def features_of(model: keras.Model, x: Any) -> np.ndarray:
    """Features of all examples, of shape `(n, features)`."""
    return in_batches(lambda batch: model.features(batch, training=False), x)


def attention_of(model: keras.Model, x: Any) -> np.ndarray:
    """Attention of all examples over the entries, of shape `(n, num_neighbors)`."""
    return in_batches(
        lambda batch: model.dictionary.attention(model.features(batch, training=False)),
        x,
    )
