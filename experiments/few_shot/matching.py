"""Matching networks (Vinyals et al., NeurIPS 2016)."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.few_shot import ProtoNet


@keras.saving.register_keras_serializable("experiments")
class MatchingNet(ProtoNet):
    """Labels are read from the support set by attention.

        a_i       = softmax_i(cos(f(query), f(x_i)) / temperature)
        logits_c  = log sum over i with label c of a_i

    The paper's Eq. (1), without a temperature and without full context embeddings, as in
    later comparisons. The logits are logarithms of probabilities. Compile as `ProtoNet`.
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        metric: Any = "cosine",
        temperature: float = 1.0,
        learn_temperature: bool = False,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        given = (metric, temperature, learn_temperature, batch_normalization)
        super().__init__(backbone, ways, *given, **kwargs)

    def compare(self, support: Any, membership: Any, queries: Any, training: bool) -> Any:
        scores = self.scaled(self.metric(queries, support))
        of_class = ops.where(membership[:, None] > 0, scores[..., None], -1e30)
        total = ops.logsumexp(scores, axis=-1, keepdims=True)
        # The logarithm of Matching Networks Eq. (1): attention on each class's images.
        return ops.logsumexp(of_class, axis=2) - total
