"""Nearest neighbors in a pretrained network's features."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.few_shot import NearestCentroid
from nsl_keras.neighborhoods import key_metrics


@keras.saving.register_keras_serializable("experiments")
class NearestNeighbor(NearestCentroid):
    """Nearest neighbor on features of a pretrained network. Nothing is trained.

        logits_c = max over support examples x of class c of sim(z(query), z(x))

    with the cosine, or minus the squared distance, as `sim`, and `z` of `NearestCentroid`.
    The largest logit is that of the nearest support example's class. The backbone always
    runs in inference mode.

    Args:
        Same as `NearestCentroid`, with `normalize=False` by default.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from experiments.few_shot.nearest_neighbor import NearestNeighbor
    >>> backbone = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    >>> model = NearestNeighbor(backbone, ways=2)
    >>> support = np.random.default_rng(0).normal(size=(1, 4, 8, 8, 1))
    >>> logits = model((support, np.array([[1, 0, 0, 1]]), support))
    >>> keras.ops.convert_to_numpy(keras.ops.argmax(logits, axis=-1)).tolist()
    [[1, 0, 0, 1]]

    Reference:
        The baseline of Matching Networks for One Shot Learning (Vinyals et al., NeurIPS
        2016), and of Optimization as a Model for Few-Shot Learning (Ravi & Larochelle,
        ICLR 2017).
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        metric: str | key_metrics.KeyMetric = "cosine",
        normalize: bool = False,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, metric, normalize, batch_normalization, **kwargs)

    def compare(
        self, support: Tensor, membership: Tensor, queries: Tensor, training: bool
    ) -> Tensor:
        similarity = self.metric(self.vectors(queries), self.vectors(support))
        of_class = ops.where(membership[:, None] > 0, similarity[..., None], -1e30)
        return ops.max(of_class, axis=2)
