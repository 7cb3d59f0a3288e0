"""The rule of finetuning: gradient descent with dampened momentum."""

from __future__ import annotations

import dataclasses

from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor


@dataclasses.dataclass(frozen=True)
class DampenedMomentum:
    """One step of gradient descent with momentum, dampening and weight decay.

    For a value `w`, its gradient `g` and a buffer `m` that starts at zero,

        g <- g + weight_decay * w
        m <- g                                        in the first step
        m <- momentum * m + (1 - dampening) * g       in all others
        w <- w - learning_rate * m

    This is PyTorch's rule. No setting of a Keras optimizer equals it: with dampening the
    first step differs from all others. Without momentum, `m` is `g` in every step.

    Attributes:
        learning_rate: float above 0.
        momentum: float in [0, 1).
        dampening: float in [0, 1).
        weight_decay: float of at least 0; biases decay too.

    Raises:
        ValueError: For numbers outside these ranges.

    Example:

    >>> from keras import ops
    >>> from nsl_keras import few_shot
    >>> rule = few_shot.DampenedMomentum(weight_decay=0.0)
    >>> value, buffer = ops.convert_to_tensor(1.0), ops.zeros(())
    >>> value, buffer = rule.step(value, 2.0, buffer, 0)
    >>> value, buffer = rule.step(value, 3.0, buffer, 1)
    >>> round(float(buffer), 4), round(float(value), 4)  # 0.9 * 2 + 0.1 * 3
    (2.1, 0.959)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Appendix A: "SGD with
        lr = 0.01, momentum = 0.9, dampening = 0.9 and weight decay = 0.001".
    """

    learning_rate: float = 0.01
    momentum: float = 0.9
    dampening: float = 0.9
    weight_decay: float = 0.001

    def __post_init__(self) -> None:
        validation.positive_number(self.learning_rate, "learning_rate")
        validation.fraction(self.momentum, "momentum")
        validation.fraction(self.dampening, "dampening")
        validation.non_negative_number(self.weight_decay, "weight_decay")

    def step(
        self, value: Tensor, gradient: Tensor, buffer: Tensor, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns value and buffer after step `index`, which counts from 0."""
        gradient = gradient + self.weight_decay * value
        if self.momentum:
            # In the value's own dtype: a share of float32 would be rounded.
            whole, part = (
                ops.convert_to_tensor(share, value.dtype)
                for share in (1, 1 - self.dampening)
            )
            share = ops.where(ops.equal(index, 0), whole, part)
            gradient = self.momentum * buffer + share * gradient
        return value - self.learning_rate * gradient, gradient
