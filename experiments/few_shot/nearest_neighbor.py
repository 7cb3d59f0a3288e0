"""Nearest neighbors in a pretrained network's features."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.few_shot import NearestCentroid


@keras.saving.register_keras_serializable("experiments")
class NearestNeighbor(NearestCentroid):
    """The baseline of Matching Networks (Vinyals et al., NeurIPS 2016); trains nothing.

        logits_c = max over support examples x of class c of sim(z(query), z(x))

    with the cosine, or minus the squared distance, as `sim`, and `z` of `NearestCentroid`.
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        metric: Any = "cosine",
        normalize: bool = False,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, metric, normalize, batch_normalization, **kwargs)

    def compare(self, support: Any, membership: Any, queries: Any, training: bool) -> Any:
        similarity = self.metric(self.vectors(queries), self.vectors(support))
        of_class = ops.where(membership[:, None] > 0, similarity[..., None], -1e30)
        return ops.max(of_class, axis=2)
