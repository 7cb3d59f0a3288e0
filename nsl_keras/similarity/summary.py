"""What the similarities in a model are, and what they cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras

from nsl_keras import rewiring, validation
from nsl_keras.similarity import conversion, matrices
from nsl_keras.similarity.comparison import Comparison
from nsl_keras.similarity.predictor_cost import multiply_adds, name_costly
from nsl_keras.similarity.predictors import (
    SharedSimilarityPredictor,
    SimilarityPredictor,
)
from nsl_keras.similarity.recurrent import SimilarityCell, is_foldable, similarities_of

Layer: TypeAlias = keras.layers.Layer


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One layer with a neural similarity, as `summary` describes it.

    Attributes:
        name: Name of the layer.
        kind: The Keras layer that it generalizes.
        similarity: What `M` may be, by name.
        predictor: What predicts `M`; `None` if it is static.
        parameters: Number of parameters, those of the similarity included.
        similarity_parameters: Number of parameters of `M`, or of what predicts it, and of
            the kernel's shape.
        multiply_adds: Multiplications, each with its addition, for one example; `None` if
            a size is not known.
        plain_multiply_adds: Those of the plain layer.
        predictor_multiply_adds: Those of what predicts `M` alone; zero if it is static.
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
    predictor_multiply_adds: int | None
    folds: bool

    @property
    def predictor_ratio(self) -> float | None:
        """The predictor's multiply-adds over those of the plain layer."""
        if self.predictor_multiply_adds is None or not self.plain_multiply_adds:
            return None
        return self.predictor_multiply_adds / self.plain_multiply_adds


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
        folds: Whether `fold` makes the plain network of the model.
    """

    name: str
    layers: tuple[LayerSummary, ...]
    layer_count: int
    parameters: int
    similarity_parameters: int
    multiply_adds: int | None
    plain_multiply_adds: int | None
    folds: bool

    @property
    def costly_predictors(self) -> str | None:
        """Says which predictors cost more than the layers they serve; `None` if none do."""
        return name_costly({each.name: each.predictor_ratio for each in self.layers})

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
        notes = [] if self.costly_predictors is None else [self.costly_predictors]
        return "\n".join([title, *_table([head, *rows, total]), *notes])

    __repr__ = __str__


def summary(
    model: keras.Model, print_fn: Callable[[str], Any] | None = None
) -> ModelSummary:
    """Returns what the similarities in a model are, and what they cost.

    The result prints as a table with a row for each layer that has a similarity. Counted
    as multiply-adds are the products of kernels and matrices with the input, for one
    example of the model's input shape: those of convolutions, dense and recurrent layers,
    of predictors, of the comparison `M x` where `M` differs from input to input, of iFiLM,
    and of the attention and the finetuning of Meta-Neighborhoods. Not counted are
    normalizations, activations and sums, nor what does not depend on the input: the
    equivalent kernels of static layers, which fold away, and a head's first pass over its
    dictionary. A layer of your own is counted if it has a method
    `count_multiply_adds(input_shape)`.

    Args:
        model: A built functional or Sequential model, or a `MetaNeighborhoodModel` with
            such a backbone.
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
    graph = rewiring.graph_in(model)
    layers = rewiring.layers(graph)
    counts = [(call.layer, _count(call)) for call in rewiring.calls(graph)]
    if graph is not model:
        validation.built(model, "summary")
        counts.append((model, Count(plain=_known(model.count_head_multiply_adds()))))
    rows = []
    all_added: dict[int, keras.Variable] = {}
    for layer in layers:
        parts = similarities_of(layer)
        if not parts:
            continue
        added = {id(weight): weight for part in parts for weight in part.weights}
        all_added |= added
        its_counts = [count for counted, count in counts if counted is layer]
        rows.append(
            LayerSummary(
                name=layer.name,
                kind=type(layer).__name__.removeprefix("NeuralSimilarity"),
                similarity=_join(_similarity_name(part) for part in parts),
                predictor=_join(
                    _predictor_name(part.predictor) for part in parts if part.predictor
                )
                or None,
                parameters=layer.count_params(),
                similarity_parameters=sum(map(_size, added.values())),
                multiply_adds=_total(each.plain + each.added for each in its_counts),
                plain_multiply_adds=_total(each.plain for each in its_counts),
                predictor_multiply_adds=_total(each.predictors for each in its_counts),
                folds=is_foldable(layer),
            )
        )
    result = ModelSummary(
        name=model.name,
        layers=tuple(rows),
        layer_count=len(layers),
        parameters=model.count_params(),
        similarity_parameters=sum(map(_size, all_added.values())),
        multiply_adds=_total(each.plain + each.added for _, each in counts),
        plain_multiply_adds=_total(each.plain for _, each in counts),
        folds=conversion.folds(layers),
    )
    if print_fn is not None:
        for line in str(result).splitlines():
            print_fn(line)
    return result


def _size(variable: keras.Variable) -> int:
    return math.prod(variable.shape)


def _similarity_name(part: Comparison) -> str:
    for name, kind in matrices.KINDS.items():
        if (
            type(part.similarity) is kind
            and part.similarity.get_config() == kind().get_config()
        ):
            return name
    options = ", ".join(f"{k}={v}" for k, v in part.similarity.get_config().items())
    return f"{type(part.similarity).__name__}({options})"


def _predictor_name(predictor: Any) -> str:
    if isinstance(predictor, SharedSimilarityPredictor):
        return f"shared {_predictor_name(predictor.predictor)}"
    kind = getattr(predictor, "kind", type(predictor).__name__)
    return kind if isinstance(kind, str) else kind.__name__


def _join(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


# Multiply-adds. A count that is not known is NaN, and so are its sums and products.

_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
)
_TRANSPOSED_CONVOLUTIONS = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
_SEPARABLE_CONVOLUTIONS = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
#: Layers whose weights have several axes, but are no kernel.
_WITHOUT_KERNEL = (
    keras.layers.LayerNormalization,
    keras.layers.Normalization,
    keras.layers.PReLU,
    keras.layers.RMSNormalization,
)
_CELLS = (keras.layers.SimpleRNNCell, keras.layers.GRUCell, keras.layers.LSTMCell)


def _total(counts: Iterable[float]) -> int | None:
    total = sum(counts)
    return None if math.isnan(total) else int(total)


def _known(count: int | None) -> float:
    return math.nan if count is None else count


def _product(sizes: Iterable[int | None]) -> float:
    return math.prod(math.nan if size is None else size for size in sizes)


@dataclasses.dataclass(frozen=True)
class Count:
    """Multiply-adds: of the plain layer, what `M` adds, and the predictors' part of it."""

    plain: float = 0
    added: float = 0
    predictors: float = 0


def _count(call: rewiring.Call) -> Count:
    layer = call.layer
    if not isinstance(layer, keras.layers.Layer):
        return Count()
    if not layer.weights and not hasattr(layer, "count_multiply_adds"):
        return Count()
    repeats = _known(call.repeats)
    predicted: float = 0
    inputs, outputs = call.input_shapes[0], call.output_shapes[0]
    if isinstance(layer, (*_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS)):
        # A transposed convolution puts its kernel at every position of the input.
        shape = inputs if isinstance(layer, _TRANSPOSED_CONVOLUTIONS) else outputs
        sizes = _spatial(layer, shape)
        plain = _product(sizes) * _size(layer.kernel)
        added, predicted = _of_convolution(layer, inputs, sizes)
    elif isinstance(layer, _SEPARABLE_CONVOLUTIONS):
        kernels = _size(layer.depthwise_kernel) + _size(layer.pointwise_kernel)
        plain, added = _product(_spatial(layer, outputs)) * kernels, 0
    elif isinstance(layer, keras.layers.Dense):
        vectors = _product(inputs[1:-1])
        plain = vectors * _size(layer.kernel)
        if getattr(layer, "predictor", None) is None:
            added, predicted = 0, 0
        else:
            per_vector = _of_vectors(layer.comparison, layer.kernel)
            added, predicted = (vectors * each for each in per_vector)
    elif cells := _cells(layer):
        steps = _known(inputs[1])
        pairs = [pair for cell in cells for pair in _kernels_and_parts(cell)]
        plain = steps * sum(_size(kernel) for kernel, _ in pairs)
        both = [_of_vectors(part, kernel) for kernel, part in pairs if part]
        added = steps * sum(each[0] for each in both)
        predicted = steps * sum(each[1] for each in both)
    elif hasattr(layer, "count_multiply_adds"):
        plain, added = _known(layer.count_multiply_adds(inputs)), 0
    else:
        # Scales and biases alone do not count; of other kernels nothing is known.
        is_known = (
            isinstance(layer, _WITHOUT_KERNEL)
            # A look-up adds an axis; a `ReversibleEmbedding` in reverse is a product.
            or (isinstance(layer, keras.layers.Embedding) and len(outputs) > len(inputs))
            or all(len(variable.shape) < 2 for variable in layer.weights)
        )
        plain, added = (0 if is_known else math.nan), 0
    return Count(repeats * plain, repeats * added, repeats * predicted)


def _spatial(layer: Any, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return shape[1:-1] if layer.data_format == "channels_last" else shape[2:]


def _cells(layer: Layer) -> list[Layer]:
    """Returns the cells of a recurrent layer, none if one of them is of another kind."""
    if isinstance(layer, keras.layers.Bidirectional):
        sides = [_cells(layer.forward_layer), _cells(layer.backward_layer)]
        return sides[0] + sides[1] if all(sides) else []
    if not isinstance(layer, keras.layers.RNN):
        return []
    cell = layer.cell
    cells = cell.cells if isinstance(cell, keras.layers.StackedRNNCells) else [cell]
    return list(cells) if all(isinstance(each, _CELLS) for each in cells) else []


def _kernels_and_parts(cell: Any) -> list[tuple[keras.Variable, Any]]:
    """Returns the kernels of a cell, each with its similarity or `None`."""
    if not isinstance(cell, SimilarityCell):
        return [(cell.kernel, None), (cell.recurrent_kernel, None)]
    return [
        (cell.kernel, cell.input_comparison),
        (cell.recurrent_kernel, cell.state_comparison),
    ]


def _of_convolution(
    layer: Any, inputs: tuple[int | None, ...], sizes: tuple[int | None, ...]
) -> tuple[float, float]:
    """Returns what `M` adds to a layer, and its predictor's part; nothing if static."""
    predictor = getattr(layer, "predictor", None)
    if predictor is None:
        return 0, 0
    *kernel_size, channels, _ = layer.kernel.shape
    taps = math.prod(kernel_size)
    predicted = multiply_adds(layer.comparison.network, inputs)
    positions = _product(sizes)
    compared = positions * _of_comparison(layer.similarity, taps, channels)
    pooled = isinstance(predictor, SimilarityPredictor) and predictor.pooled
    made = (1 if pooled else positions) * _of_making(layer.similarity, taps)
    return predicted + compared + made, predicted


def _of_vectors(part: Any, kernel: keras.Variable) -> tuple[float, float]:
    """Returns what `M v` adds for one vector, a cell's static `M` included, as above."""
    features = kernel.shape[0]
    taps = part.block_size or features
    compared = _of_comparison(part.similarity, taps, features // taps)
    if part.predictor is None:
        return compared, 0
    predicted = multiply_adds(part.network, (None, features))
    return compared + _of_making(part.similarity, taps) + predicted, predicted


def _of_comparison(similarity: matrices.Similarity, taps: int, channels: int) -> int:
    """Returns the multiply-adds of `M x` for one `x` of `taps` times `channels`."""
    entries = taps if isinstance(similarity, matrices.Diagonal) else taps**2
    return entries * channels


def _of_making(similarity: matrices.Similarity, taps: int) -> int:
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
