"""What learners that compare features have in common."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.few_shot.episodic_learner import EpisodicLearner, episode_shapes
from nsl_keras.few_shot.functional import (
    POLICIES,
    FunctionalClassifier,
    effective_policy,
)


class EpisodicModel:
    """Applies a built model to image sets of a batch of episodes.

    * `"moving"`: all sets of all episodes go through the model as one batch. So in
      training a batch norm normalizes over all images of the step, support and query, as
      it does anywhere in Keras; at test it uses its moving statistics.
    * `"support"`: in each episode, at training and at test, batch norms normalize the
      first set by its own statistics, and every other set by those of the first.
    * `"transductive"`: in each episode every set is normalized by its own statistics.

    With the last two layers other than batch norms run in inference mode (no dropout),
    and in training the moving statistics follow the mean of the episodes' statistics.
    A model without trainable batch norms is always called on one batch, and under the last
    two policies in inference mode.

    Args:
        model: A built model.
        batch_normalization: The policy.
    """

    def __init__(self, model: keras.Model, batch_normalization: str) -> None:
        self.model = model
        self.batch_normalization = batch_normalization
        if self.by_episode:
            _ = self._functional  # Raises for what it cannot run.

    @property
    def by_episode(self) -> bool:
        """Whether batch norms take statistics of episodes, as their flags are now."""
        policy = effective_policy(self.model, self.batch_normalization)
        return policy not in ("moving", None)

    @functools.cached_property
    def _functional(self) -> FunctionalClassifier:
        return FunctionalClassifier(self.model, (), self.batch_normalization, logits=False)

    def outputs(self, sets: Sequence[Tensor], training: bool | None) -> list[Tensor]:
        """Returns the model's outputs for each set.

        Args:
            sets: Tensors of shape `(batch, images, ...)`, the support set first.
            training: bool, whether this is a training step.

        Returns:
            A list of tensors of shape `(batch, images, ...)`.
        """
        if not self.by_episode:
            return self._in_one_batch(
                sets, training and self.batch_normalization == "moving"
            )

        def one_episode(sets: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
            support, *others = sets
            found = [self._functional.outputs([], support)]
            given = found[0][1] if self.batch_normalization == "support" else None
            found += [self._functional.outputs([], images, given) for images in others]
            outputs, statistics = zip(*found, strict=True)
            return list(outputs), list(statistics)

        # The kernels are the same in all episodes: this is one convolution a layer.
        outputs, statistics = ops.vectorized_map(one_episode, list(sets))
        if training:
            self._functional.update_moving_statistics(
                [
                    sum(ops.mean(each, axis=0) for each in of_sets) / len(of_sets)
                    for of_sets in zip(*statistics, strict=True)
                ],
                sum(ops.shape(images)[0] * ops.shape(images)[1] for images in sets),
            )
        return outputs

    def _in_one_batch(self, sets: Sequence[Tensor], training: bool | None) -> list[Tensor]:
        batch = ops.shape(sets[0])[0]
        flat = [ops.reshape(images, (-1, *images.shape[2:])) for images in sets]
        found = self.model(
            flat[0] if len(flat) == 1 else ops.concatenate(flat), training=training
        )
        outputs, start = [], 0
        for images in sets:
            size = ops.shape(images)[1]
            part = found[start : start + batch * size]
            outputs.append(ops.reshape(part, (batch, size, *found.shape[1:])))
            start = start + batch * size
        return outputs


class MetricLearner(EpisodicLearner):
    """Base of the learners that score queries by features of the support set.

    A subclass writes `scores`, and `build_scores` where it has weights of its own.

    Args:
        backbone: Model from images to features.
        ways: int, the number of classes of an episode.
        batch_normalization: `"moving"`, `"support"` or `"transductive"`.
        **kwargs: `name`, `dtype`, `trainable` of `keras.Model`.
    """

    #: Attributes that are layers of the learner's own, which no other config holds.
    own_layers: tuple[str, ...] = ()

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._frozen: list[str] = []
        if not isinstance(backbone, keras.Model):
            raise ValueError(
                "`backbone` must be a Keras model from images to features. "
                f"Received: backbone={backbone!r}"
            )
        self.backbone = backbone
        self.ways = validation.positive_integer(ways, "ways")
        self.batch_normalization = validation.one_of(
            batch_normalization, POLICIES, "batch_normalization"
        )

    def build(self, input_shape: Any) -> None:
        if self.built:
            return
        support, _, _ = episode_shapes(input_shape)
        features = self.backbone(keras.KerasTensor((None, *support[2:])))
        if not isinstance(features, keras.KerasTensor) or len(features.shape) < 2:
            raise ValueError(
                "`backbone` must have one output, of shape (batch, ...). "
                f"Received: outputs {features!r} for images of shape {support[2:]}"
            )
        shape = tuple(features.shape[1:])
        if None in shape:
            raise ValueError(
                "The features of `backbone` must have a known shape. "
                f"Received: features of shape {tuple(features.shape)} "
                f"for images of shape {support[2:]}"
            )
        self.images_to_features = EpisodicModel(self.backbone, self.batch_normalization)
        self.build_scores(shape, support[1])
        for name in self._frozen:
            getattr(self, name).trainable = False

    def build_scores(self, feature_shape: tuple[int, ...], support: int | None) -> None:
        """Creates what `scores` needs.

        Args:
            feature_shape: Shape of the backbone's output, without the batch axis.
            support: Number of images in a support set, `None` where it is not known.
        """

    def call(
        self, inputs: tuple[Tensor, Tensor, Tensor], training: bool | None = None
    ) -> Tensor:
        support_images, support_labels, query_images = inputs
        episode_shapes([each.shape for each in inputs])
        support_images, membership, valid = self._checked(
            support_images, support_labels, query_images
        )
        support, queries = (
            at_least_float32(features)
            for features in self.images_to_features.outputs(
                [support_images, query_images], training
            )
        )
        membership = ops.cast(membership, support.dtype)
        logits = self.scores(support, membership, queries, training)
        # Where no check can run, in compiled code, wrong labels do not go unseen.
        return ops.where(valid[:, None, None], logits, float("nan"))

    def scores(
        self,
        support: Tensor,
        membership: Tensor,
        queries: Tensor,
        training: bool | None,
    ) -> Tensor:
        """Returns logits of shape `(batch, queries, ways)`.

        Args:
            support: Features of shape `(batch, support images, ...)`.
            membership: One-hot labels, of shape `(batch, support images, ways)`.
            queries: Features of shape `(batch, queries, ...)`.
            training: bool, whether this is a training step.
        """
        raise NotImplementedError

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        query = input_shape[2]
        return (query[0], query[1], self.ways)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            "ways": self.ways,
            "batch_normalization": self.batch_normalization,
            "frozen": [
                name
                for name in self.own_layers
                if hasattr(self, name) and not getattr(self, name).trainable
            ],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        frozen = config.pop("frozen", [])  # Older files have none.
        config["backbone"] = keras.saving.deserialize_keras_object(
            config["backbone"], custom_objects=custom_objects
        )
        made = cls(**config)
        made._frozen = list(frozen)
        return made


class Temperature(keras.layers.Layer):
    """Divides by a number above 0. A learned one is kept as its logarithm."""

    def __init__(self, initial: float, learned: bool, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.initial = validation.positive_number(initial, "temperature")
        self.learned = validation.boolean(learned, "learn_temperature")

    def build(self, input_shape: Any = None) -> None:
        if self.learned:
            self.log_temperature = self.add_weight(
                name="log_temperature",
                shape=(),
                initializer=keras.initializers.Constant(math.log(self.initial)),
                autocast=False,
            )

    def call(self, inputs: Tensor) -> Tensor:
        if not self.learned:
            return inputs / self.initial
        factor = ops.exp(-ops.convert_to_tensor(self.log_temperature))
        return inputs * ops.cast(factor, inputs.dtype)


def flattened(features: Tensor) -> Tensor:
    """Returns features of shape `(batch, images, ...)` with one axis for the features."""
    size = math.prod(features.shape[2:])
    return ops.reshape(features, (*ops.shape(features)[:2], size))


def class_means(support: Tensor, membership: Tensor) -> Tensor:
    """Returns the mean features of each class, of shape `(batch, ways, features)`."""
    counts = ops.sum(membership, axis=1)[..., None]
    return ops.matmul(ops.swapaxes(membership, 1, 2), support) / ops.maximum(counts, 1)
