"""A picture of the singular values of static similarities and their kernels."""

from __future__ import annotations

import itertools
import math

import keras

from nsl_keras.similarity.spectra import spectra
from nsl_keras.visualize import figures

_MOST_COLUMNS = 4


def plot_spectra(model: keras.Model) -> figures.Figure:
    """Draws the singular values of `W`, `M` and `M^T W` for each static similarity.

    Each matrix is a line, from its largest value to its smallest, relative to the largest;
    the legend has the effective ranks. The gap between the lines of `W` and `M^T W` shows
    what `M` does to the kernel.

    Args:
        model: See `nsl_keras.convert.spectra`.

    Returns:
        A matplotlib figure with a panel for each layer.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4(
    ...     (8, 8, 1), convolution=nsl_keras.layers.NeuralSimilarityConv2D)
    >>> figure = nsl_keras.visualize.plot_spectra(model)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 5.1, Eq. (6).
    """
    panels = [
        (layer, list(found))
        for layer, found in itertools.groupby(spectra(model), lambda each: each.layer)
    ]
    columns = min(len(panels), _MOST_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    figure = figures.new_figure(2.4 * columns + 0.6, 2.2 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    colours = figures.GREY, figures.ORANGE, figures.BLUE
    for axis, (layer, found) in zip(axes.flat, panels, strict=False):
        for each, colour in zip(found, colours, strict=True):
            axis.plot(
                range(1, len(each.values) + 1),
                each.values / (each.values[0] or 1),
                label=f"{each.matrix}: {each.effective_rank:.1f}",
                color=colour,
            )
        axis.legend(title="effective rank", fontsize=7, title_fontsize=7)
        axis.set_title(layer.replace("/", "\n"), fontsize=7)
    figure.supxlabel("index of the singular value", fontsize=8)
    figure.supylabel("relative to the largest", fontsize=8)
    return figure
