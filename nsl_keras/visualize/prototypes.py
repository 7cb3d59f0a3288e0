"""Whether finetuning turns the prototype of the true class towards the example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods.cosine import CosineDense, unit_norm
from nsl_keras.neighborhoods.dictionary import require_same_length
from nsl_keras.neighborhoods.explain import class_numbers, in_batches, require_classifier
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def prototype_cosines(model: MetaNeighborhoodModel, x: Any, y: Any) -> Figure:
    """Draws the cosine between features and their true prototype, before and after.

    A prototype is a class's column of the head's kernel, `phi[y]`. Each example is a
    point: the cosine of `z` and `phi[y]` across, that of `z` and the finetuned `phi_z[y]`
    upwards. Above the diagonal, finetuning has turned the prototype towards the example.

    Args:
        model: A built `MetaNeighborhoodModel`, a classifier whose head is one
            `CosineDense` or `Dense` layer.
        x: Array of inputs, test examples in the paper.
        y: Their labels, as for `fit`.

    Returns:
        A matplotlib figure with one panel.

    Raises:
        ValueError: If the head is another, for labels that do not fit, or if the model is
            no classifier.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.prototype_cosines(model, x, np.arange(30) % 3)
    >>> figure.axes[0].get_xlabel()
    'cosine to the true prototype, before'

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2, Figure 4.
    """
    require_classifier(model)
    head = model.head
    if not isinstance(head, (CosineDense, keras.layers.Dense)):
        raise ValueError(
            "`model` must have a head of one CosineDense or Dense layer, whose columns are "
            f"the classes' prototypes. Received: head {head.name!r}, a "
            f"{type(head).__name__}"
        )
    labels = class_numbers(y, model.dictionary.num_values)
    require_same_length(x, labels, "x")

    def cosines_of_all_classes(batch: Tensor) -> Tensor:
        features = at_least_float32(model.features(batch, training=False))
        kernel = ops.cast(ops.convert_to_tensor(head.kernel), features.dtype)
        adapted = model.neighborhood.adapted_weights(features)[0]
        directions = unit_norm(features)
        return ops.stack(
            [
                ops.matmul(directions, unit_norm(kernel, axis=0)),
                ops.matmul(directions[:, None, :], unit_norm(adapted, axis=1))[:, 0],
            ],
            axis=1,
        )

    cosines = in_batches(cosines_of_all_classes, x)
    before, after = cosines[np.arange(len(labels)), :, labels].T
    rises = after > before

    figure = new_figure(figsize=(5.2, 5.2))
    axis = figure.subplots()
    lowest, highest = float(min(before.min(), after.min())) - 0.02, 1.02
    axis.plot([lowest, highest], [lowest, highest], color=GREY, linewidth=1, zorder=0)
    for chosen, color, marker, what in (
        (rises, BLUE, "o", "towards the example"),
        (~rises, ORANGE, "v", "away from it"),
    ):
        axis.scatter(
            before[chosen],
            after[chosen],
            c=color,
            s=12,
            alpha=0.55,
            linewidths=0,
            marker=marker,
            label=f"{what}: {100 * chosen.mean():.1f} %",
        )
    axis.set_title(f"Finetuning turns the prototypes of {len(labels)} examples")
    axis.set_xlabel("cosine to the true prototype, before")
    axis.set_ylabel("cosine to the true prototype, after")
    axis.set_xlim(lowest, highest)
    axis.set_ylim(lowest, highest)
    axis.set_aspect("equal")
    axis.legend(loc="lower right", frameon=True, fontsize=9)
    return figure
