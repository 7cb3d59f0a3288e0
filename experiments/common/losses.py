"""The cross-entropy of the authors of Neural Similarity Learning."""

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("experiments")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of smoothed labels and of softmax probabilities plus a small offset.

    For logits `f` over `C` classes and class numbers `t` of shape `(...)` or `(..., 1)`,

        p = softmax(f) + offset
        y = (1 - label_smoothing) one_hot(t) + label_smoothing / C
        loss = -sum_c y[c] log(p[c])

    The probabilities are not normalized again, so no class costs more than `-log(offset)`.
    The paper (Section 7.1) does not describe its loss; this one is in the authors' code.
    """

    def __init__(
        self, label_smoothing: float = 0.01, offset: float = 1e-4, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.label_smoothing, self.offset = label_smoothing, offset

    def call(self, y_true: Any, y_pred: Any) -> Any:
        y_pred = ops.convert_to_tensor(y_pred)
        classes, labels = y_pred.shape[-1], ops.reshape(y_true, ops.shape(y_pred)[:-1])
        one_hot = ops.one_hot(labels, classes, dtype=y_pred.dtype)
        targets = (1 - self.label_smoothing) * one_hot + self.label_smoothing / classes
        return -ops.sum(targets * ops.log(ops.softmax(y_pred) + self.offset), axis=-1)

    def get_config(self) -> dict[str, Any]:
        own = {"label_smoothing": self.label_smoothing, "offset": self.offset}
        return {**super().get_config(), **own}
