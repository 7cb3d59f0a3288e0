"""Singular values of similarities and of the kernels that they multiply (Section 5.1).

Descent on the factors `M` and `W` leads to another `M^T W` than descent on it (Eq. (6)).
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import nesting
from nsl_keras.visualize import figures

_MOST_COLUMNS = 4


def effective_rank(values: np.ndarray) -> float:
    """The exponential of the entropy of singular values, as shares of their sum."""
    shares = values[values > 0] / (values.sum() or 1)
    return float(np.exp(-np.sum(shares * np.log(shares)))) if len(shares) else 0.0


def spectra(model: keras.Model) -> dict[str, dict[str, np.ndarray]]:
    """The singular values, largest first, of `W`, `M` and `M^T W`, by layer.

    Of all static similarities of convolutions and dense layers. As matrices, kernels have a
    row for each tap and channel and a column for each filter; depthwise ones, whose
    channels stay apart, a row for each tap. With a learned shape, `M^T W` is `M^T D W`.
    """
    return {
        layer.path.removeprefix(f"{model.name}/"): {
            "W": _singular_values(_as_matrix(layer, layer.kernel)),
            "M": _singular_values(layer.similarity_matrix),
            "M^T W": _singular_values(_as_matrix(layer, layer.equivalent_kernel)),
        }
        for layer in nesting.sublayers(model)
        if hasattr(type(layer), "equivalent_kernel")
        and hasattr(layer, "kernel")
        and layer.predictor is None
    }


def _as_matrix(layer: Any, kernel: Any) -> Any:
    if isinstance(layer, keras.layers.Conv2DTranspose):  # Its filters are the third axis.
        kernel = ops.swapaxes(kernel, -1, -2)
    depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
    columns = kernel.shape[-1] * (kernel.shape[-2] if depthwise else 1)
    return ops.reshape(kernel, (-1, columns))


def _singular_values(matrix: Any) -> np.ndarray:
    found = np.linalg.svd(ops.convert_to_numpy(matrix).astype("float64"), compute_uv=False)
    return np.sort(found, axis=None)[::-1]  # Of all `M`, where a layer has several.


class SimilaritySpectra(keras.callbacks.Callback):
    """Logs nuclear norm and effective rank of every `M^T W` after each epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for layer, found in spectra(self.model).items():
            values = found["M^T W"]
            if logs is not None:
                logs[f"{layer}_nuclear_norm"] = float(values.sum())
                logs[f"{layer}_effective_rank"] = effective_rank(values)


def plot_spectra(model: keras.Model) -> figures.Figure:
    """Draws the singular values of each layer, relative to the largest.

    The gap between the lines of `W` and `M^T W` shows what `M` does to the kernel.
    """
    found = spectra(model)
    columns = min(len(found), _MOST_COLUMNS)
    rows = math.ceil(len(found) / columns)
    figure = figures.new_figure(2.4 * columns + 0.6, 2.2 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    colors = figures.GREY, figures.ORANGE, figures.BLUE
    for axis, (layer, matrices) in zip(axes.flat, found.items(), strict=False):
        for (name, values), color in zip(matrices.items(), colors, strict=True):
            label = f"{name}: {effective_rank(values):.1f}"
            places = range(1, len(values) + 1)
            axis.plot(places, values / (values[0] or 1), label=label, color=color)
        axis.legend(title="effective rank", fontsize=7, title_fontsize=7)
        axis.set_title(layer.replace("/", "\n"), fontsize=7)
    figure.supxlabel("index of the singular value", fontsize=8)
    figure.supylabel("relative to the largest", fontsize=8)
    return figure
