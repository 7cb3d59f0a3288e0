"""The einsum layer with a neural similarity, as attention uses it."""

from __future__ import annotations

import functools

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.dense import FeatureSimilarity


@functools.cache
def contracted_axes(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the contracted axes of the kernel and of the input, in the input's order.

    Axes of the input that follow an ellipsis count from its end.
    """
    sides, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = sides.split(",")
    contracted = [
        axis for axis in inputs if axis in kernel and axis not in outputs and axis != "."
    ]
    others = set(kernel) - {*contracted}
    is_product = all(axis in outputs and axis not in inputs for axis in others)
    is_plain = len({*kernel}) == len(kernel) and len({*contracted}) == len(contracted)
    demand = (
        "one in which each axis of the kernel occurs once, and in either the input or "
        "the output"
    )
    fits = bool(contracted) and is_product and is_plain
    validation.require(fits, "equation", demand, equation)
    before = len(inputs.partition("...")[0])  # Without an ellipsis, all axes.
    places = [inputs.index(axis) for axis in contracted]
    return tuple(kernel.index(axis) for axis in contracted), tuple(
        place if place < before else place - len(inputs) for place in places
    )


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityEinsumDense(FeatureSimilarity, keras.layers.EinsumDense):
    """Einsum layer with a learned bilinear similarity of the contracted features.

    The layer, an addition to the paper, computes `y = W^T M x + b` as
    `NeuralSimilarityDense` does. The features are the axes that the equation sums over,
    flattened in the input's order: `d` in `"btd,ndh->btnh"`, `n` and `h` in
    `"btnh,nhd->btd"`.

    Args:
        **kwargs: Arguments of `keras.layers.EinsumDense` and `NeuralSimilarityDense`.

    Raises:
        ValueError: As in `NeuralSimilarityDense`, for a predictor, and for an equation in
            which an axis of the kernel is repeated or belongs to both input and output, or
            to neither.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityEinsumDense(
    ...     "btd,ndh->btnh", (None, 2, 4), similarity="orthogonal", block_size=3)
    >>> tuple(layer(keras.ops.ones((2, 5, 6))).shape)
    (2, 5, 2, 4)
    """

    plain = keras.layers.EinsumDense
    dynamic_form = None

    @property
    def feature_axes(self) -> tuple[int, ...]:
        """The contracted axes of the kernel."""
        return contracted_axes(self.equation)[0]

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The contracted axes of the input."""
        return contracted_axes(self.equation)[1]

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        return ops.einsum(self.equation, inputs, kernel)
