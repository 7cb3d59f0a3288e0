"""What the similarity matrix M of a layer may be.

A similarity turns its parameters, learned or predicted, into the `T x T` block `M` that
all channels and filters share. `M[t, u]` couples the kernel's tap `t` with the input
under tap `u`; the identity is the plain convolution.
"""

from __future__ import annotations

import abc
from typing import Any

import keras
from keras import ops

Tensor = Any


class Similarity(abc.ABC):
    """Base class of similarities; subclass it for a structure of your own.

    A subclass says which parameters `M` has. Everything else (static and dynamic
    layers, equivalent kernels, folding) follows from these three methods:

    * `parameter_shape(taps)`: the shape of the parameters,
    * `parameters_from(matrix)`: the parameters that give (or are nearest to) a matrix,
    * `matrix(parameters)`: `M` of shape `(..., taps, taps)` from parameters of shape
      `(..., *parameter_shape)`.

    A dynamic layer adds the predictor's output to the parameters of the identity, so
    that a predictor of zeros is the plain convolution.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> @keras.saving.register_keras_serializable("doctest")
    ... class Scaled(nsl_keras.similarities.Similarity):
    ...     def parameter_shape(self, taps):
    ...         return (1,)
    ...     def parameters_from(self, matrix):
    ...         return matrix[:1, 0]
    ...     def matrix(self, parameters):
    ...         return parameters[..., None] * keras.ops.eye(9)
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, similarity=Scaled())
    >>> tuple(layer(keras.ops.ones((1, 8, 8, 2))).shape)
    (1, 6, 6, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1, Eq. (2).
    """

    #: Width of the predictor's hidden layer, and whether its output is batch-normalised
    #: (the authors normalise for the diagonal kind alone).
    predictor_filters: int = 128
    predictor_batch_normalization: bool = False

    @abc.abstractmethod
    def parameter_shape(self, taps: int) -> tuple[int, ...]:
        """Returns the shape of the parameters for a kernel of `taps` taps."""

    @abc.abstractmethod
    def parameters_from(self, matrix: Tensor) -> Tensor:
        """Returns the parameters that describe `matrix`, of shape `(taps, taps)`."""

    @abc.abstractmethod
    def matrix(self, parameters: Tensor) -> Tensor:
        """Returns `M`, of shape `(..., taps, taps)`."""

    def equivalent_kernel(self, parameters: Tensor, kernel: Tensor) -> Tensor:
        """Returns `W^[u,c,o] = sum_t W[t,c,o] M[t,u]` for a kernel `(taps, c, o)`."""
        return ops.einsum("tu,tco->uco", self.matrix(parameters), kernel)

    def compare(self, parameters: Tensor, patches: Tensor) -> Tensor:
        """Returns `M x`, of shape `(..., taps, channels)`, for patches of that shape."""
        return ops.matmul(self.matrix(parameters), patches)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Similarity:
        """Builds the similarity from `get_config()`."""
        return cls(**config)


@keras.saving.register_keras_serializable("nsl_keras")
class Diagonal(Similarity):
    """Diagonal neural similarity (DNS): `M = diag(m)`, one weight per tap.

    The similarity is a spatial mask on the kernel. Parameters: `T`, the number of taps.
    Dynamic layers use `M = I + diag(P)` with the predictor's output `P`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> similarity = nsl_keras.similarities.Diagonal()
    >>> similarity.parameter_shape(9)
    (9,)
    >>> tuple(similarity.matrix(keras.ops.ones((9,))).shape)
    (9, 9)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1. The paper
        starts `M` at the identity, and so does this package; the authors' code starts
        the mask at `[1,0,0,0,1,0,0,0,1]`.
    """

    predictor_filters = 64
    predictor_batch_normalization = True

    def parameter_shape(self, taps: int) -> tuple[int, ...]:
        return (taps,)

    def parameters_from(self, matrix: Tensor) -> Tensor:
        return ops.diagonal(matrix)

    def matrix(self, parameters: Tensor) -> Tensor:
        taps = parameters.shape[-1]
        return parameters[..., None] * ops.eye(taps, dtype=parameters.dtype)

    def equivalent_kernel(self, parameters: Tensor, kernel: Tensor) -> Tensor:
        return parameters[:, None, None] * kernel

    def compare(self, parameters: Tensor, patches: Tensor) -> Tensor:
        return parameters[..., None] * patches


@keras.saving.register_keras_serializable("nsl_keras")
class Unconstrained(Similarity):
    """Unconstrained neural similarity (UNS): `M` is any `T x T` matrix.

    Parameters: `T^2`. Dynamic layers use `M = I + P` with the predictor's output `P`, as
    the authors' code does; the paper's Appendix A uses `P` alone.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.similarities.Unconstrained().parameter_shape(9)
    (9, 9)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1.
    """

    def parameter_shape(self, taps: int) -> tuple[int, ...]:
        return (taps, taps)

    def parameters_from(self, matrix: Tensor) -> Tensor:
        return ops.convert_to_tensor(matrix)

    def matrix(self, parameters: Tensor) -> Tensor:
        return parameters


_BY_NAME: dict[str, type[Similarity]] = {
    "diagonal": Diagonal,
    "unconstrained": Unconstrained,
}


def get(identifier: str | dict[str, Any] | Similarity) -> Similarity:
    """Returns a similarity by name, from its serialised form, or as it is.

    Args:
        identifier: `"diagonal"`, `"unconstrained"`, a dictionary from `serialize`, or a
            `Similarity`.

    Returns:
        A `Similarity`.

    Raises:
        ValueError: If the name is unknown; the message lists the known ones.

    Example:

    >>> import nsl_keras
    >>> type(nsl_keras.similarities.get("diagonal")).__name__
    'Diagonal'
    """
    if isinstance(identifier, Similarity):
        return identifier
    if isinstance(identifier, str) and identifier in _BY_NAME:
        return _BY_NAME[identifier]()
    if isinstance(identifier, dict):
        restored = keras.saving.deserialize_keras_object(identifier)
        if isinstance(restored, Similarity):
            return restored
    known = ", ".join(repr(name) for name in _BY_NAME)
    raise ValueError(
        f"`similarity` must be one of {known}, or a "
        f"`nsl_keras.similarities.Similarity`. Received: similarity={identifier!r}"
    )


def serialize(similarity: Similarity) -> str | dict[str, Any]:
    """Returns a similarity as a name, or as Keras serialises objects.

    Args:
        similarity: A `Similarity`.

    Returns:
        What `get` takes back.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.similarities.serialize(nsl_keras.similarities.Unconstrained())
    'unconstrained'
    """
    for name, kind in _BY_NAME.items():
        if type(similarity) is kind:
            return name
    return keras.saving.serialize_keras_object(similarity)
