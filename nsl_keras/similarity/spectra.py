"""Singular values of similarities and of the kernels that they multiply: `spectra`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring
from nsl_keras.similarity.bilinear_form import BilinearForm
from nsl_keras.similarity.recurrent import SimilarityCell
from nsl_keras.similarity.summary import table
from nsl_keras.training.backup import require_before_backup

_TITLES = ("Layer", "Matrix", "Values", "Largest", "Nuclear norm", "Effective rank")


@dataclasses.dataclass(frozen=True, eq=False)
class Spectrum:
    """The singular values of one matrix of a layer.

    Attributes:
        layer: Name of the layer, with its place in other layers; a number is appended to a
            name that an earlier layer has.
        matrix: `"W"`, `"M"`, or `"M^T W"`, the equivalent kernel.
        values: The singular values, largest first, a NumPy array in float64.
    """

    layer: str
    matrix: str
    values: np.ndarray

    @property
    def nuclear_norm(self) -> float:
        """The sum of the singular values."""
        return float(np.sum(self.values))

    @property
    def effective_rank(self) -> float:
        """The exponential of the entropy of the singular values, as shares of their sum."""
        shares = self.values / max(self.nuclear_norm, 1e-300)
        logarithms = np.log(np.where(shares > 0, shares, 1.0))
        return float(np.exp(-np.sum(shares * logarithms))) * float(np.any(shares != 0))


class Spectra(tuple[Spectrum, ...]):
    """Each `Spectrum` of a model; prints as a table."""

    def __str__(self) -> str:
        rows = [list(_TITLES)]
        for each in self:
            numbers = each.values[0], each.nuclear_norm, each.effective_rank
            counts = [each.layer, each.matrix, f"{len(each.values):,}"]
            rows.append(counts + [f"{number:.4g}" for number in numbers])
        return "\n".join(table(rows))

    __repr__ = __str__


def name_of(form: BilinearForm, model: keras.Model) -> str:
    """Returns the name of a similarity's layer, with its place in other layers."""
    return form.path.removeprefix(f"{model.name}/").removesuffix("/bilinear_form")


def spectra(model: keras.Model) -> Spectra:
    """Returns the singular values of `W`, `M` and `M^T W` for each static similarity.

    As matrices, kernels have a row for each tap and channel and a column for each filter;
    depthwise ones, whose channels stay apart, a row for each tap. With a learned shape,
    `M^T W` is `M^T D W`. In a recurrent cell each of the two kernels is a layer.

    Args:
        model: A built Keras model with static neural similarity layers or recurrent cells;
            nested models included.

    Returns:
        A tuple with three entries a layer, which prints as a table. Each has the attributes
        `layer`, `matrix`, `values` (the singular values), `nuclear_norm` and
        `effective_rank`, the exponential of the entropy of the values as shares of their
        sum. A matrix with NaN or infinities has NaN for values.

    Raises:
        ValueError: If the model has no such layer, or is not built.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(8, 3, name="first")
    >>> model = keras.Sequential([keras.Input((16, 16, 3)), layer])
    >>> print(nsl_keras.convert.spectra(model))
    Layer ...
    >>> [each.matrix for each in nsl_keras.convert.spectra(model)]
    ['W', 'M', 'M^T W']
    >>> round(nsl_keras.convert.spectra(model)[1].effective_rank, 3)
    9.0

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 5.1, Eq. (6):
        descent on the factors `M` and `W` leads to another `M^T W` than descent on it.
    """
    found, used = [], set[str]()
    for part in (model, *rewiring.sublayers(model)):
        for form, kernel in _static_forms(part):
            layer = rewiring.unused_name(name_of(form, model), used)
            used.add(layer)
            matrices = {
                "W": _as_matrix(part, kernel),
                "M": form.similarity_matrix,
                "M^T W": _as_matrix(part, form.equivalent_kernel(kernel)),
            }
            for name, matrix in matrices.items():
                found.append(Spectrum(layer, name, _singular_values(matrix)))
    if not found:
        raise ValueError(
            "`model` must have static neural similarity layers. "
            f"Received: model={model.name!r} without any"
        )
    return Spectra(found)


def _static_forms(layer: Any) -> Iterator[tuple[BilinearForm, Any]]:
    """Yields each static `M` that a layer itself holds, with its kernel."""
    if isinstance(layer, SimilarityCell):
        pairs = layer.forms_and_kernels()
    else:
        form = getattr(layer, "bilinear_form", None)
        pairs = [(form, getattr(layer, "kernel", None))]
    for form, kernel in pairs:
        if form is not None and form.predictor is None:
            form.require_static("spectra")
            yield form, ops.convert_to_tensor(kernel)


def _as_matrix(layer: Any, kernel: Any) -> Any:
    if isinstance(layer, keras.layers.Conv2DTranspose):  # Its filters are the third axis.
        kernel = ops.swapaxes(kernel, -1, -2)
    depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
    columns = kernel.shape[-1] * (kernel.shape[-2] if depthwise else 1)
    return ops.reshape(kernel, (-1, columns))


def _singular_values(matrix: Any) -> np.ndarray:
    values = np.asarray(ops.convert_to_numpy(matrix)).astype("float64")
    if not np.isfinite(values).all():
        return np.full(min(values.shape[-2:]) * math.prod(values.shape[:-2]), np.nan)
    found = np.linalg.svd(values, compute_uv=False)
    return np.sort(found, axis=None)[::-1]  # Of all `M`, where a layer has several.


class SimilaritySpectra(keras.callbacks.Callback):
    """Logs, after each epoch, the spectrum of every equivalent kernel `M^T W`.

    For each static similarity layer the epoch's logs gain its nuclear norm and effective
    rank, `<layer>_nuclear_norm` and `<layer>_effective_rank`, as `convert.spectra` has
    them. The logs reach `History` and the callbacks after this one in the list.

    Raises:
        ValueError: In `fit`, for a model without static similarity layers, or after a
            `TrainingBackup` in the list.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityDense(2, name="dense")
    >>> model = keras.Sequential([keras.Input((4,)), layer])
    >>> model.compile("sgd", "mse")
    >>> x, y = keras.ops.ones((8, 4)), keras.ops.ones((8, 2))
    >>> spectra = nsl_keras.callbacks.SimilaritySpectra()
    >>> history = model.fit(x, y, callbacks=[spectra], verbose=0)
    >>> sorted(history.history)
    ['dense_effective_rank', 'dense_nuclear_norm', 'loss']

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 5.1.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        require_before_backup(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for each in spectra(self.model):
            if logs is not None and each.matrix == "M^T W":
                logs[f"{each.layer}_nuclear_norm"] = each.nuclear_norm
                logs[f"{each.layer}_effective_rank"] = each.effective_rank
