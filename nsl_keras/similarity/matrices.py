"""What the similarity matrix M of a layer may be.

A similarity turns its parameters, learned or predicted, into the `T x T` block `M` that
all channels and filters share. `M[t, u]` couples the kernel's tap `t` with the input
under tap `u`; the identity is the plain convolution.
"""

from __future__ import annotations

import abc
import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.registry import ClassNames


class Similarity(abc.ABC):
    """Base class of similarities; subclass it for a structure of your own.

    A subclass says which parameters `M` has. Everything else (static and dynamic
    layers, equivalent kernels, folding) follows from these three methods, and where they
    have to know the size of the kernel, from `for_kernel_size`:

    * `parameter_shape(taps)`: the shape of the parameters,
    * `parameters_from(matrix)`: the parameters that give (or are nearest to) a matrix,
    * `matrix(parameters)`: `M` of shape `(..., taps, taps)` from parameters of shape
      `(..., *parameter_shape)`.

    A dynamic layer adds the predictor's output to the parameters of the identity, so
    that a predictor of zeros is the plain convolution. `equivalent_kernel`,
    `compare_windows` and `compare_rows` follow from `matrix`, and may be overridden with
    faster ways; `register` gives the structure a name.

    Two class attributes narrow the use: `static_only`, for structures that no predictor
    can give, and `shared_by_channels`, whether `M` is one block for all channels. Where it
    is not, `taps` counts the taps of every channel, channel after channel, and no predictor
    can give it.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> @nsl_keras.similarities.register("scaled")
    ... class Scaled(nsl_keras.similarities.Similarity):
    ...     def parameter_shape(self, taps):
    ...         return (1,)
    ...     def parameters_from(self, matrix):
    ...         return matrix[:1, 0]
    ...     def matrix(self, parameters):
    ...         return parameters[..., None] * keras.ops.eye(9)  # For 3x3 kernels.
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, similarity="scaled")
    >>> tuple(layer(keras.ops.ones((1, 8, 8, 2))).shape)
    (1, 6, 6, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1, Eq. (2).
    """

    #: Width of the predictor's hidden layer, and whether its output is batch-normalized
    #: (the authors normalize for the diagonal kind alone).
    predictor_filters: int = 128
    predictor_batch_normalization: bool = False
    static_only: bool = False
    shared_by_channels: bool = True

    @property
    def takes_predictor(self) -> bool:
        """Whether a predictor can give it."""
        return self.shared_by_channels and not self.static_only

    def for_kernel_size(self, kernel_size: tuple[int, ...]) -> Similarity:
        """Returns the similarity for a kernel whose taps lie on a grid of this size.

        Raises:
            ValueError: If it cannot serve such a kernel.
        """
        del kernel_size
        return self

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
        taps, channels, filters = kernel.shape
        # `W^T M x = (M^T W)^T x`
        if self.shared_by_channels:
            matrix = self._matrix_of(parameters, taps)
            return ops.einsum("tu,tco->uco", matrix, kernel)  # NSL Eq. (2)
        matrix = self._matrix_of(parameters, channels * taps)
        by_channel = ops.reshape(ops.swapaxes(kernel, 0, 1), (channels * taps, filters))
        equivalent = ops.matmul(ops.transpose(matrix), by_channel)  # NSL Eq. (1)
        return ops.swapaxes(ops.reshape(equivalent, (channels, taps, filters)), 0, 1)

    def compare_windows(self, parameters: Tensor, windows: list[Tensor]) -> list[Tensor]:
        """Returns `M(p) x_p` at every output position of a convolution.

        Args:
            parameters: Tensor of shape `(batch, *positions, *parameter_shape)`.
            windows: The input under each of the taps, of shape
                `(batch, *positions, channels)`.

        Returns:
            `M(p) x_p`, tap after tap along the last axis, in one part or several.
        """
        patches = ops.stack(windows, axis=-2)
        compared = ops.matmul(self._matrix_of(parameters, len(windows)), patches)
        *positions, taps, channels = ops.shape(compared)
        return [ops.reshape(compared, (*positions, taps * channels))]

    def compare_rows(self, parameters: Tensor, rows: Tensor) -> Tensor:
        """Returns `M x` for the vectors `x` in rows `(..., taps)`."""
        matrix = self._matrix_of(parameters, rows.shape[-1])
        return ops.matmul(rows, ops.swapaxes(matrix, -1, -2))

    def _matrix_of(self, parameters: Tensor, taps: int) -> Tensor:
        matrix = self.matrix(parameters)
        if tuple(matrix.shape[-2:]) != (taps, taps):
            raise ValueError(
                f"`similarity.matrix` must return matrices of shape {(taps, taps)} for "
                "this kernel; `for_kernel_size` tells a similarity of which size that is. "
                f"Received: shape {tuple(matrix.shape)} from {self!r}"
            )
        return matrix

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Similarity:
        """Builds the similarity from `get_config()`."""
        return cls(**config)


_NAMES = ClassNames("similarity", Similarity, "nsl_keras.similarities.Similarity")

_Class = TypeVar("_Class", bound=type[Similarity])


def register(name: str) -> Callable[[_Class], _Class]:
    """Returns a class decorator that gives a `Similarity` a name.

    Layers then take the name as `similarity=`, and models with it load from files where
    the class has been registered too. Called without arguments, the class is what the name
    stands for.

    Args:
        name: The name.

    Raises:
        ValueError: If the name is taken by another class.

    Example:

    >>> import nsl_keras
    >>> @nsl_keras.similarities.register("half_diagonal")
    ... class HalfDiagonal(nsl_keras.similarities.Diagonal):
    ...     pass
    >>> type(nsl_keras.similarities.get("half_diagonal")).__name__
    'HalfDiagonal'
    """
    return _NAMES.register(name)


@register("diagonal")
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
        return parameters[:, None, None] * kernel  # NSL Eq. (2), `M` being diagonal.

    def compare_windows(self, parameters: Tensor, windows: list[Tensor]) -> list[Tensor]:
        # Each tap's mask on its own: nothing has to be gathered in one large tensor.
        masks = ops.split(parameters, len(windows), axis=-1)
        return [mask * window for mask, window in zip(masks, windows, strict=True)]

    def compare_rows(self, parameters: Tensor, rows: Tensor) -> Tensor:
        return parameters[..., None, :] * rows


@register("unconstrained")
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


@register("symmetric")
@keras.saving.register_keras_serializable("nsl_keras")
class Symmetric(Similarity):
    """Symmetric neural similarity: `M = (A + A^T) / 2` for any `T x T` matrix `A`.

    Taps compare with one another the same way in both directions. Parameters: `T^2`.
    Dynamic layers use `M = I + (P + P^T) / 2` with the predictor's output `P`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> similarity = nsl_keras.similarities.Symmetric()
    >>> matrix = similarity.matrix(keras.random.normal((9, 9), seed=0))
    >>> bool(keras.ops.all(matrix == keras.ops.transpose(matrix)))
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.4, "Structural
        regularization".
    """

    def parameter_shape(self, taps: int) -> tuple[int, ...]:
        return (taps, taps)

    def parameters_from(self, matrix: Tensor) -> Tensor:
        return self.matrix(ops.convert_to_tensor(matrix))

    def matrix(self, parameters: Tensor) -> Tensor:
        return 0.5 * (parameters + ops.swapaxes(parameters, -1, -2))


@register("positive_semidefinite")
@keras.saving.register_keras_serializable("nsl_keras")
class PositiveSemidefinite(Similarity):
    """Positive semidefinite neural similarity: `M = L L^T`, `L` lower triangular.

    `x^T M x` is never negative, as in distance metric learning. The parameters are the
    `T (T + 1) / 2` entries of the Cholesky factor `L`, row by row. Dynamic layers use
    `L = I + tril(P)` with the predictor's output `P`.

    Raises:
        ValueError: If an initial `M` is not symmetric and positive semidefinite.

    Example:

    >>> import nsl_keras
    >>> similarity = nsl_keras.similarities.PositiveSemidefinite()
    >>> similarity.parameter_shape(9)
    (45,)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1 and Section
        3.4, "Structural regularization" (`M = L L^T`).
    """

    def parameter_shape(self, taps: int) -> tuple[int, ...]:
        return (taps * (taps + 1) // 2,)

    def parameters_from(self, matrix: Tensor) -> Tensor:
        values = np.asarray(ops.convert_to_numpy(matrix), "float64")
        eigenvalues, vectors = np.linalg.eigh(values)
        largest = max(float(np.max(np.abs(values))), 1e-30)
        if (
            np.max(np.abs(values - values.T)) > 1e-5 * largest
            or np.min(eigenvalues) < -1e-5 * largest
        ):
            raise ValueError(
                "`similarity_initializer` must give a symmetric, positive semidefinite "
                "matrix for the similarity 'positive_semidefinite'. Received: a matrix "
                f"with eigenvalues down to {np.min(eigenvalues):.3g}"
            )
        # Of a singular matrix too: `root^T root = M`, and its QR factor is `L^T`.
        root = np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * vectors.T
        factor = np.transpose(np.linalg.qr(root, mode="r"))
        factor = factor * np.where(np.diagonal(factor) < 0, -1.0, 1.0)
        return ops.convert_to_tensor(factor[np.tril_indices(len(values))])

    def matrix(self, parameters: Tensor) -> Tensor:
        entries = parameters.shape[-1]
        taps = (math.isqrt(8 * entries + 1) - 1) // 2
        # Above the diagonal every entry reads the zero that is appended.
        places = np.full((taps, taps), entries, "int32")
        places[np.tril_indices(taps)] = np.arange(entries)
        padded = ops.concatenate([parameters, ops.zeros_like(parameters[..., :1])], axis=-1)
        factor = ops.take(padded, places, axis=-1)
        return ops.matmul(factor, ops.swapaxes(factor, -1, -2))


@register("sparse")
@keras.saving.register_keras_serializable("nsl_keras")
class Sparse(Similarity):
    """Sparse neural similarity: `nonzeros` entries of `M` live, the others exactly zero.

    The entries of largest magnitude are kept; ties go to the entry nearest to the centre
    tap. All `T^2` parameters are trained: the gradient with respect to `M` updates them as
    it is (straight-through), so that an entry can come back. `nonzeros=1` is one spatial
    shift shared by all channels, and a 1x1 convolution. For soft sparsity take another
    kind, with `similarity_regularizer="l1"`. Static layers only.

    Args:
        nonzeros: int from 1 to `T^2`, or `None` for as many as there are taps, which is
            the least that can hold the identity: with fewer, the layer does not start as
            the plain convolution.

    Raises:
        ValueError: If `nonzeros` is not positive, or above `T^2` when the layer is built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> similarity = nsl_keras.similarities.Sparse(nonzeros=2)
    >>> matrix = similarity.matrix(keras.random.normal((9, 9), seed=0))
    >>> int(keras.ops.sum(matrix != 0))
    2

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.4, "Sparsity
        regularization".
    """

    static_only = True

    def __init__(self, nonzeros: int | None = None) -> None:
        self.nonzeros = validation.optional(
            validation.positive_integer, nonzeros, "nonzeros"
        )
        self._kernel_size: tuple[int, ...] | None = None

    def for_kernel_size(self, kernel_size: tuple[int, ...]) -> Sparse:
        taps = math.prod(kernel_size)
        if self.nonzeros is not None and self.nonzeros > taps**2:
            raise ValueError(
                f"`nonzeros` must be at most {taps**2}, the entries of `M` for "
                f"kernel_size={kernel_size}. Received: nonzeros={self.nonzeros}"
            )
        similarity = copy.copy(self)
        similarity._kernel_size = kernel_size
        return similarity

    def parameter_shape(self, taps: int) -> tuple[int, ...]:
        return (taps, taps)

    def parameters_from(self, matrix: Tensor) -> Tensor:
        return ops.convert_to_tensor(matrix)

    def matrix(self, parameters: Tensor) -> Tensor:
        taps = parameters.shape[-1]
        order = _entries_from_centre(self._kernel_size or (taps,))
        magnitudes = ops.reshape(ops.abs(ops.stop_gradient(parameters)), (-1,))
        # A stable sort, so that equals rank by their place in `order`.
        ranks = ops.argsort(ops.argsort(-ops.take(magnitudes, order)))
        kept = ops.take(ranks, np.argsort(order)) < (self.nonzeros or taps)
        mask = ops.reshape(ops.cast(kept, parameters.dtype), (taps, taps))
        frozen = ops.stop_gradient(parameters)
        return mask * frozen + (parameters - frozen)

    def get_config(self) -> dict[str, Any]:
        return {"nonzeros": self.nonzeros}


def _entries_from_centre(kernel_size: tuple[int, ...]) -> np.ndarray:
    """Numbers of the entries of `M`, those whose taps lie nearest to the centre first."""
    grid = np.array(list(itertools.product(*(range(size) for size in kernel_size))))
    from_centre = np.sum((grid - (np.array(kernel_size) - 1) / 2) ** 2, axis=-1)
    distances = from_centre[:, None] + from_centre[None, :]
    return np.argsort(distances.reshape(-1), kind="stable").astype("int32")


@register("full")
@keras.saving.register_keras_serializable("nsl_keras")
class Full(Similarity):
    """Full neural similarity: one `(c T) x (c T)` matrix `M`, not shared by the channels.

    Rows and columns run over the taps of the first channel, then those of the second, and
    so on; `c` is the number of channels that a filter reads (those of one group). It has
    `(c T)^2` parameters, more than the kernel itself. Static convolutions only.

    Example:

    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, similarity="full")
    >>> layer.build((None, 8, 8, 2))
    >>> tuple(layer.similarity_matrix.shape)
    (18, 18)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1, Eq. (1).
    """

    static_only = True
    shared_by_channels = False

    def parameter_shape(self, taps: int) -> tuple[int, ...]:
        return (taps, taps)

    def parameters_from(self, matrix: Tensor) -> Tensor:
        return ops.convert_to_tensor(matrix)

    def matrix(self, parameters: Tensor) -> Tensor:
        return parameters


def get(identifier: str | dict[str, Any] | Similarity) -> Similarity:
    """Returns a similarity by name, from its serialized form, or as it is.

    Args:
        identifier: `"diagonal"`, `"unconstrained"`, `"symmetric"`,
            `"positive_semidefinite"`, `"sparse"`, `"full"`, a name of your own from
            `register`, a dictionary from `serialize`, or a `Similarity`.

    Returns:
        A `Similarity`.

    Raises:
        ValueError: If the name is unknown; the message lists the known ones.

    Example:

    >>> import nsl_keras
    >>> type(nsl_keras.similarities.get("diagonal")).__name__
    'Diagonal'
    """
    similarity: Similarity = _NAMES.instance(identifier)
    return similarity


def serialize(similarity: Similarity) -> str | dict[str, Any]:
    """Returns a similarity as a name, or as Keras serializes objects.

    Args:
        similarity: A `Similarity`.

    Returns:
        What `get` takes back.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.similarities.serialize(nsl_keras.similarities.Unconstrained())
    'unconstrained'
    """
    name_or_config: str | dict[str, Any] = _NAMES.serialize(similarity)
    return name_or_config


def around(identity: np.ndarray, prediction: Tensor, dtype: str) -> Tensor:
    """Returns the parameters of a predicted `M`: those of the identity, plus a prediction.

    Args:
        identity: Parameters of the identity.
        prediction: Tensor of shape `(..., outputs)`; it is added in float32.
        dtype: Dtype of the result.

    Returns:
        Tensor of shape `(..., *identity.shape)`.
    """
    wide = keras.backend.result_type(prediction.dtype, "float32")
    shape = (*ops.shape(prediction)[:-1], *identity.shape)
    residual = ops.cast(ops.reshape(prediction, shape), wide)
    return ops.cast(residual + ops.cast(identity, wide), dtype)
