"""The nearest neighbour in a pretrained network's features."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.few_shot.pretrained_learner import PretrainedLearner
from nsl_keras.neighborhoods import key_metrics


@keras.saving.register_keras_serializable("nsl_keras")
class NearestNeighbor(PretrainedLearner):
    """Nearest neighbour on features of a pretrained network. Nothing is trained.

        logits_c = max over support images x of class c of sim(z(query), z(x))

    with the cosine, or minus the squared distance, as `sim`, and `z(x) = f(x) - center`.
    The largest logit is that of the nearest support image's class. The backbone always
    runs in inference mode.

    Args:
        backbone: Keras model from images to features; features of several axes are
            flattened. Train it on images in the range that episodes have them in:
            `EpisodeSampler` divides uint8 images by 255.
        ways: int, the number of classes of an episode.
        metric: `"cosine"` or `"euclidean"` (squared).
        batch_normalization: `"moving"`, by which the backbone computes as it did when it
            was evaluated; or `"support"` or `"transductive"`, see `ProtoNet`.
        **kwargs: `name`, `dtype`, `trainable` of `keras.Model`.

    Call arguments:
        inputs: `(support_images, support_labels, query_images)`. Labels are integers
            from 0 to `ways - 1`, in any order, each at least once.
        training: Ignored.

    Input shape:
        `(batch, support images, ...)`, `(batch, support images)` and
        `(batch, queries, ...)`.

    Output shape:
        `(batch, queries, ways)`, in float32 or wider.

    Raises:
        ValueError: As `ProtoNet` does.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> backbone = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    >>> model = nsl_keras.few_shot.NearestNeighbor(backbone, ways=2)
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
        metric: str = "cosine",
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, batch_normalization, **kwargs)
        self.metric = key_metrics.get(metric)

    def scores(
        self,
        support: Tensor,
        membership: Tensor,
        queries: Tensor,
        training: bool | None,
    ) -> Tensor:
        similarity = self.metric(self.centered(queries), self.centered(support))
        of_class = ops.where(membership[:, None] > 0, similarity[..., None], -1e30)
        return ops.max(of_class, axis=2)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "metric": key_metrics.serialize(self.metric)}
