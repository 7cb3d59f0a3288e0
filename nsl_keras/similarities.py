"""The structures of `M`.

A similarity turns its parameters, learned or predicted, into the `T x T` block `M` that
all channels and filters share by default. `M[t, u]` couples the kernel's tap (position) `t`
with the input under tap `u`; if `M` is the identity, a layer equals the plain layer.
"""

from __future__ import annotations

import abc
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32, outside_traces, wide_dtype
from nsl_keras.configs import from_arguments, named


class Similarity(abc.ABC):
    """Base class of similarities: the structure of `M`, its start and its penalties.

    A similarity has no weights: each layer that you pass it to makes its own `M`.

    Args:
        initializer: Initializer of a static `M`, called with its shape `(T, T)`. Each
            structure takes its parameters from that matrix.
        regularizer: Regularizer of the matrix `M`, toward zero or, with
            `nsl_keras.regularizers.TowardsIdentity`, toward the identity. For a predicted
            `M` the penalty is the mean over all predictions, so the regularizer must return
            the sum over the matrices `(n, T, T)`, as `"l2"` and `TowardsIdentity` do.
        constraint: Constraint on the parameters of a static `M`.
        shared_by: What shares one `M`: the `"layer"`, as in the paper; each `"filter"`; or
            an int, the number of consecutive input channels. All matrices start equal. Only
            for static layers.
        learn_shape: bool, whether to learn which taps the kernel keeps: `D M` takes the
            place of `M`, with a Boolean diagonal `D`, the layer's `learned_shape`. Not for
            recurrent layers.
        shape_threshold: float in [0, 1). A tap is kept while its parameter (initially 1)
            exceeds this threshold.

    For a custom structure, write a subclass with two methods:

    * `parameters_from(matrix)` returns the parameters of a matrix (or of the nearest
      possible matrix), and thus their shape;
    * `matrix(parameters, size)` returns `M` of shape `(..., size, size)` from parameters
      with any axes in front.

    If there is a faster way, override `equivalent_kernel`, `apply_to_windows` and
    `apply_to_rows`, which follow from `matrix`. To save models, register the class with
    `keras.saving.register_keras_serializable` and add its own arguments in `get_config`.
    Set `static_only` if the structure cannot be predicted. If `shared_by_channels` is
    false, `M` is not one block for all channels: `size` counts the taps of every channel,
    and the similarity must be static.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> class Scaled(nsl_keras.similarities.Similarity):
    ...     def parameters_from(self, matrix):
    ...         return matrix[:1, 0]
    ...     def matrix(self, parameters, size):
    ...         identity = keras.ops.eye(size, dtype=parameters.dtype)
    ...         return parameters[..., None] * identity
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, similarity=Scaled())

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1, Eq. (2); one `M`
        per layer, Section 4; regularizers, Section 3.4; kernel shape, Section 3.5, Eqs. (4)
        and (5), whose `R` is `M` here.
    """

    static_only: bool = False
    shared_by_channels: bool = True

    def __init__(
        self,
        *,
        initializer: Any = "identity",
        regularizer: Any = None,
        constraint: Any = None,
        shared_by: str | int = "layer",
        learn_shape: bool = False,
        shape_threshold: float = 0.5,
    ) -> None:
        self.initializer = keras.initializers.get(initializer)
        self.regularizer = keras.regularizers.get(regularizer)
        self.constraint = keras.constraints.get(constraint)
        if isinstance(shared_by, str):
            sharing = ("layer", "filter")
            self.shared_by: Any = validation.one_of(shared_by, sharing, "shared_by")
        else:
            self.shared_by = validation.positive_integer(shared_by, "shared_by")
        self.learn_shape = validation.boolean(learn_shape, "learn_shape")
        self.shape_threshold = validation.fraction(shape_threshold, "shape_threshold")

    @abc.abstractmethod
    def parameters_from(self, matrix: np.ndarray) -> Any:
        """Returns the parameters that describe a NumPy matrix of shape `(size, size)`."""

    @abc.abstractmethod
    def matrix(self, parameters: Tensor, size: int) -> Tensor:
        """Returns `M`, of shape `(..., size, size)`."""

    def equivalent_kernel(self, parameters: Tensor, kernel: Tensor) -> Tensor:
        """Returns `W^[u,c,o] = sum_t W[t,c,o] M[t,u]` for a kernel `(..., taps, c, o)`.

        Parameters of several `M` have the same axes in front. Unless the channels share
        `M`, the taps of all channels are on the axis of the taps.
        """
        matrix = self.matrix(parameters, kernel.shape[-3])
        # NSL Eq. (2): fold, W^T (M x) = (M^T W)^T x
        return ops.einsum("...tu,...tco->...uco", matrix, kernel)

    def apply_to_windows(self, parameters: Tensor, windows: list[Tensor]) -> list[Tensor]:
        """Returns `M(x) x` at every output position, tap after tap on the last axis.

        The windows are the input under each tap, of shape `(batch, *positions, channels)`;
        the parameters have the same axes in front. The result may have several parts.
        """
        patches = ops.stack(windows, axis=-2)
        # NSL Eq. (3): M(x) x
        product = ops.matmul(self.matrix(parameters, len(windows)), patches)
        *positions, taps, channels = ops.shape(product)
        return [ops.reshape(product, (*positions, taps * channels))]

    def apply_to_rows(self, parameters: Tensor, rows: Tensor) -> Tensor:
        """Returns `M x` for the vectors `x` in rows `(..., taps)`."""
        matrix = self.matrix(parameters, rows.shape[-1])
        return ops.matmul(rows, ops.swapaxes(matrix, -1, -2))

    def start(self, size: int, dtype: str) -> np.ndarray:
        """Returns the parameters of the initial `M`."""
        # In half precision an eigenvalue might round below zero.
        wide = wide_dtype(dtype)
        with outside_traces():  # Some similarities look at the values.
            matrix = ops.convert_to_numpy(self.initializer((size, size), dtype=wide))
            return np.asarray(ops.convert_to_numpy(self.parameters_from(matrix)))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments; a subclass adds its own."""
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "regularizer": keras.regularizers.serialize(self.regularizer),
            "constraint": keras.constraints.serialize(self.constraint),
            "shared_by": self.shared_by,
            "learn_shape": self.learn_shape,
            "shape_threshold": self.shape_threshold,
        }

    from_config = classmethod(from_arguments)


@keras.saving.register_keras_serializable("nsl_keras")
class Diagonal(Similarity):
    """Diagonal neural similarity (DNS): `M = diag(m)`, one weight per tap.

    It masks the kernel's `T` taps. Dynamic layers use `M(x) = I + diag(P(x))` with the
    predictor's output `P(x)`.

    Args:
        **kwargs: Arguments of `Similarity`.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> nsl_keras.similarities.Diagonal().parameters_from(np.eye(9)).shape
    (9,)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1. Its `M` starts
        at the identity, as here; the authors' code starts at `[1,0,0,0,1,0,0,0,1]`.
    """

    def parameters_from(self, matrix: np.ndarray) -> Any:
        return np.diagonal(matrix)

    def start(self, size: int, dtype: str) -> np.ndarray:
        """Returns the parameters of the initial `M`."""
        if isinstance(self.initializer, keras.initializers.Identity):
            # Without a matrix, which may be large.
            return np.full(size, self.initializer.gain)
        return super().start(size, dtype)

    def matrix(self, parameters: Tensor, size: int) -> Tensor:
        # Not `parameters[..., None]`, a slice that LiteRT refuses.
        return ops.expand_dims(parameters, -1) * ops.eye(size, dtype=parameters.dtype)

    def equivalent_kernel(self, parameters: Tensor, kernel: Tensor) -> Tensor:
        return parameters[..., None, None] * kernel  # NSL Eq. (2) with a diagonal `M`

    def apply_to_windows(self, parameters: Tensor, windows: list[Tensor]) -> list[Tensor]:
        # One product per tap: nothing has to be gathered in one large tensor.
        masks = ops.split(parameters, len(windows), axis=-1)
        # NSL Eq. (3): M(x) x
        return [mask * window for mask, window in zip(masks, windows, strict=True)]

    def apply_to_rows(self, parameters: Tensor, rows: Tensor) -> Tensor:
        # Not `parameters[..., None, :]`, a slice that ONNX refuses.
        return ops.expand_dims(parameters, -2) * rows


@keras.saving.register_keras_serializable("nsl_keras")
class Unconstrained(Similarity):
    """Unconstrained neural similarity (UNS): `M` is any `T x T` matrix.

    Dynamic layers use `M(x) = I + P(x)` with the predictor's output `P(x)`.

    Args:
        **kwargs: Arguments of `Similarity`.

    Example:

    >>> import nsl_keras
    >>> similarity = nsl_keras.similarities.Unconstrained(regularizer="l1", shared_by=3)
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, similarity=similarity)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1.
    """

    def parameters_from(self, matrix: np.ndarray) -> Any:
        return matrix

    def matrix(self, parameters: Tensor, size: int) -> Tensor:
        return parameters


def _lower_triangle(entries: Tensor, size: int, diagonal: int) -> Tensor:
    """Returns matrices with these entries, row by row, on and below a diagonal."""
    # All other places read the zero that is appended.
    places = np.full((size, size), entries.shape[-1], "int32")
    places[np.tril_indices(size, diagonal)] = np.arange(entries.shape[-1])
    zero = ops.zeros((*ops.shape(entries)[:-1], 1), dtype=entries.dtype)
    return ops.take(ops.concatenate([entries, zero], axis=-1), places, axis=-1)


@keras.saving.register_keras_serializable("nsl_keras")
class Symmetric(Similarity):
    """Symmetric neural similarity: `M = (A + A^T) / 2` for any `T x T` matrix `A`.

    Dynamic layers use `M(x) = I + (P(x) + P(x)^T) / 2` with the predictor's output `P(x)`.

    Args:
        **kwargs: Arguments of `Similarity`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> similarity = nsl_keras.similarities.Symmetric()
    >>> matrix = similarity.matrix(keras.random.normal((9, 9), seed=0), 9)
    >>> bool(keras.ops.all(matrix == keras.ops.transpose(matrix)))
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.4.
    """

    def parameters_from(self, matrix: np.ndarray) -> Any:
        return (matrix + matrix.T) / 2

    def matrix(self, parameters: Tensor, size: int) -> Tensor:
        return 0.5 * (parameters + ops.swapaxes(parameters, -1, -2))


@keras.saving.register_keras_serializable("nsl_keras")
class PositiveSemidefinite(Similarity):
    """Positive semidefinite neural similarity: `M = L L^T`, `L` lower triangular.

    `x^T M x` is never negative, as in distance metric learning. The parameters are the
    `T (T + 1) / 2` entries of the Cholesky factor `L`, row by row. Dynamic layers use
    `L(x) = I + tril(P(x))` with the predictor's output `P(x)`.

    Args:
        **kwargs: Arguments of `Similarity`.

    Raises:
        ValueError: If an initial `M` is not symmetric and positive semidefinite.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> nsl_keras.similarities.PositiveSemidefinite().parameters_from(np.eye(9)).shape
    (45,)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.4.
    """

    def parameters_from(self, matrix: np.ndarray) -> Any:
        values = matrix.astype("float64")
        eigenvalues, vectors = np.linalg.eigh(values)
        rounding = 1e-5 * max(float(np.max(np.abs(values))), 1e-30)
        asymmetry = np.max(np.abs(values - values.T))
        fits = asymmetry <= rounding and np.min(eigenvalues) >= -rounding
        demand = "one that gives a symmetric, positive semidefinite matrix"
        validation.require(fits, "initializer", demand, self.initializer)
        # This covers singular matrices: `root^T root = M`, and its QR factor is `L^T`.
        root = np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * vectors.T
        factor = np.transpose(np.linalg.qr(root, mode="r"))
        factor = factor * np.where(np.diagonal(factor) < 0, -1.0, 1.0)
        return factor[np.tril_indices(len(values))]

    def matrix(self, parameters: Tensor, size: int) -> Tensor:
        factor = _lower_triangle(parameters, size, 0)
        return ops.matmul(factor, ops.swapaxes(factor, -1, -2))


@keras.saving.register_keras_serializable("nsl_keras")
class Orthogonal(Similarity):
    """Orthogonal neural similarity: `M^T M = I`, by a Cayley transform.

        M = (I + A) (I - A)^-1,    A^T = -A

    The parameters are the `T (T - 1) / 2` entries of the skew-symmetric `A` below its
    diagonal, row by row. `M` rotates the input, so filters keep their norms and, if they
    share `M`, their angles. The transform reaches every rotation without the eigenvalue -1.
    Dynamic layers predict `A`.

    Args:
        **kwargs: Arguments of `Similarity`.

    Raises:
        ValueError: If an initial `M` is not orthogonal, or has the eigenvalue -1.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> nsl_keras.similarities.Orthogonal().parameters_from(np.eye(8)).shape
    (28,)

    Reference:
        Orthogonal Finetuning (Qiu et al., NeurIPS 2023), Sections 3.2 and 3.3, is the
        static layer with blocks of features and a frozen kernel.
    """

    def parameters_from(self, matrix: np.ndarray) -> Any:
        wide = matrix.astype("float64")
        identity = np.eye(len(wide))
        is_orthogonal = np.allclose(wide.T @ wide, identity, atol=1e-4)
        fits = is_orthogonal and np.min(np.abs(np.linalg.eigvals(wide) + 1)) >= 1e-3
        demand = "one that gives an orthogonal matrix without the eigenvalue -1"
        validation.require(fits, "initializer", demand, self.initializer)
        skew = (wide - identity) @ np.linalg.inv(wide + identity)
        return skew[np.tril_indices(len(wide), -1)]

    def matrix(self, parameters: Tensor, size: int) -> Tensor:
        lower = _lower_triangle(at_least_float32(parameters), size, -1)
        skew = lower - ops.swapaxes(lower, -1, -2)
        identity = ops.eye(size, dtype=skew.dtype)
        # (I + A) and (I - A)^-1 commute.
        matrix = ops.solve(identity - skew, identity + skew)
        return ops.cast(matrix, parameters.dtype)


@keras.saving.register_keras_serializable("nsl_keras")
class Sparse(Similarity):
    """Sparse neural similarity: only `nonzeros` entries of `M` are nonzero.

    `M` keeps the entries of largest magnitude and, among equal entries, those whose row and
    column are nearest to the middle, in the order of the taps. Its gradient updates all
    `T^2` parameters (straight-through), so an entry can come back. `nonzeros=1` computes
    one spatial shift shared by all channels, then a 1x1 convolution. Only for static
    layers.

    Args:
        nonzeros: int from 1 to `T^2`, or `None` for the number of taps. With fewer nonzeros
            than taps, `M` cannot start at the identity.
        **kwargs: Arguments of `Similarity`.

    Raises:
        ValueError: If `nonzeros` is not positive, or above `T^2` when the layer is built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> similarity = nsl_keras.similarities.Sparse(nonzeros=2)
    >>> matrix = similarity.matrix(keras.random.normal((9, 9), seed=0), 9)
    >>> int(keras.ops.sum(matrix != 0))
    2

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.4.
    """

    static_only = True

    def __init__(self, nonzeros: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check = validation.positive_integer
        self.nonzeros = validation.optional(check, nonzeros, "nonzeros")

    def parameters_from(self, matrix: np.ndarray) -> Any:
        demand = f"at most {matrix.size}, the number of entries of `M`"
        fits = (self.nonzeros or 1) <= matrix.size
        validation.require(fits, "nonzeros", demand, self.nonzeros)
        return matrix

    def matrix(self, parameters: Tensor, size: int) -> Tensor:
        from_middle = np.abs(np.arange(size) - (size - 1) / 2)
        distances = from_middle[:, None] + from_middle[None, :]
        order = np.argsort(distances.reshape(-1), kind="stable").astype("int32")
        magnitudes = ops.abs(ops.stop_gradient(parameters))
        magnitudes = ops.reshape(magnitudes, (*parameters.shape[:-2], size**2))
        # The sort is stable, so that equal entries rank by their place in `order`.
        ranks = ops.argsort(ops.argsort(-ops.take(magnitudes, order, axis=-1)))
        kept = ops.take(ranks, np.argsort(order), axis=-1) < (self.nonzeros or size)
        mask = ops.reshape(ops.cast(kept, parameters.dtype), parameters.shape)
        frozen = ops.stop_gradient(parameters)
        return mask * frozen + (parameters - frozen)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "nonzeros": self.nonzeros}


@keras.saving.register_keras_serializable("nsl_keras")
class Full(Unconstrained):
    """Full neural similarity: one `(c T) x (c T)` matrix `M`, not shared by the channels.

    `M` has `(c T)^2` parameters for the `c` channels that a filter reads (one group). Rows
    and columns run over the taps of the first channel, then of the second, and so on. Only
    for static convolutions.

    Args:
        **kwargs: Arguments of `Similarity`.

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


#: The built-in similarities by name.
KINDS: dict[str, type[Similarity]] = {
    "diagonal": Diagonal,
    "unconstrained": Unconstrained,
    "symmetric": Symmetric,
    "positive_semidefinite": PositiveSemidefinite,
    "orthogonal": Orthogonal,
    "sparse": Sparse,
    "full": Full,
}


def get(identifier: str | dict[str, Any] | Similarity) -> Similarity:
    """Returns a similarity by name, from its serialized form, or unchanged.

    Args:
        identifier: `"diagonal"`, `"unconstrained"`, `"symmetric"`,
            `"positive_semidefinite"`, `"orthogonal"`, `"sparse"`, `"full"`, a dictionary
            from `keras.saving.serialize_keras_object`, or a `Similarity`; anything else
            raises a ValueError.

    Example:

    >>> import nsl_keras
    >>> type(nsl_keras.similarities.get("diagonal")).__name__
    'Diagonal'
    """
    others = "or a `nsl_keras.similarities.Similarity`"
    found: Similarity = named(identifier, "similarity", KINDS, Similarity, others)
    return found
