"""Classifies by nearest class centroids, on the features of a pretrained network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.few_shot.metric_learner import MetricLearner, class_means
from nsl_keras.neighborhoods import key_metrics
from nsl_keras.neighborhoods.key_metrics import inverse_norm


@keras.saving.register_keras_serializable("nsl_keras")
class NearestCentroid(MetricLearner):
    """Nearest centroid on features of a pretrained network, without any training.

        z(x)      = f(x) / ||f(x)||,   or f(x) if not `normalize`
        p_c       = mean over x in S_c of z(x)
        logits_c  = cos(z(query), p_c),   or   -||z(query) - p_c||^2

    With the backbone of a classifier that was trained on the base classes this is the
    strong baseline of recent comparisons. The backbone always runs in inference mode. To
    center features on their mean over the base classes, end the backbone in
    `keras.layers.Normalization(mean=mean, variance=np.ones_like(mean))`.

    Args:
        Same as `ProtoNet` without `temperature` and `learn_temperature`, plus:
        metric: `"cosine"` by default.
        normalize: bool, whether to divide features by their length before the mean is
            taken.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> backbone = nsl_keras.backbones.convnet4((8, 8, 1))
    >>> model = nsl_keras.few_shot.NearestCentroid(backbone, ways=3)
    >>> rng = np.random.default_rng(0)
    >>> support, labels = rng.normal(size=(1, 3, 8, 8, 1)), np.array([[2, 0, 1]])
    >>> model.predict((support, labels, support), verbose=0).argmax(axis=-1).tolist()
    [[2, 0, 1]]

    Reference:
        SimpleShot (Wang et al., 2019): `metric="euclidean"` is its L2N, with centered
        features its CL2N, and with `normalize=False` its UN. Cosines: "Baseline++" of A
        Closer Look at Few-Shot Classification (Chen et al., ICLR 2019); with
        `normalize=False` "Classifier-Baseline" of Meta-Baseline (Chen et al., ICCV 2021).
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
        self.normalize = validation.boolean(normalize, "normalize")

    def call(self, inputs: Sequence[Tensor], training: bool | None = None) -> Tensor:
        return super().call(inputs, training=False)

    def compare(
        self, support: Tensor, membership: Tensor, queries: Tensor, training: bool
    ) -> Tensor:
        support, queries = self.vectors(support), self.vectors(queries)
        return self.metric(queries, class_means(support, membership))

    def vectors(self, features: Tensor) -> Tensor:
        """Returns features, of length 1 if `normalize`."""
        return features * inverse_norm(features) if self.normalize else features

    def dense_on_units(self, support: Tensor, membership: Tensor) -> Any:
        means = class_means(self.vectors(support), membership)[0]
        if type(self) is not NearestCentroid:
            return None  # A derived class may compare in another way.
        if type(self.metric) is key_metrics.Cosine:
            kernel = ops.transpose(means * inverse_norm(means))
            return kernel, ops.zeros_like(kernel[0])
        is_square = type(self.metric) is key_metrics.Euclidean and self.metric.squared
        if self.normalize and is_square:  # -|z - p|^2 = 2 z.p - 1 - |p|^2
            return 2 * ops.transpose(means), -1 - ops.sum(ops.square(means), axis=1)
        return None

    def get_config(self) -> dict[str, Any]:
        metric = keras.saving.serialize_keras_object(self.metric)
        return {**super().get_config(), "metric": metric, "normalize": self.normalize}
