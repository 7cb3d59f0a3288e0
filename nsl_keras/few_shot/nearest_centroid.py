"""The nearest centroid of a pretrained network's features."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.few_shot.metric_learner import class_means
from nsl_keras.few_shot.pretrained_learner import PretrainedLearner
from nsl_keras.neighborhoods import key_metrics
from nsl_keras.neighborhoods.cosine import unit_norm


@keras.saving.register_keras_serializable("nsl_keras")
class NearestCentroid(PretrainedLearner):
    """Nearest centroid on features of a pretrained network. Nothing is trained.

        z         = f(x) - center,   then z / ||z|| if `normalize`
        p_c       = mean over x in S_c of z(x)
        logits_c  = cos(z(query), p_c),   or   -||z(query) - p_c||^2

    With the backbone of a classifier that was trained on the base classes this is the
    strong baseline of recent comparisons. The backbone always runs in inference mode.

    Args:
        backbone: Keras model from images to features; features of several axes are
            flattened. Train it on images in the range that episodes have them in:
            `EpisodeSampler` divides uint8 images by 255.
        ways: int, the number of classes of an episode.
        metric: `"cosine"` or `"euclidean"` (squared).
        normalize: bool, whether features are brought to length 1 before their mean is
            taken.
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
    >>> model = nsl_keras.few_shot.NearestCentroid(backbone, ways=3)
    >>> rng = np.random.default_rng(0)
    >>> model.center_on(rng.normal(size=(20, 8, 8, 1)))
    >>> support, labels = rng.normal(size=(1, 3, 8, 8, 1)), np.array([[2, 0, 1]])
    >>> logits = model((support, labels, support))
    >>> keras.ops.convert_to_numpy(keras.ops.argmax(logits, axis=-1)).tolist()
    [[2, 0, 1]]

    Reference:
        SimpleShot (Wang et al., 2019): `metric="euclidean"` is its L2N, with `center_on`
        its CL2N, and with `normalize=False` its UN. Cosines: "Baseline++" of A Closer
        Look at Few-Shot Classification (Chen et al., ICLR 2019); with `normalize=False`
        "Classifier-Baseline" of Meta-Baseline (Chen et al., ICCV 2021).
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        metric: str = "cosine",
        normalize: bool = True,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, batch_normalization, **kwargs)
        self.metric = key_metrics.get(metric)
        self.normalize = validation.one_of(normalize, (True, False), "normalize")

    def scores(
        self,
        support: Tensor,
        membership: Tensor,
        queries: Tensor,
        training: bool | None,
    ) -> Tensor:
        support, queries = self.centered(support), self.centered(queries)
        if self.normalize:
            support, queries = unit_norm(support), unit_norm(queries)
        return self.metric(queries, class_means(support, membership))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "metric": key_metrics.serialize(self.metric),
            "normalize": self.normalize,
        }
