"""Matching networks."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.few_shot import ProtoNet


@keras.saving.register_keras_serializable("experiments")
class MatchingNet(ProtoNet):
    """Matching network: labels are read from the support set by attention.

        a_i       = softmax_i(cos(f(query), g(x_i)) / temperature)
        logits_c  = log sum over i with label c of a_i

    The logits are logarithms of probabilities. Compile as `ProtoNet`.

    Without `reading_steps` both `f` and `g` are the backbone, which is what the few-shot
    literature calls MatchingNet. With it they are "full context embeddings": over the
    backbone's features, `g` adds a bidirectional LSTM along the support set (so its order
    counts), and `f` an LSTM that reads the support set by attention, `reading_steps`
    times:

        r_(k-1)    = sum_i softmax_i(h_(k-1) . g(x_i)) g(x_i),    h_0 = c_0 = 0
        u_k, c_k   = LSTM(f'(query), [h_(k-1), r_(k-1)], c_(k-1))
        h_k        = u_k + f'(query)

    Args:
        Same as `ProtoNet`, with `metric="cosine"` by default, plus:
        reading_steps: int, the number of readings of full context embeddings; `None` for
            the backbone's features.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from experiments.few_shot.matching import MatchingNet
    >>> backbone = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    >>> model = MatchingNet(backbone, ways=3)
    >>> rng = np.random.default_rng(0)
    >>> support, labels = rng.normal(size=(2, 3, 8, 8, 1)), np.array([[2, 0, 1]] * 2)
    >>> logits = model((support, labels, rng.normal(size=(2, 4, 8, 8, 1))))
    >>> sums = keras.ops.sum(keras.ops.exp(logits), axis=-1)
    >>> tuple(logits.shape), bool(keras.ops.all(keras.ops.abs(sums - 1) < 1e-5))
    ((2, 4, 3), True)

    Reference:
        Matching Networks for One Shot Learning (Vinyals et al., NeurIPS 2016), Eq. (1)
        and the attention kernel below it, without a temperature; full context embeddings:
        its Section 2.1.2. Later comparisons have it with and without them (Ravi &
        Larochelle, ICLR 2017).
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        metric: Any = "cosine",
        temperature: float = 1.0,
        learn_temperature: bool = False,
        reading_steps: int | None = None,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            backbone,
            ways,
            metric,
            temperature,
            learn_temperature,
            batch_normalization,
            **kwargs,
        )
        self.reading_steps = reading_steps

    def build_for(self, feature_shape: tuple[int, ...]) -> None:
        super().build_for(feature_shape)
        if self.reading_steps is None:
            return
        features = math.prod(feature_shape)
        self.support_context = keras.layers.Bidirectional(
            keras.layers.LSTM(features, return_sequences=True, dtype=self.dtype_policy),
            merge_mode="sum",
            dtype=self.dtype_policy,
            name="support_context",
        )
        self.support_context.build((None, None, features))
        # What is read goes in beside the query's features: an LSTM is linear before its
        # gates, so this is the state `[h, r]` of the paper.
        self.reader = keras.layers.LSTMCell(
            features, dtype=self.dtype_policy, name="reader"
        )
        self.reader.build((None, 2 * features))

    def compare(
        self, support: Tensor, membership: Tensor, queries: Tensor, training: bool
    ) -> Tensor:
        if self.reading_steps is not None:
            context = self.support_context(support, training=training)
            support = support + ops.cast(context, support.dtype)
            queries = self._read(support, queries, self.reading_steps, training)
        scores = self.scaled(self.metric(queries, support))
        of_class = ops.where(membership[:, None] > 0, scores[..., None], -1e30)
        total = ops.logsumexp(scores, axis=-1, keepdims=True)
        # The logarithm of Matching Networks Eq. (1): attention on each class's images.
        return ops.logsumexp(of_class, axis=2) - total

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "reading_steps": self.reading_steps}

    def _read(self, support: Tensor, queries: Tensor, steps: int, training: bool) -> Tensor:
        features = queries.shape[-1]
        flat = ops.reshape(queries, (-1, features))
        hidden, memory = ops.zeros_like(queries), ops.zeros_like(flat)
        for _ in range(steps):
            scores = ops.matmul(hidden, ops.swapaxes(support, 1, 2))
            reading = ops.matmul(ops.softmax(scores), support)
            inputs = ops.concatenate([queries, reading], axis=-1)
            inputs = ops.reshape(inputs, (-1, 2 * features))
            state = [ops.reshape(hidden, (-1, features)), memory]
            output, (_, memory) = self.reader(inputs, state, training=training)
            output = ops.reshape(at_least_float32(output), ops.shape(queries))
            hidden = queries + ops.cast(output, queries.dtype)
        return hidden
