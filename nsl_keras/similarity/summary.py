"""The similarities in a model, and their cost: `summary`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import keras

from nsl_keras import rewiring
from nsl_keras.similarity.bilinear_form import BilinearForm, similarities_of
from nsl_keras.similarity.folding import is_foldable
from nsl_keras.similarity.matrices import Diagonal
from nsl_keras.similarity.recurrent import SimilarityCell
from nsl_keras.similarity.shared_predictor import SharedSimilarityPredictor

Shape: TypeAlias = tuple[int | None, ...]

_HEAD = (
    *("Layer", "Kind", "Similarity", "Parameters"),
    *("Added", "Multiply-adds", "Plain", "Folds"),
)


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
        folds: Whether `fold` accepts it.
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
        layers: The layers with a neural similarity, each a `LayerSummary`.
        not_counted: Names of other layers whose multiply-adds are not counted, for example
            attention.
        name, kind, …: As for a layer, for the whole model. A shared predictor is counted
            once in `similarity_parameters`.
    """

    layers: tuple[LayerSummary, ...]
    not_counted: tuple[str, ...]

    def __str__(self) -> str:
        fields = [field.name for field in dataclasses.fields(LayerSummary)]
        rows = [
            [_text(getattr(each, field)) for field in fields]
            for each in (*self.layers, self)
        ]
        rows.insert(0, list(_HEAD))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        if self.not_counted:
            lines.append(f"Multiply-adds not counted: {', '.join(self.not_counted)}")
        return "\n".join(lines)

    __repr__ = __str__


def summary(model: keras.Model) -> ModelSummary:
    """Returns the similarities in a model, and their cost.

    The result prints as a table with a row for each layer that has a similarity. Its
    multiply-adds are the products of kernels and matrices with the input, for one example:
    of convolutions, dense and recurrent layers, predictors, the comparison `M x` where `M`
    is not folded, iFiLM, and the attention and finetuning of Meta-Neighborhoods.
    Normalizations, activations and sums are not counted. Other layers with matrices for
    weights are named in `not_counted`; to count a custom layer, give it a method
    `count_multiply_adds(input_shape)`.

    Args:
        model: A built functional or Sequential model, or a `MetaNeighborhoodModel` with
            one as its backbone.

    Returns:
        A `ModelSummary`, with the figures as attributes. Multiply-adds that depend on an
        unknown size are `None`.

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
    calls = rewiring.calls(backbone)
    if hasattr(model, "neighborhood"):
        features = model.dictionary.keys.shape
        calls.append(rewiring.Call(model.neighborhood, (tuple(features),), ()))
    counts: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
    for call in calls:
        repeats = math.nan if call.repeats is None else call.repeats
        plain, added = _multiply_adds(call.layer, call.input_shapes[0])
        counts[call.layer].append((repeats * plain, repeats * added))
    every_count = list(itertools.chain.from_iterable(counts.values()))
    return ModelSummary(
        **_figures(model, rewiring.layers(backbone), every_count),
        layers=tuple(
            LayerSummary(**_figures(layer, [layer], its_counts))
            for layer, its_counts in counts.items()
            if similarities_of(layer)
        ),
        not_counted=tuple(
            layer.name
            for layer, its_counts in counts.items()
            if not any(plain for plain, _ in its_counts) and _has_matrices(layer)
        ),
    )


def _figures(
    whole: Any, layers: list[Any], counts: list[tuple[float, float]]
) -> dict[str, Any]:
    """Returns the fields of a `LayerSummary`."""
    parts = [part for layer in layers for part in similarities_of(layer)]
    added = {id(weight): weight for part in parts for weight in part.weights}
    return {
        "name": whole.name,
        "kind": type(whole).__name__.removeprefix("NeuralSimilarity"),
        "similarity": ", ".join(dict.fromkeys(map(_describe, parts))),
        "parameters": whole.count_params(),
        "similarity_parameters": sum(map(_size, added.values())),
        "multiply_adds": _total(plain + extra for plain, extra in counts),
        "plain_multiply_adds": _total(plain for plain, _ in counts),
        "folds": all(map(is_foldable, layers)),
    }


def _text(value: str | int | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "?" if value is None else value


def _describe(part: BilinearForm) -> str:
    how = "static" if part.predictor is None else "dynamic"
    return f"{how} {type(part.similarity).__name__}"


def _size(variable: keras.Variable) -> int:
    return math.prod(variable.shape)


def _has_matrices(layer: Any) -> bool:
    """Whether a layer has weights with several axes, apart from axes of size 1."""
    shapes = [weight.shape for weight in getattr(layer, "weights", ())]
    return any(sum(size > 1 for size in shape) > 1 for shape in shapes)


# Multiply-adds. A count that depends on an unknown size is NaN, and so are its sums.

_TRANSPOSED = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")


def _total(counts: Iterable[float]) -> int | None:
    total = sum(counts)
    return None if math.isnan(total) else int(total)


def _product(sizes: Iterable[int | None]) -> float:
    return math.prod(math.nan if size is None else size for size in sizes)


def _multiply_adds(layer: Any, input_shape: Shape) -> tuple[float, float]:
    """Returns the multiply-adds of the plain layer, and of `M` and its predictor."""
    if hasattr(layer, "count_multiply_adds"):
        count = layer.count_multiply_adds(input_shape)
        return (math.nan if count is None else count), 0
    if isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional)):
        return _of_recurrent(layer, _product(input_shape[1:2]))
    kernels = [getattr(layer, name) for name in _KERNELS if hasattr(layer, name)]
    convolves = hasattr(layer, "kernel_size")
    if not kernels or not (convolves or isinstance(layer, keras.layers.Dense)):
        return 0, 0
    # A transposed convolution puts its kernel at each position of its input.
    transposed = isinstance(layer, _TRANSPOSED)
    shape = input_shape if transposed else layer.compute_output_shape(input_shape)
    first = getattr(layer, "data_format", "") == "channels_first"
    positions = _product(shape[2:] if first else shape[1:-1])
    plain = positions * sum(map(_size, kernels))
    if getattr(layer, "predictor", None) is None:
        return plain, 0
    part, kernel = layer.bilinear_form, layer.kernel
    if not convolves:
        return plain, positions * _of_vector(part, kernel.shape[0])
    compared = positions * _entries(part) * kernel.shape[-2]
    return plain, compared + _of_network(part.network, input_shape)


def _of_recurrent(layer: Any, steps: float) -> tuple[float, float]:
    plain: float = 0
    added: float = 0
    for cell in rewiring.sublayers(layer):
        if hasattr(cell, "recurrent_kernel") and len(cell.kernel.shape) == 2:
            plain += _size(cell.kernel) + _size(cell.recurrent_kernel)
        if isinstance(cell, SimilarityCell):
            for part, kernel in cell.forms_and_kernels():
                added += 0 if part is None else _of_vector(part, kernel.shape[0])
    return steps * plain, steps * added


def _of_vector(part: BilinearForm, features: int) -> float:
    """Returns the multiply-adds of `M v`, and of predicting `M`, for one vector."""
    compared = _entries(part) * features // part.taps
    predicted = 0 if part.network is None else _of_network(part.network, (None, features))
    return compared + predicted


def _entries(part: BilinearForm) -> int:
    return part.taps if isinstance(part.similarity, Diagonal) else part.taps**2


def _of_network(network: Any, input_shape: Shape) -> float:
    """Returns the multiply-adds of a predictor; NaN if one of its layers is not counted."""
    if isinstance(network, SharedSimilarityPredictor):
        network = network.shared_network
    if not isinstance(network, keras.Sequential):
        plain, _ = _multiply_adds(network, input_shape)
        return plain if plain or not _has_matrices(network) else math.nan
    total = 0.0
    for layer in network.layers:
        total += _of_network(layer, input_shape)
        input_shape = tuple(layer.compute_output_shape(input_shape))
    return total
