"""The cross-entropy of the networks of Neural Similarity Learning."""

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

    The probabilities are not normalized again, so no class costs more than `-log(offset)`.

    Args:
        label_smoothing: float in [0, 1), the share of each label that is spread evenly
            over all classes.
        offset: float above 0, added to each probability.
        **kwargs: `reduction`, `name` and `dtype` of `keras.losses.Loss`.

    Call arguments:
        y_true: Class numbers of shape `(...)` or `(..., 1)`, or one-hot or soft labels of
            shape `(..., classes)`. A class number outside 0 to `classes - 1` makes the
            loss NaN.
        y_pred: Logits of shape `(..., classes)`.

    Raises:
        ValueError: For invalid arguments; when called, for labels of another shape or fewer
            than two classes.

    Example:

    >>> import nsl_keras
    >>> loss = nsl_keras.losses.SmoothedCrossentropy()
    >>> round(float(loss([0, 1], [[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])), 3)
    0.056

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.1. The paper does
        not describe its loss; this is the one in the authors' code.
    """

    def __init__(
        self,
        label_smoothing: float = 0.01,
        offset: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.label_smoothing = validation.fraction(label_smoothing, "label_smoothing")
        self.offset = validation.positive_number(offset, "offset")

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        classes = y_pred.shape[-1]
        if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, axis=-1)
        if len(y_true.shape) < len(y_pred.shape):
            hits = y_true[..., None] == ops.arange(classes, dtype=y_true.dtype)
            is_class = ops.any(hits, axis=-1, keepdims=True)
            y_true = ops.where(is_class, ops.cast(hits, y_pred.dtype), float("nan"))
        fits = len(y_true.shape) == len(y_pred.shape) and all(
            None in sizes or sizes[0] == sizes[1]
            for sizes in zip(y_true.shape, y_pred.shape, strict=True)
        )
        if classes == 1 or not fits:
            raise ValueError(
                "`y_pred` must hold the logits of at least 2 classes on its last axis, and "
                "`y_true` class numbers or one-hot labels for each row. Received: "
                f"y_true.shape={tuple(y_true.shape)}, y_pred.shape={tuple(y_pred.shape)}"
            )
        labels = (1 - self.label_smoothing) * y_true + self.label_smoothing / classes
        log_probabilities = ops.log(ops.softmax(y_pred) + self.offset)
        return -ops.sum(labels * log_probabilities, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
            "offset": self.offset,
        }
