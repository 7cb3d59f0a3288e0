"""Base of the learners that compare features, and the parts that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, at_least_float32, leave_out_of_xla
from nsl_keras.few_shot.adapted_model import adapted_copy
from nsl_keras.few_shot.episodic_learner import EpisodicLearner, episode_shapes
from nsl_keras.few_shot.functional import (
    FunctionalModel,
    effective_policy,
    move_by_episodes,
)


class MetricLearner(EpisodicLearner):
    """Base of the learners that score queries by features of the support set.

    A subclass writes `compare`, and `build_for` if it has further weights.
    """

    ways_are_fixed = False
    #: Whether features are flattened.
    flattens = True
    temperature: float
    learn_temperature = False

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        if not isinstance(backbone, keras.Model):
            raise ValueError(
                "`backbone` must be a Keras model from examples to features. "
                f"Received: backbone={backbone!r}"
            )
        kwargs.setdefault("dtype", backbone.dtype_policy)
        super().__init__(batch_normalization, **kwargs)
        if batch_normalization != "moving":
            leave_out_of_xla(self)
        self.backbone = backbone
        self.ways = validation.positive_integer(ways, "ways")

    def build(self, input_shape: Any) -> None:
        if self.built:
            return
        support, _, _ = episode_shapes(input_shape)
        images = keras.KerasTensor((None, *support[2:]))
        features = rewiring.output_spec(self.backbone, images)
        shape = tuple(getattr(features, "shape", ())[1:])
        if not shape or None in shape:
            raise ValueError(
                "`backbone` must have one output, of shape (batch, ...) with known sizes. "
                f"Received: outputs {features!r} for examples of shape {support[2:]}"
            )
        self.build_for((math.prod(shape),) if self.flattens else shape)

    def build_for(self, feature_shape: tuple[int, ...]) -> None:
        """Creates what `compare` needs for features of a shape, without the batch axis."""
        if self.learn_temperature:
            self.log_temperature = self.add_weight(
                name="log_temperature",
                shape=(),
                initializer=keras.initializers.Constant(math.log(self.temperature)),
                dtype="float32",
                autocast=False,
            )

    def scaled(self, scores: Tensor) -> Tensor:
        """Returns scores divided by the temperature."""
        if not self.learn_temperature:
            return scores / self.temperature
        return scores * ops.cast(ops.exp(-self.log_temperature), scores.dtype)

    def logits(
        self,
        support_images: Tensor,
        membership: Tensor,
        query_images: Tensor,
        training: bool,
    ) -> Tensor:
        sets = [support_images, query_images]
        support, queries = map(
            at_least_float32,
            outputs_of_sets(self.backbone, self.batch_normalization, sets, training),
        )
        if self.flattens:
            support, queries = flattened(support), flattened(queries)
        membership = ops.cast(membership, support.dtype)
        references = self.references(support, membership, training)
        return self.compare(*references, queries, training)

    def references(
        self, support: Tensor, membership: Tensor, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the features that queries are compared with, and their one-hot labels."""
        return support, membership

    def compare(
        self, support: Tensor, membership: Tensor, queries: Tensor, training: bool
    ) -> Tensor:
        """Returns logits of shape `(batch, queries, ways)`.

        Args:
            support: Features of shape `(batch, support examples, ...)`, or `references`.
            membership: Their one-hot labels, of shape `(batch, support examples, ways)`.
            queries: Features of shape `(batch, queries, ...)`.
            training: bool, whether this is a training step.
        """
        raise NotImplementedError

    def _adapted(self, images: np.ndarray, labels: np.ndarray, ways: int) -> Any:
        layers = adapted_copy(self.backbone, self.batch_normalization, images)
        features = ops.convert_to_tensor(layers[-1].predict(images, verbose=0))
        if self.flattens and len(features.shape) > 2:
            layers.append(keras.layers.Reshape((-1,), dtype=self.dtype_policy))
            features = ops.reshape(features, (len(images), -1))
        membership = ops.one_hot(labels, ways, dtype=at_least_float32(features).dtype)
        return self.adapted_to(layers, at_least_float32(features), membership)

    def adapted_to(self, layers: list[Any], support: Tensor, membership: Tensor) -> Any:
        """Returns the model that `adapt` returns, or its layers.

        Args:
            layers: Input and backbone, and the layer that flattens.
            support: Features of shape `(support examples, ...)`.
            membership: One-hot labels, of shape `(support examples, ways)`.
        """
        shape = support.shape[1:]
        backbone = keras.Sequential([keras.Input(shape), keras.layers.Identity()])
        backbone = keras.saving.serialize_keras_object(backbone)
        config = {"backbone": backbone, "ways": membership.shape[1]}
        (support,), (membership,) = self.references(support[None], membership[None], False)
        learner = self.from_config({**self.get_config(), **config})
        dtype = keras.backend.standardize_dtype(support.dtype)
        head = SupportSet(learner, len(support), dtype=dtype)
        head.build((None, *shape))
        others = set(map(id, self.backbone.weights))
        own = [each for each in self.weights if id(each) not in others]
        head.learner.set_weights([*map(ops.convert_to_numpy, own)])
        head.features.assign(support)
        head.membership.assign(membership)
        return [*layers, head]


@keras.saving.register_keras_serializable("nsl_keras")
class SupportSet(keras.layers.Layer):
    """Compares features with a stored support set, as a metric learner does."""

    def __init__(self, learner: MetricLearner, images: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.learner, self.images = learner, images

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.learner._build_for(input_shape[1:])
        options: Any = {"trainable": False, "autocast": False}
        shapes = (*input_shape[1:],), (self.learner.ways,)
        self.features, self.membership = (
            self.add_weight(shape=(self.images, *shape), **options) for shape in shapes
        )

    def call(self, inputs: Tensor) -> Tensor:
        support, membership = map(ops.convert_to_tensor, (self.features, self.membership))
        queries = ops.cast(inputs, support.dtype)
        sets = support[None], membership[None], queries[None]
        return self.learner.compare(*sets, training=False)[0]

    def get_config(self) -> dict[str, Any]:
        learner = keras.saving.serialize_keras_object(self.learner)
        return {**super().get_config(), "learner": learner, "images": self.images}

    from_config = classmethod(rewiring.from_arguments)


def outputs_of_sets(
    model: keras.Model, policy: str, sets: Sequence[Tensor], training: bool
) -> list[Tensor]:
    """Returns a model's outputs for sets of examples, under a policy of batch norms."""
    if effective_policy(model, policy) in ("moving", None):
        return _in_one_batch(model, sets, training and policy == "moving")
    functional = FunctionalModel(model, (), policy)
    # Filled below, since `vectorized_map` can return tensors only.
    layers: list[Any] = []

    def one_episode(sets: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
        given = None
        outputs, measured = [], []
        for images in sets:
            found, statistics = functional.outputs([], images, given)
            outputs.append(found)
            if given is None:
                measured.append(statistics.values)
            if policy == "support":
                given = statistics.values
            layers[:] = statistics.layers
        return outputs, measured

    # Episodes share their kernels, so vectorizing gives one convolution per layer.
    outputs, measured = ops.vectorized_map(one_episode, list(sets))
    if training:
        statistics = [ops.concatenate(each) for each in zip(*measured, strict=True)]
        counts = [ops.shape(images)[0] * ops.shape(images)[1] for images in sets]
        move_by_episodes(layers, statistics, sum(counts[: len(measured)]))
    return outputs


def _in_one_batch(
    model: keras.Model, sets: Sequence[Tensor], training: bool
) -> list[Tensor]:
    images = ops.concatenate(sets, axis=1)  # One set, or two.
    batch, count = ops.shape(images)[:2]
    found = model(ops.reshape(images, (-1, *images.shape[2:])), training=training)
    found = ops.reshape(found, (batch, count, *found.shape[1:]))
    first = ops.shape(sets[0])[1]
    return [found[:, :first], found[:, first:]][: len(sets)]


def flattened(features: Tensor) -> Tensor:
    """Reshapes features from `(batch, examples, ...)` to `(batch, examples, features)`."""
    size = math.prod(features.shape[2:])
    return ops.reshape(features, (*ops.shape(features)[:2], size))


def class_means(support: Tensor, membership: Tensor) -> Tensor:
    """Returns the mean features of each class, of shape `(batch, ways, features)`."""
    counts = ops.sum(membership, axis=1)[..., None]
    return ops.matmul(ops.swapaxes(membership, 1, 2), support) / ops.maximum(counts, 1)
