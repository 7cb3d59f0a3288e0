"""Base of the learners that compare features, and the layer that `adapt` makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import configs, validation
from nsl_keras.backend import Tensor, at_least_float32, leave_out_of_xla, vectorized_map
from nsl_keras.few_shot.adapting import adapted_copy
from nsl_keras.few_shot.class_logits import AdaptedModel
from nsl_keras.few_shot.episodic_learner import EpisodicLearner, one_hot
from nsl_keras.few_shot.stateless import StatelessModel
from nsl_keras.normalization import move_statistics
from nsl_keras.training import data


class MetricLearner(EpisodicLearner):
    """Base of the learners that score queries by features of the support set: `compare`."""

    network_argument = "backbone"
    ways_are_fixed = False

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, batch_normalization, **kwargs)
        if batch_normalization != "moving":
            leave_out_of_xla(self)
        self.backbone = backbone
        self.ways = validation.positive_integer(ways, "ways")
        self.outputs_shape = (self.ways,)

    def call(self, inputs: Sequence[Tensor], training: bool | None = None) -> Tensor:
        support, labels, queries = inputs
        policy = self.batch_normalization
        sets = outputs_of_sets(self.backbone, policy, [support, queries], bool(training))
        support, queries = (
            ops.reshape(each, (*ops.shape(each)[:2], math.prod(each.shape[2:])))
            for each in map(at_least_float32, sets)
        )
        membership = one_hot(labels, self.ways, support.dtype)
        return self.compare(support, membership, queries)

    def compare(self, support: Tensor, membership: Tensor, queries: Tensor) -> Tensor:
        """Returns logits `(batch, queries, ways)` of features `(batch, examples, size)`.

        `membership` contains the one-hot labels of the support set.
        """
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ways": self.ways}

    def _adapt(self, images: Any, labels: np.ndarray, classes: Any) -> Any:
        layers = adapted_copy(self.backbone, self.batch_normalization, images)
        # Eagerly: a graph of the copy would be traced for this call alone.
        features = at_least_float32(data.predict(layers[-1], layers[-1], images))
        learner = self._of_features(features, len(classes.class_names))
        return learner.with_support(layers, features, labels, classes), learner, features

    def with_support(self, layers: Any, features: Any, labels: Any, classes: Any) -> Any:
        """Returns a model: layers to features, this learner, and `classes`."""
        support = SupportSet(self, len(features), dtype=features.dtype)
        support.build(features.shape)
        support.features.assign(features)
        support.labels.assign(labels)
        return AdaptedModel([*layers, support, classes])

    def _of_features(self, features: Tensor, ways: int) -> MetricLearner:
        """Returns a learner of the same weights, from features to logits."""
        dtype = keras.backend.standardize_dtype(features.dtype)
        inputs = keras.Input(features.shape[1:], dtype=dtype)
        backbone = keras.Model(inputs, keras.layers.Identity(dtype=dtype)(inputs))
        config = {**self.get_config(), "ways": ways}
        config["backbone"] = keras.saving.serialize_keras_object(backbone)
        learner = self.from_config(config)
        learner.ensure_built(features.shape[1:])
        others = set(map(id, self.backbone.weights))
        own = [each for each in self.weights if id(each) not in others]
        learner.set_weights([*map(ops.convert_to_numpy, own)])
        return learner


@keras.saving.register_keras_serializable("nsl_keras")
class SupportSet(keras.layers.Layer):
    """Answers single queries like a learner in the episode of a stored support set."""

    def __init__(self, learner: MetricLearner, examples: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.learner, self.examples = learner, examples

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        shape = (self.examples, *input_shape[1:])
        self.learner.ensure_built(shape[1:])
        options: dict[str, Any] = {"trainable": False, "autocast": False}
        self.features = self.add_weight(shape, name="features", **options)
        self.labels = self.add_weight(shape[:1], name="labels", dtype="int32", **options)

    def call(self, inputs: Tensor) -> Tensor:
        episode = self.features, self.labels, inputs
        inputs = [ops.convert_to_tensor(each)[None] for each in episode]
        return self.learner(inputs, training=False)[0]

    def get_config(self) -> dict[str, Any]:
        learner = keras.saving.serialize_keras_object(self.learner)
        own = {"learner": learner, "examples": self.examples}
        return {**super().get_config(), **own}

    from_config = classmethod(configs.from_arguments)


def outputs_of_sets(
    model: keras.Model, policy: str, sets: Sequence[Tensor], training: bool
) -> list[Tensor]:
    """Returns a model's outputs for sets of examples, under a policy of batch norms.

    Sets have shape `(batch, examples, ...)`: the support set, with or without the queries.
    """
    stateless = StatelessModel(model, (), policy)
    if not stateless.norms():
        # Dropout and noise stay off by episode.
        training = training and policy == "moving"
        images = ops.concatenate(sets, axis=1)
        batch, count = ops.shape(images)[:2]
        found = model(ops.reshape(images, (-1, *images.shape[2:])), training=training)
        found = ops.reshape(found, (batch, count, *found.shape[1:]))
        first = ops.shape(sets[0])[1]
        return [found[:, :first], found[:, first:]][: len(sets)]

    def one_episode(sets: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        first, statistics = stateless.outputs([], sets[0])
        given = statistics if policy == "support" else None
        others = [stateless.outputs([], images, given)[0] for images in sets[1:]]
        return [first, *others], statistics

    # Episodes share their kernels, so vectorizing gives one convolution per layer.
    outputs, statistics = vectorized_map(one_episode, list(sets))
    if training:
        # Toward the moments of all support examples of the batch.
        examples = ops.shape(sets[0])[0] * ops.shape(sets[0])[1]
        pairs = zip(statistics[::2], statistics[1::2], strict=True)
        for norm, (means, variances) in zip(stateless.norms(), pairs, strict=True):
            mean = ops.mean(means, axis=0)
            variance = ops.mean(variances + ops.square(means - mean), axis=0)
            move_statistics(norm, mean, variance, examples)
    return outputs


def class_means(support: Tensor, membership: Tensor) -> Tensor:
    """Returns the mean features of each class, of shape `(batch, ways, features)`."""
    counts = ops.sum(membership, axis=1)[..., None]
    return ops.matmul(ops.swapaxes(membership, 1, 2), support) / ops.maximum(counts, 1)
