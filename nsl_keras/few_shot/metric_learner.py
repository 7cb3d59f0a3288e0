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
from nsl_keras.few_shot.adapted_copy import adapted_copy
from nsl_keras.few_shot.adapted_model import Adaptation
from nsl_keras.few_shot.class_logits import AdaptedModel
from nsl_keras.few_shot.episodic_learner import EpisodicLearner, episode_shapes, one_hot
from nsl_keras.few_shot.functional import (
    FunctionalModel,
    effective_policy,
    move_by_episodes,
)


class MetricLearner(EpisodicLearner):
    """Base of the learners that score queries by features of the support set.

    A subclass defines `compare`, and `build_for` if it has weights of its own.
    """

    wraps = "backbone"
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

    def build(self, input_shape: Any) -> None:
        if self.built:
            return
        support, _, _ = episode_shapes(input_shape, ())
        features = self._output_of(support[2:])
        self.build_for(tuple(features.shape[1:]))

    def build_for(self, feature_shape: tuple[int, ...]) -> None:
        """Creates what `compare` needs for features of a shape, without the batch axis."""

    def call(self, inputs: Sequence[Tensor], training: bool | None = None) -> Tensor:
        support, labels, queries = inputs
        policy = self.batch_normalization
        sets = outputs_of_sets(self.backbone, policy, [support, queries], bool(training))
        support, queries = (
            ops.reshape(each, (*ops.shape(each)[:2], math.prod(each.shape[2:])))
            for each in map(at_least_float32, sets)
        )
        membership = one_hot(labels, self.ways, support.dtype)
        return self.compare(support, membership, queries, bool(training))

    def compare(
        self, support: Tensor, membership: Tensor, queries: Tensor, training: bool
    ) -> Tensor:
        """Returns logits of shape `(batch, queries, ways)`.

        Features have shape `(batch, examples, features)`; `membership` contains the one-hot
        labels of the support set.
        """
        raise NotImplementedError

    def dense_on_units(self, support: Tensor, membership: Tensor) -> Any:
        """Returns kernel and bias of a layer that equals `compare` for a support set.

        The layer is dense and takes features of length 1. `None` if there is none.
        """
        return None

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ways": self.ways}

    def _adapted(self, images: Any, labels: np.ndarray, head: Any) -> Adaptation:
        layers = adapted_copy(self.backbone, self.batch_normalization, images)
        features = at_least_float32(layers[-1].predict(images, verbose=0))
        learner = self._of_features(features, len(head.class_names))
        support = SupportSet(learner, len(features), dtype=features.dtype)
        support.build(features.shape)
        support.features.assign(features)
        support.labels.assign(labels)
        model = AdaptedModel([*layers, support, head])
        return Adaptation(model, learner, ops.convert_to_numpy(features))

    def _of_features(self, features: Tensor, ways: int) -> MetricLearner:
        """Returns a learner of the same weights, from features to logits."""
        dtype = keras.backend.standardize_dtype(features.dtype)
        inputs = keras.Input(features.shape[1:], dtype=dtype)
        backbone = keras.Model(inputs, keras.layers.Identity(dtype=dtype)(inputs))
        backbone = keras.saving.serialize_keras_object(backbone)
        config = {**self.get_config(), "backbone": backbone, "ways": ways}
        learner = self.from_config(config)
        learner._build_for(features.shape[1:])
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
        self.learner._build_for(shape[1:])
        options: dict[str, Any] = {"trainable": False, "autocast": False}
        self.features = self.add_weight(shape, name="features", **options)
        self.labels = self.add_weight(shape[:1], name="labels", dtype="int32", **options)

    def call(self, inputs: Tensor) -> Tensor:
        episode = self.features, self.labels, inputs
        inputs = [ops.convert_to_tensor(each)[None] for each in episode]
        return self.learner(inputs, training=False)[0]

    def fold(self) -> keras.layers.Layer:
        """Returns plain Keras layers that compute the same; or this layer without any."""
        membership = ops.one_hot(self.labels, self.learner.ways, dtype=self.features.dtype)
        features = ops.reshape(self.features, (self.examples, -1))
        found = self.learner.dense_on_units(features[None], membership[None])
        if found is None:
            return self
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        dense = keras.layers.Dense(self.learner.ways, **options)
        layers = keras.layers.Flatten(**options), keras.layers.UnitNormalization(**options)
        folded = keras.Sequential([*layers, dense], name=self.name)
        folded.build((None, *self.features.shape[1:]))
        dense.set_weights(found)
        return folded

    def get_config(self) -> dict[str, Any]:
        learner = keras.saving.serialize_keras_object(self.learner)
        own = {"learner": learner, "examples": self.examples}
        return {**super().get_config(), **own}

    from_config = classmethod(configs.from_arguments)


def outputs_of_sets(
    model: keras.Model, policy: str, sets: Sequence[Tensor], training: bool
) -> list[Tensor]:
    """Returns a model's outputs for sets of examples, under a policy of batch norms.

    Sets are the support set and the queries, or one set, of shape `(batch, examples, ...)`.
    """
    if effective_policy(model, policy) in ("moving", None):
        # Dropout and noise stay off by episode.
        training = training and policy == "moving"
        images = ops.concatenate(sets, axis=1)
        batch, count = ops.shape(images)[:2]
        found = model(ops.reshape(images, (-1, *images.shape[2:])), training=training)
        found = ops.reshape(found, (batch, count, *found.shape[1:]))
        first = ops.shape(sets[0])[1]
        return [found[:, :first], found[:, first:]][: len(sets)]
    functional = FunctionalModel(model, (), policy)

    def one_episode(sets: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
        outputs: list[Tensor] = []
        measured: list[list[Tensor]] = []
        for images in sets:
            given = measured[0] if measured and policy == "support" else None
            found, statistics = functional.outputs([], images, given)
            outputs.append(found)
            measured.append(statistics)
        return outputs, measured

    # Episodes share their kernels, so vectorizing gives one convolution per layer.
    outputs, measured = vectorized_map(one_episode, list(sets))
    if training:
        count = 1 if policy == "support" else len(sets)
        statistics = [ops.concatenate(each) for each in zip(*measured[:count], strict=True)]
        sizes = [ops.full(ops.shape(each)[:1], ops.shape(each)[1]) for each in sets]
        norms = functional.trainable_norms()
        move_by_episodes(norms, statistics, ops.concatenate(sizes[:count]))
    return outputs


def class_means(support: Tensor, membership: Tensor) -> Tensor:
    """Returns the mean features of each class, of shape `(batch, ways, features)`."""
    counts = ops.sum(membership, axis=1)[..., None]
    return ops.matmul(ops.swapaxes(membership, 1, 2), support) / ops.maximum(counts, 1)
