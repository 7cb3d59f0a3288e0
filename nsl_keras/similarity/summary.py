"""The similarities in a model, and their cost: `summary`."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nsl_keras import graphs, nesting
from nsl_keras.similarities import Diagonal
from nsl_keras.similarity.folding import is_foldable
from nsl_keras.similarity.neural_similarity import similarities_of

_TITLES = (
    *("Layer", "Kind", "Similarity", "Parameters"),
    *("Added", "Multiply-adds", "Plain", "Folds"),
)
_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")
_RECURRENT = (keras.layers.RNN, keras.layers.Bidirectional)


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One layer in a `ModelSummary`, or the total over the model.

    Attributes:
        name: Name of the layer.
        kind: The Keras layer that it generalizes.
        similarity: The structure of `M`, for example `"static Diagonal"`.
        parameters: Number of parameters, including the similarity.
        similarity_parameters: Number of parameters of `M` or its predictor, and of the
            learned kernel shape.
        multiply_adds: Multiply-adds for one example; `None` if a size is unknown.
        plain_multiply_adds: Multiply-adds of the plain layer.
        folds: Whether `fold` accepts the layer.
    """

    name: str
    kind: str
    similarity: str
    parameters: int
    similarity_parameters: int
    multiply_adds: int | None
    plain_multiply_adds: int | None
    folds: bool


@dataclasses.dataclass(frozen=True)
class ModelSummary(LayerSummary):
    """A model with neural similarities; prints as a table.

    Attributes:
        layers: The layers with a neural similarity, and head and dictionary of a
            `MetaNeighborhoodModel`, each a `LayerSummary`.
        not_counted: Names of layers whose multiply-adds are not counted.
        name, kind, …: Those of a `LayerSummary`, for the whole model. A shared predictor
            is counted once in `similarity_parameters`.
    """

    layers: tuple[LayerSummary, ...]
    not_counted: tuple[str, ...]

    def __str__(self) -> str:
        fields = [field.name for field in dataclasses.fields(LayerSummary)]
        rows = [list(_TITLES)]
        for each in (*self.layers, self):
            rows.append([_text(getattr(each, field)) for field in fields])
        rows[-1][0] = "Total"
        lines = table(rows)
        if self.not_counted:
            lines.append(f"Multiply-adds not counted: {', '.join(self.not_counted)}")
        return "\n".join(lines)

    __repr__ = __str__


def table(rows: list[list[str]]) -> list[str]:
    """Returns the lines of a table, with a rule under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _text(value: str | int | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "?" if value is None else value


def summary(model: keras.Model) -> ModelSummary:
    """Returns the similarities in a model, and their cost, as a `ModelSummary`.

    The result prints as a table with one row per layer that has a similarity. It counts the
    multiply-adds of one example in convolutions, dense and recurrent layers, predictors,
    and in `M x` if `M` is not folded. It does not count normalizations, activations and
    sums. `not_counted` names the adaptation of Meta-Neighborhoods, and other layers whose
    weights are matrices.

    Args:
        model: A built functional or Sequential model, or a `MetaNeighborhoodModel` whose
            backbone is such a model.

    Raises:
        ValueError: If the model is subclassed or not built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(8, 3, padding="same", name="first")
    >>> model = keras.Sequential([keras.Input((16, 16, 3)), layer])
    >>> print(nsl_keras.convert.summary(model))
    Layer ...
    >>> nsl_keras.convert.summary(model).layers[0].multiply_adds
    55296

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1, counts
        parameters and operations of dynamic similarities this way.
    """
    backbone = getattr(model, "backbone", model)
    counts: dict[Any, Any] = collections.defaultdict(lambda: np.zeros(2))
    not_counted: dict[str, None] = {}
    for call in []:
        if _kernels(call.layer) is None:
            not_counted[call.layer.name] = None
            continue
        repeats = math.nan if call.repeats is None else call.repeats
        counts[call.layer] += repeats * _multiply_adds(call.layer, call.input_shapes[0])
    rows = [_row(each, [each], counts[each]) for each in counts if similarities_of(each)]
    if hasattr(model, "neighborhood"):
        head, dictionary = model.head, model.dictionary
        counts[head] += _multiply_adds(head, (None, dictionary.keys.shape[-1]))
        rows.append(_row(head, [], counts[head]))
        rows.append(_row(dictionary, [], np.full(2, math.nan)))
        not_counted[model.neighborhood.name] = None
    return ModelSummary(
        **_row(model, graphs.layers(backbone), sum(counts.values(), np.zeros(2))),
        layers=tuple(LayerSummary(**row) for row in rows),
        not_counted=tuple(not_counted),
    )


def _row(whole: Any, layers: Sequence[Any], count: np.ndarray) -> dict[str, Any]:
    """Returns the fields of a `LayerSummary`."""
    forms = [form for layer in layers for form in similarities_of(layer)]
    names = [
        f"{'static' if form.predictor is None else 'dynamic'} "
        f"{type(form.similarity).__name__}"
        for form in forms
    ]
    weights = {id(weight): weight for form in forms for weight in form.weights}
    plain, total = (None if math.isnan(number) else int(number) for number in count)
    return {
        "name": whole.name,
        "kind": type(whole).__name__.removeprefix("NeuralSimilarity"),
        "similarity": ", ".join(dict.fromkeys(names)),
        "parameters": whole.count_params(),
        "similarity_parameters": sum(math.prod(each.shape) for each in weights.values()),
        "multiply_adds": total,
        "plain_multiply_adds": plain,
        "folds": all(map(is_foldable, layers)),
    }


def _kernels(layer: Any) -> list[keras.Variable] | None:
    """Returns the kernels that act once at each position or step; `None` if unknown."""
    if isinstance(layer, _RECURRENT):
        parts = nesting.sublayers(layer)
        # Convolutional cells have no `units`.
        cells = [x for x in parts if hasattr(x, "recurrent_kernel") and hasattr(x, "units")]
        found = [kernel for x in cells for kernel in (x.kernel, x.recurrent_kernel)]
    elif hasattr(layer, "kernel_size") or hasattr(layer, "units"):
        found = [getattr(layer, name) for name in _KERNELS if hasattr(layer, name)]
    else:
        found = []
    shapes = [weight.shape for weight in getattr(layer, "weights", ())]
    has_matrices = any(sum(size > 1 for size in shape) > 1 for shape in shapes)
    return None if has_matrices and not found else found


def _multiply_adds(layer: Any, shape: Sequence[int | None]) -> np.ndarray:
    """Returns the multiply-adds without, and with, `M` and its predictor.

    They are NaN if they depend on an unknown size, or on a layer with unknown kernels.
    """
    network = getattr(layer, "shared_network", layer)
    if isinstance(network, keras.Sequential):
        total = np.zeros(2)
        for each in network.layers:
            total += _multiply_adds(each, shape)
            shape = each.compute_output_shape(shape)
        return total
    kernels = _kernels(layer)
    if not kernels:
        return np.full(2, 0 if kernels is not None else math.nan)
    recurrent = isinstance(layer, _RECURRENT)
    if recurrent:
        sizes = shape[1:2]
    else:
        # A transposed convolution puts its kernel at each position of its input.
        transposed = hasattr(layer, "output_padding")
        sizes = shape if transposed else layer.compute_output_shape(shape)
        first = getattr(layer, "data_format", "") == "channels_first"
        sizes = sizes[2:] if first else sizes[1:-1]
    positions = math.prod(math.nan if size is None else size for size in sizes)
    plain = positions * sum(math.prod(kernel.shape) for kernel in kernels)
    added = 0.0
    for form in similarities_of(layer):
        if recurrent or form.network is not None:  # Others fold into the kernel.
            is_diagonal = isinstance(form.similarity, Diagonal)
            entries = form.taps if is_diagonal else form.taps**2
            added += positions * entries * form.channels
        if form.network is not None:
            vectors = (*shape[:2], form.taps * form.channels)
            added += _multiply_adds(form.network, vectors if recurrent else shape)[0]
    return np.array([plain, plain + added])
