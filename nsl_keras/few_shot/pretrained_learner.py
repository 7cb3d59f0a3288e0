"""What learners have in common that compare features of a pretrained backbone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.few_shot.metric_learner import MetricLearner, flattened


class PretrainedLearner(MetricLearner):
    """Base of the learners that are not trained: the backbone runs in inference mode.

    Features are centred on a stored vector, zero until `center_on` sets it.
    """

    def build_scores(self, feature_shape: tuple[int, ...], support: int | None) -> None:
        self.center = self.add_weight(
            name="center",
            shape=(math.prod(feature_shape),),
            initializer="zeros",
            trainable=False,
            autocast=False,
        )

    def call(
        self, inputs: tuple[Tensor, Tensor, Tensor], training: bool | None = None
    ) -> Tensor:
        return super().call(inputs, training=False)

    def centered(self, features: Tensor) -> Tensor:
        """Returns features less the stored vector, of shape `(batch, images, features)`."""
        features = flattened(features)
        return features - ops.cast(ops.convert_to_tensor(self.center), features.dtype)

    def center_on(self, images: Any, batch_size: int = 128) -> None:
        """Stores the mean features of images; all features are then taken less this mean.

        Use images of the classes that the backbone was trained on.

        Args:
            images: Array of shape `(n, ...)`.
            batch_size: int, the number of images computed at once.

        Raises:
            ValueError: For an array without images, features that are not finite, and a
                learner whose batch norms take statistics of episodes, which single images
                do not have.
        """
        batch_size = validation.positive_integer(batch_size, "batch_size")
        if len(images) == 0:
            raise ValueError("`images` must not be empty. Received: 0 images")
        if not self.built:
            shape = (None, None, *np.shape(images)[1:])
            self.build((shape, (None, None), shape))
        if self.images_to_features.by_episode:
            raise ValueError(
                '`batch_normalization` must be "moving" for `center_on`. '
                f"Received: batch_normalization={self.batch_normalization!r}"
            )
        total = np.zeros(self.center.shape)
        for start in range(0, len(images), batch_size):
            batch = ops.convert_to_tensor(images[start : start + batch_size])
            found = flattened(self.backbone(batch, training=False)[None])[0]
            values = ops.convert_to_numpy(at_least_float32(found))
            total += values.sum(axis=0, dtype="float64")
        center = total / len(images)
        validation.finite(center, "features")
        self.center.assign(center)
