"""The similarities in a model, and their parameters: `summary`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import graphs
from nsl_keras.similarity.folding import is_foldable
from nsl_keras.similarity.with_similarity import forms_in


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
        folds: Whether `fold` accepts the layer.
    """

    name: str
    kind: str
    similarity: str
    parameters: int
    similarity_parameters: int
    folds: bool


@dataclasses.dataclass(frozen=True)
class ModelSummary(LayerSummary):
    """A model with neural similarities; prints as a table.

    The attributes of `LayerSummary` here describe the whole model; `similarity_parameters`
    counts a shared predictor once.

    Attributes:
        layers: A `LayerSummary` for each layer with a neural similarity, and for the head
            and dictionary of a `MetaNeighborhoodModel`.
    """

    layers: tuple[LayerSummary, ...]

    def __str__(self) -> str:
        rows = [("Layer", "Kind", "Similarity", "Parameters", "Added", "Folds")]
        for each in (*self.layers, dataclasses.replace(self, name="Total")):
            numbers = f"{each.parameters:,}", f"{each.similarity_parameters:,}"
            folds = "yes" if each.folds else "no"
            rows.append((each.name, each.kind, each.similarity, *numbers, folds))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    __repr__ = __str__


def summary(model: keras.Model) -> ModelSummary:
    """Returns the similarities in a model and their parameters as a `ModelSummary`.

    Args:
        model: A built model.

    Raises:
        ValueError: If the model is not built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(8, 3, padding="same", name="first")
    >>> model = keras.Sequential([keras.Input((16, 16, 3)), layer])
    >>> print(nsl_keras.convert.summary(model))
    Layer  Kind        Similarity       Parameters  Added  Folds
    ------------------------------------------------------------
    first  Conv2D      static Diagonal  233         9      yes
    Total  Sequential  static Diagonal  233         9      yes

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1, counts the
        parameters of dynamic similarities this way.
    """
    root = graphs.root_of(model)
    layers = graphs.layers(root) or root.layers
    rows = [_row(each, [each]) for each in layers if forms_in(each)]
    if root is not model:  # A `MetaNeighborhoodModel`.
        rows += [_row(each, []) for each in (model.head, model.dictionary)]
    return ModelSummary(
        **_row(model, layers), layers=tuple(LayerSummary(**row) for row in rows)
    )


def _row(whole: Any, layers: Sequence[Any]) -> dict[str, Any]:
    """Returns the fields of a `LayerSummary`."""
    forms = [form for layer in layers for form in forms_in(layer)]
    names = [
        f"{'static' if form.predictor is None else 'dynamic'} "
        f"{type(form.similarity).__name__}"
        for form in forms
    ]
    weights = {id(weight): weight for form in forms for weight in form.weights}
    return {
        "name": whole.name,
        "kind": type(whole).__name__.removeprefix("NeuralSimilarity"),
        "similarity": ", ".join(dict.fromkeys(names)),
        "parameters": whole.count_params(),
        "similarity_parameters": sum(math.prod(each.shape) for each in weights.values()),
        "folds": bool(layers) and all(map(is_foldable, layers)),
    }
