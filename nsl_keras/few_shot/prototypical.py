"""Learners by class means: prototypical networks and nearest centroids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.few_shot.class_logits import AdaptedModel
from nsl_keras.few_shot.metric_learner import MetricLearner, class_means
from nsl_keras.neighborhoods import key_metrics
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.key_metrics import inverse_norm


@keras.saving.register_keras_serializable("nsl_keras")
class ProtoNet(MetricLearner):
    """Prototypical network: classes are the means of their support features.

    With the backbone `f` and the support examples `S_c` of class `c`,

        p_c       = mean over x in S_c of f(x)
        logits_c  = -||f(query) - p_c||^2 / temperature

    or with another `metric` in place of the negative squared distance. Compile with
    `SparseCategoricalCrossentropy(from_logits=True)` and train with `fit` on
    `EpisodeSampler.batches`, or on arrays. Targets are query labels of shape `(batch,
    queries)`, and `sample_weight` is one weight per episode or per query.

    Args:
        backbone: Keras model from examples to features, whose axes are flattened.
        ways: int, the number of classes of an episode. No weights depend on
            `ways`, so a second learner with the same backbone can use a different number.
        metric: `"euclidean"` (the negative squared distance), `"cosine"` or a
            `nsl_keras.key_metrics.KeyMetric`.
        temperature: float above 0; cosines need one well below 1, for example 0.1.
        learn_temperature: bool, whether to train the temperature, as its logarithm.
        batch_normalization: Statistics that the backbone's batch norms normalize by.
            `"moving"` uses those of all examples of the step in training, and the moving
            statistics at test. `"support"` uses those of each episode's support set.
            `"transductive"` normalizes support set and queries separately, so that an
            answer depends on the other queries. These two switch off dropout and added
            losses, and need this package's batch norms (`convert.convert_batch_norms`),
            each called once. Frozen batch norms always use their moving statistics.
        **kwargs: `name`, `trainable` of `keras.Model`.

    Call arguments:
        inputs: `(support_images, support_labels, query_images)`. Labels are integers
            from 0 to `ways - 1`, in any order, each at least once.
        training: bool, the training mode of the backbone.

    Input shape:
        `(batch, support examples, ...)`, `(batch, support examples)` and
        `(batch, queries, ...)`.

    Output shape:
        `(batch, queries, ways)`, logits, in float32 or wider.

    Raises:
        ValueError: For arguments outside these ranges, batch norms of Keras that cannot
            normalize by episode, a loss of probabilities, and bad arrays: labels outside
            the classes, a class without an example, or examples that are not finite.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> backbone = nsl_keras.backbones.convnet4((8, 8, 1))
    >>> model = nsl_keras.few_shot.ProtoNet(backbone, ways=3)
    >>> support, queries = np.ones((2, 3, 8, 8, 1)), np.ones((2, 4, 8, 8, 1))
    >>> labels = np.array([[0, 1, 2]] * 2)  # 2 episodes of 3 ways, 1 shot.
    >>> tuple(model((support, labels, queries)).shape)
    (2, 4, 3)

    Reference:
        Prototypical Networks for Few-shot Learning (Snell et al., NeurIPS 2017), Section
        2.2, Eq. (1) and (2), Euclidean and without a temperature. TADAM (Oreshkin et al.,
        NeurIPS 2018) learns a scale of the distances. The authors' code uses `"moving"`.
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        metric: str | key_metrics.KeyMetric = "euclidean",
        temperature: float = 1.0,
        learn_temperature: bool = False,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, batch_normalization, **kwargs)
        self.metric = key_metrics.get(metric)
        self.temperature = validation.positive_number(temperature, "temperature")
        self.learn_temperature = validation.boolean(learn_temperature, "learn_temperature")

    def build_weights(self, feature_shape: tuple[int, ...]) -> None:
        if self.learn_temperature:
            start = keras.initializers.Constant(math.log(self.temperature))
            self.log_temperature = self.add_weight(
                (), start, name="log_temperature", dtype="float32", autocast=False
            )

    def compare(self, support: Tensor, membership: Tensor, queries: Tensor) -> Tensor:
        prototypes = class_means(support, membership)  # Prototypical Networks Eq. (1)
        # Prototypical Networks Eq. (2), without the softmax, which the loss applies.
        return self.scaled(self.metric(queries, prototypes))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "metric": keras.saving.serialize_keras_object(self.metric),
            "temperature": self.temperature,
            "learn_temperature": self.learn_temperature,
        }

    def scaled(self, scores: Tensor) -> Tensor:
        if not self.learn_temperature:
            return scores / self.temperature
        return scores * ops.cast(ops.exp(-self.log_temperature), scores.dtype)


@keras.saving.register_keras_serializable("nsl_keras")
class NearestCentroid(MetricLearner):
    """Nearest centroid on features of a pretrained network, without any training.

        z(x)      = f(x) / ||f(x)||,   or f(x) if not `normalize`
        p_c       = mean over x in S_c of z(x)
        logits_c  = cos(z(query), p_c),   or   -||z(query) - p_c||^2

    This is the strong baseline of recent comparisons. The backbone always runs in inference
    mode. To center features on their mean over the base classes, end it in
    `keras.layers.Normalization(mean=mean, variance=np.ones_like(mean))`.

    Args:
        Same as `ProtoNet` without `temperature` and `learn_temperature`, plus:
        metric: `"cosine"` by default.
        normalize: bool, whether to divide features by their length.

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

    def compare(self, support: Tensor, membership: Tensor, queries: Tensor) -> Tensor:
        support, queries = self.vectors(support), self.vectors(queries)
        return self.metric(queries, class_means(support, membership))

    def vectors(self, features: Tensor) -> Tensor:
        return features * inverse_norm(features) if self.normalize else features

    def with_support(self, layers: Any, features: Any, labels: Any, classes: Any) -> Any:
        if type(self) is not NearestCentroid or type(self.metric) is not key_metrics.Cosine:
            return super().with_support(layers, features, labels, classes)
        options: dict[str, Any] = {"dtype": features.dtype}
        flat = keras.layers.Flatten(**options)
        floats = keras.layers.Rescaling(1.0, **options)  # Of integers, for example.
        # Features may be shorter than `CosineDense` normalizes exactly.
        units = [flat, floats, keras.layers.UnitNormalization(**options)]
        classifier = CosineDense(self.ways, scale=1.0, **options)
        model = AdaptedModel([*layers, *units, classifier, classes])
        membership = ops.one_hot(labels, self.ways, dtype=features.dtype)
        vectors = self.vectors(ops.reshape(features, (len(features), -1)))
        means = class_means(vectors[None], membership[None])[0]
        classifier.kernel.assign(ops.transpose(means))
        return model

    def get_config(self) -> dict[str, Any]:
        metric = keras.saving.serialize_keras_object(self.metric)
        return {**super().get_config(), "metric": metric, "normalize": self.normalize}
