"""Nearest centroids of classes, on the features of a pretrained network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.few_shot.metric_learner import MetricLearner, class_means
from nsl_keras.neighborhoods import key_metrics
from nsl_keras.neighborhoods.key_metrics import unit_norm
from nsl_keras.training.data import predict


@keras.saving.register_keras_serializable("nsl_keras")
class NearestCentroid(MetricLearner):
    """Nearest centroid on features of a pretrained network. Nothing is trained.

        z         = f(x) - center,   then z / ||z|| if `normalize`
        p_c       = mean over x in S_c of z(x)
        logits_c  = cos(z(query), p_c),   or   -||z(query) - p_c||^2

    With the backbone of a classifier that was trained on the base classes this is the
    strong baseline of recent comparisons. The backbone always runs in inference mode. The
    center is zero until `center_on` sets it.

    Args:
        Same as `ProtoNet` without `temperature` and `learn_temperature`, plus:
        metric: `"cosine"` by default.
        normalize: bool, whether features are divided by their length before the mean is
            taken.

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
        metric: str | key_metrics.KeyMetric = "cosine",
        normalize: bool = True,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, batch_normalization, **kwargs)
        self.metric = key_metrics.get(metric)
        self.normalize = normalize

    def build_for(self, feature_shape: tuple[int, ...]) -> None:
        self.center = self.add_weight(
            name="center",
            shape=(math.prod(feature_shape),),
            initializer="zeros",
            trainable=False,
            autocast=False,
        )

    def call(self, inputs: Sequence[Tensor], training: bool | None = None) -> Tensor:
        return super().call(inputs, training=False)

    def compare(
        self, support: Tensor, membership: Tensor, queries: Tensor, training: bool
    ) -> Tensor:
        support, queries = self.vectors(support), self.vectors(queries)
        return self.metric(queries, class_means(support, membership))

    def vectors(self, features: Tensor) -> Tensor:
        """Returns features minus the center, of length 1 if `normalize`."""
        center = ops.convert_to_tensor(self.center)
        features = features - ops.cast(center, features.dtype)
        return unit_norm(features) if self.normalize else features

    def center_on(self, images: Any, batch_size: int = 128) -> None:
        """Stores the mean features of examples as the center.

        Use examples of the classes that the backbone was trained on.

        Args:
            images: Array of shape `(n, ...)`, or a data set of batches, in the range of
                the episodes' examples.
            batch_size: int, the number of examples computed at once.

        Raises:
            ValueError: For features that are not finite, and a learner whose batch norms
                normalize by episode.
        """
        if self.effective_batch_normalization not in ("moving", None):
            raise ValueError(
                '`batch_normalization` must be "moving" for `center_on`. '
                f"Received: batch_normalization={self.batch_normalization!r}"
            )
        shapes = []

        def features(images: Tensor) -> Tensor:
            shapes.append(images.shape[1:])
            return at_least_float32(self.backbone(images, training=False))

        found = predict(features, self, images, batch_size=batch_size)
        self._build_for(shapes[0])
        center = np.mean(found, axis=0, dtype="float64").reshape(-1)
        validation.finite(center, "features")
        self.center.assign(center)
