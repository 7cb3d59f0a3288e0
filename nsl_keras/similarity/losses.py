"""The cross-entropy that the networks of Neural Similarity Learning were trained on."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor


@keras.saving.register_keras_serializable("nsl_keras")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of smoothed labels and of softmax probabilities plus a small offset.

    For logits `f` over `C` classes and a label `t`, one-hot or a class number,

        p = softmax(f) + offset,   y = (1 - label_smoothing) t + label_smoothing / C
        loss = -sum_c y[c] log(p[c])

    The probabilities are not normalized again, so that no class costs more than
    `-log(offset)`, and the gradient of a class that is given up on vanishes.

    Args:
        label_smoothing: float in [0, 1), the share of the labels that is spread evenly
            over all classes.
        offset: float above 0, added to each probability.
        reduction: How the losses of the examples are reduced, as in
            `keras.losses.Loss`.
        name: str, the name of the loss.
        dtype: The dtype in which the loss is computed; `None` for
            `keras.config.floatx()`.

    Call arguments:
        y_true: Class numbers of shape `(...)` or `(..., 1)`, or one-hot or soft labels of
            shape `(..., classes)`. A class number outside 0 to `classes - 1` makes the
            loss NaN, on every backend.
        y_pred: Logits of shape `(..., classes)`.

    Raises:
        ValueError: For arguments outside the ranges above; for labels of a shape that
            fits neither form, or fewer than two classes, when called.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> loss = nsl_keras.losses.SmoothedCrossentropy()
    >>> logits = keras.ops.array([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    >>> round(float(loss(keras.ops.array([0, 1]), logits)), 3)
    0.056

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.1. The paper does
        not describe its loss; this is that of the authors' code, defaults included.
    """

    def __init__(
        self,
        label_smoothing: float = 0.01,
        offset: float = 1e-4,
        reduction: str | None = "sum_over_batch_size",
        name: str = "smoothed_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.label_smoothing = validation.fraction(label_smoothing, "label_smoothing")
        self.offset = validation.positive_number(offset, "offset")

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        classes = y_pred.shape[-1]
        if classes is None or classes < 2:
            raise ValueError(
                "`y_pred` must hold the logits of at least 2 classes on its last axis. "
                f"Received: y_pred.shape={tuple(y_pred.shape)}"
            )
        rank = len(y_pred.shape)
        if len(y_true.shape) == rank and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, axis=-1)
        sizes = zip(y_true.shape, y_pred.shape[:-1], strict=False)
        fits = all(None in pair or pair[0] == pair[1] for pair in sizes)
        log_probabilities = ops.log(ops.softmax(y_pred) + self.offset)
        uniform = ops.mean(log_probabilities, axis=-1)
        if fits and len(y_true.shape) == rank - 1:
            hits = y_true[..., None] == ops.arange(classes, dtype=y_true.dtype)
            # `where`, not a product: no hit at all must not pass for a label of zeros.
            at_label = ops.sum(ops.where(hits, log_probabilities, 0), axis=-1)
            at_label = ops.where(ops.any(hits, axis=-1), at_label, float("nan"))
        elif fits and len(y_true.shape) == rank and y_true.shape[-1] == classes:
            at_label = ops.sum(y_true * log_probabilities, axis=-1)
        else:
            raise ValueError(
                "`y_true` must hold class numbers of shape (...) or (..., 1), or labels "
                f"of shape (..., {classes}), for logits of shape {tuple(y_pred.shape)}. "
                f"Received: y_true.shape={tuple(y_true.shape)}"
            )
        smoothing = self.label_smoothing
        return -((1 - smoothing) * at_label + smoothing * uniform)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
            "offset": self.offset,
        }
