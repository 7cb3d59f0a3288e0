"""What the similarities in a model are, and what they cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras

from nsl_keras import rewiring
from nsl_keras.similarity import matrices
from nsl_keras.similarity.conversion import is_foldable, similarities_of
from nsl_keras.similarity.convolution_base import Window
from nsl_keras.similarity.dense_predictor import DenseSimilarityPredictor
from nsl_keras.similarity.neural_similarity import NeuralSimilarity
from nsl_keras.similarity.predictors import SharedSimilarityPredictor, SimilarityPredictor
from nsl_keras.similarity.recurrent import CellSimilarity, SimilarityCell
from nsl_keras.similarity.similarity_vector import SimilarityVector
from nsl_keras.similarity.similarity_window import SimilarityWindow

Layer: TypeAlias = keras.layers.Layer
#: Sizes of a tensor, `None` where not known.
Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One layer with a neural similarity, as `summary` describes it.

    Attributes:
        name: Name of the layer.
        kind: The Keras layer that it generalises.
        similarity: What `M` may be, by name.
        predictor: What predicts `M`; `None` if it is static.
        parameters: Number of parameters, those of the similarity included.
        similarity_parameters: Number of parameters of `M`, or of what predicts it, and of
            the kernel's shape.
        multiply_adds: Multiplications, each with its addition, for one example; `None` if
            a size is not known.
        plain_multiply_adds: Those of the plain layer.
        folds: Whether `fold` makes the plain layer of it.
    """

    name: str
    kind: str
    similarity: str
    predictor: str | None
    parameters: int
    similarity_parameters: int
    multiply_adds: int | None
    plain_multiply_adds: int | None
    folds: bool


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """A model with neural similarities, as `summary` describes it; prints as a table.

    Attributes:
        name: Name of the model.
        layers: The layers with a neural similarity.
        layer_count: Number of layers of the model, those of nested models included.
        parameters: Number of parameters of the model.
        similarity_parameters: How many of them the plain network would not have. A
            predictor that several layers share counts once here.
        multiply_adds: Multiply-adds for one example; `None` if a size is not known or a
            layer with a kernel is of a kind that is not counted.
        plain_multiply_adds: Those of the plain network.
    """

    name: str
    layers: tuple[LayerSummary, ...]
    layer_count: int
    parameters: int
    similarity_parameters: int
    multiply_adds: int | None
    plain_multiply_adds: int | None

    @property
    def folds(self) -> bool:
        """Whether `fold` makes the plain network of the model."""
        return all(layer.folds for layer in self.layers)

    def __str__(self) -> str:
        head = (
            "Layer",
            "Kind",
            "Similarity",
            "M",
            "Parameters",
            "Added",
            "Multiply-adds",
            "Plain",
            "Folds",
        )
        rows = [
            (
                each.name,
                each.kind,
                each.similarity,
                "static" if each.predictor is None else f"dynamic ({each.predictor})",
                *_counts(each),
                "yes" if each.folds else "no",
            )
            for each in self.layers
        ]
        total = ("Whole model", "", "", "", *_counts(self), "yes" if self.folds else "no")
        title = (
            f"Model {self.name!r}: {len(self.layers)} of {self.layer_count} layers have a "
            "neural similarity"
        )
        return "\n".join([title, *_table([head, *rows, total])])

    __repr__ = __str__


def summary(
    model: keras.Model, print_fn: Callable[[str], Any] | None = None
) -> ModelSummary:
    """Returns what the similarities in a model are, and what they cost.

    The result prints as a table with a row for each layer that has a similarity. Counted
    as multiply-adds are the products of kernels and matrices with the input, for one
    example of the model's input shape: those of convolutions, dense and recurrent layers,
    of predictors, and of the comparison `M x` where `M` differs from input to input. Not
    counted are normalisations, activations and sums, nor the equivalent kernels of static
    layers, which do not depend on the input and fold away.

    Args:
        model: A built functional or Sequential model.
        print_fn: Function to give the table to, line by line; `None` for none.

    Returns:
        A `ModelSummary`, with the figures as attributes. Multiply-adds that depend on a
        size that is not known, or on layers of unknown kinds, are `None`; the table has
        "?" in their place.

    Raises:
        ValueError: If the model is subclassed or not built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = keras.Sequential([
    ...     keras.Input((16, 16, 3), name="images"),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(8, 3, padding="same", name="first"),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(
    ...         8, 3, padding="same", predictor="sphere", name="second"),
    ... ], name="small")
    >>> print(nsl_keras.convert.summary(model))
    Model 'small': 2 of 2 layers have a neural similarity
    ...
    >>> nsl_keras.convert.summary(model).layers[0].multiply_adds
    55296

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1, counts
        parameters and operations of dynamic similarities this way.
    """
    calls = rewiring.calls(model)
    rows = []
    added_variables: dict[int, Any] = {}
    for layer in rewiring.layers(model):
        parts = similarities_of(layer)
        if not parts:
            continue
        added = {id(each): each for part in parts for each in _added_variables(part)}
        added_variables |= added
        its_calls = [call for call in calls if call.layer is layer]
        rows.append(
            LayerSummary(
                name=layer.name,
                kind=type(layer).__name__.removeprefix("NeuralSimilarity"),
                similarity=_joined(_similarity_name(part) for part in parts) or "",
                predictor=_joined(
                    _predictor_name(part.predictor) for part in parts if part.predictor
                ),
                parameters=layer.count_params(),
                similarity_parameters=_number_of_entries(added.values()),
                multiply_adds=_sum(_multiply_adds(call) for call in its_calls),
                plain_multiply_adds=_sum(_plain_multiply_adds(call) for call in its_calls),
                folds=is_foldable(layer),
            )
        )
    result = ModelSummary(
        name=model.name,
        layers=tuple(rows),
        layer_count=len(rewiring.layers(model)),
        parameters=model.count_params(),
        similarity_parameters=_number_of_entries(added_variables.values()),
        multiply_adds=_sum(_multiply_adds(call) for call in calls),
        plain_multiply_adds=_sum(_plain_multiply_adds(call) for call in calls),
    )
    if print_fn is not None:
        for line in str(result).splitlines():
            print_fn(line)
    return result


def _added_variables(part: NeuralSimilarity) -> list[Any]:
    """Returns the variables of a layer that the plain one does not have."""
    return [
        each for each in part.weights if each is not part.kernel and each is not part.bias
    ]


def _number_of_entries(variables: Iterable[Any]) -> int:
    return sum(math.prod(each.shape) for each in variables)


def _similarity_name(part: NeuralSimilarity) -> str:
    name = matrices.serialize(part.similarity)
    if isinstance(name, str):
        return name
    options = ", ".join(f"{k}={v}" for k, v in part.similarity.get_config().items())
    kind = type(part.similarity).__name__
    return f"{kind}({options})"


def _predictor_name(predictor: Layer) -> str:
    if isinstance(predictor, SharedSimilarityPredictor):
        return f"shared {predictor.kind}"
    return getattr(predictor, "kind", type(predictor).__name__)


def _joined(names: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(names)) or None


# Multiply-adds.


def _sum(counts: Iterable[int | None]) -> int | None:
    total = 0
    for each in counts:
        if each is None:
            return None
        total += each
    return total


def _product(sizes: Iterable[int | None]) -> int | None:
    total = 1
    for each in sizes:
        if each is None:
            return None
        total *= each
    return total


def _plain_multiply_adds(call: rewiring.Call) -> int | None:
    """Returns the multiply-adds of a call, without those of its similarity."""
    return _product([call.repeats, _without_similarity(call.layer, call)])


def _multiply_adds(call: rewiring.Call) -> int | None:
    layer = call.layer
    plain = _without_similarity(layer, call)
    added: int | None = 0
    if isinstance(layer, SimilarityWindow):
        added = _added_by_window(layer, call)
    elif isinstance(layer, SimilarityVector):
        if layer.predictor is not None:
            vectors = _product(call.input_shapes[0][1:-1])
            added = _product([vectors, _added_by_vector(layer, layer.kernel.shape[0])])
    elif isinstance(layer, keras.layers.Layer) and similarities_of(layer):
        added = _product([_steps(call), _sum(map(_added_by_cell, _cells_of(layer)))])
    return _product([call.repeats, _sum([plain, added])])


def _without_similarity(layer: keras.Operation, call: rewiring.Call) -> int | None:
    """Returns the products of a layer's own kernels with its input, for one example."""
    if not isinstance(layer, keras.layers.Layer) or not layer.weights:
        return 0
    inputs, outputs = call.input_shapes[0], call.output_shapes[0]
    if isinstance(layer, (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)):
        kernels = layer.depthwise_kernel, layer.pointwise_kernel
        return _product([_positions(layer, outputs), sum(map(_size, kernels))])
    if isinstance(layer, _TRANSPOSED):
        return _product([_positions(layer, inputs), _size(layer.kernel)])
    if isinstance(layer, (Window, *_CONVOLUTIONS)):
        return _product([_positions(layer, outputs), _size(layer.kernel)])
    if isinstance(layer, (SimilarityVector, keras.layers.Dense)):
        return _product([*inputs[1:-1], _size(layer.kernel)])
    cells = _cells_of(layer)
    if cells:
        a_step = sum(_size(cell.kernel) + _size(cell.recurrent_kernel) for cell in cells)
        return _product([_steps(call), a_step])
    if isinstance(layer, keras.layers.Embedding):
        return 0
    # Scales and biases alone do not count; of other kernels nothing is known.
    return None if any(len(each.shape) > 1 for each in layer.weights) else 0


_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
)
_TRANSPOSED = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
_CELLS = (keras.layers.SimpleRNNCell, keras.layers.GRUCell, keras.layers.LSTMCell)


def _size(variable: Any) -> int:
    return math.prod(variable.shape)


def _positions(layer: Any, shape: Shape) -> int | None:
    return _product(shape[1:-1] if layer.data_format == "channels_last" else shape[2:])


def _steps(call: rewiring.Call) -> int | None:
    return call.input_shapes[0][1]


def _cells_of(layer: Layer) -> list[Layer]:
    """Returns the cells of a recurrent layer, none if one of them is of another kind."""
    if isinstance(layer, keras.layers.Bidirectional):
        sides = [_cells_of(layer.forward_layer), _cells_of(layer.backward_layer)]
        return sides[0] + sides[1] if all(sides) else []
    if not isinstance(layer, keras.layers.RNN):
        return []
    cell = layer.cell
    cells = cell.cells if isinstance(cell, keras.layers.StackedRNNCells) else [cell]
    return list(cells) if all(isinstance(each, _CELLS) for each in cells) else []


def _added_by_window(layer: SimilarityWindow, call: rewiring.Call) -> int | None:
    """Returns the multiply-adds of the predictor and of `M(p) x_p`."""
    predictor = layer.predictor
    if predictor is None:
        return 0
    if not isinstance(predictor, SimilarityPredictor):
        return None
    positions = _positions(layer, call.output_shapes[0])
    kernels = [predictor.hidden_convolution.kernel, predictor.output_convolution.kernel]
    if layer.adaptation is not None:
        kernels.append(layer.adaptation.kernel)
    predicted = _product([positions, sum(map(_size, kernels))])
    *kernel_size, channels, _ = layer.kernel.shape
    compared = _comparison(layer.similarity, math.prod(kernel_size), channels)
    made = _making(layer.similarity, math.prod(kernel_size))
    return _sum(
        [
            predicted,
            _product([positions, compared]),
            _product([1 if predictor.pooled else positions, made]),
        ]
    )


def _added_by_vector(part: SimilarityVector, features: int) -> int | None:
    """Returns the multiply-adds of the predictor and of `M v`, for one vector."""
    taps = part.block_size or features
    added = _comparison(part.similarity, taps, features // taps)
    if part.predictor is None:
        return added
    if not isinstance(part.predictor, DenseSimilarityPredictor):
        return None
    kernels = part.predictor.hidden_dense.kernel, part.predictor.output_dense.kernel
    return added + _making(part.similarity, taps) + sum(map(_size, kernels))


def _added_by_cell(cell: Layer) -> int | None:
    """Returns the multiply-adds of the similarities in a cell, for one step.

    They are applied to the vectors, the static ones too.
    """
    if not isinstance(cell, SimilarityCell):
        return 0
    sides: list[tuple[CellSimilarity | None, int]] = [
        (cell.input_similarity, cell.kernel.shape[0]),
        (cell.state_similarity, cell.recurrent_kernel.shape[0]),
    ]
    return _sum(
        _added_by_vector(part, features) for part, features in sides if part is not None
    )


def _comparison(similarity: matrices.Similarity, taps: int, channels: int) -> int:
    """Returns the multiply-adds of `M x` for one `x` of `taps` times `channels`."""
    matrix = taps if isinstance(similarity, matrices.Diagonal) else taps**2
    return matrix * channels


def _making(similarity: matrices.Similarity, taps: int) -> int:
    """Returns the multiply-adds of making one `M` from its parameters."""
    return taps**3 if isinstance(similarity, matrices.PositiveSemidefinite) else 0


# The table.


def _counts(figures: LayerSummary | ModelSummary) -> tuple[str, ...]:
    plain, total = figures.plain_multiply_adds, figures.multiply_adds
    return (
        f"{figures.parameters:,}",
        f"{figures.similarity_parameters:,}",
        _short(total),
        _short(plain),
    )


def _short(count: int | None) -> str:
    if count is None:
        return "?"
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: head, rows, total; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = range(4, 8)
    lines = [
        "  ".join(
            text.rjust(width) if column in numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * max(map(len, lines))
    return [rule, lines[0], rule, *lines[1:-1], rule, lines[-1]]
