"""A model on the images of whole episodes, with batch norms by one of three policies."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.few_shot.functional import FunctionalClassifier, effective_policy


class EpisodicModel:
    """Applies a built model to image sets of a batch of episodes.

    * `"moving"`: all sets of all episodes go through the model as one batch. So in
      training a batch norm normalises over all images of the step, support and query, as
      it does anywhere in Keras; at test it uses its moving statistics.
    * `"support"`: in each episode, at training and at test, batch norms normalise the
      first set by its own statistics, and every other set by those of the first.
    * `"transductive"`: in each episode every set is normalised by its own statistics.

    With the last two layers other than batch norms run in inference mode (no dropout),
    and in training the moving statistics follow the mean of the episodes' statistics.
    A model without trainable batch norms is always called on one batch.

    Args:
        model: A built model.
        batch_normalization: The policy.
    """

    def __init__(self, model: keras.Model, batch_normalization: str) -> None:
        self.model = model
        self.batch_normalization = batch_normalization
        if self.by_episode:
            self._functional()  # Raises for what it cannot run.

    @property
    def by_episode(self) -> bool:
        """Whether batch norms take statistics of episodes, as their flags are now."""
        policy = effective_policy(self.model, self.batch_normalization)
        return policy not in ("moving", None)

    def _functional(self) -> FunctionalClassifier:
        return FunctionalClassifier(
            self.model, "all", self.batch_normalization, logits=False
        )

    def outputs(self, sets: Sequence[Tensor], training: bool | None) -> list[Tensor]:
        """Returns the model's outputs for each set.

        Args:
            sets: Tensors of shape `(batch, images, ...)`, the support set first.
            training: bool, whether this is a training step.

        Returns:
            A list of tensors of shape `(batch, images, ...)`.
        """
        if not self.by_episode:
            return self._in_one_batch(sets, training)
        functional = self._functional()
        values = functional.values()

        def one_episode(sets: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
            outputs: list[Tensor] = []
            statistics: list[list[Tensor]] = []
            for images in sets:
                given = None
                if statistics and functional.batch_normalization == "support":
                    given = statistics[0]
                found, used = functional.outputs(values, images, given)
                outputs.append(found)
                statistics.append(used)
            return outputs, statistics

        # The kernels are the same in all episodes: this is one convolution a layer.
        outputs, statistics = ops.vectorized_map(one_episode, list(sets))
        if training:
            functional.update_moving_statistics(
                [
                    sum(ops.mean(each, axis=0) for each in of_sets) / len(of_sets)
                    for of_sets in zip(*statistics, strict=True)
                ]
            )
        return outputs

    def _in_one_batch(self, sets: Sequence[Tensor], training: bool | None) -> list[Tensor]:
        batch = ops.shape(sets[0])[0]
        sizes = [ops.shape(images)[1] for images in sets]
        flat = [ops.reshape(images, (-1, *images.shape[2:])) for images in sets]
        found = self.model(
            flat[0] if len(flat) == 1 else ops.concatenate(flat), training=training
        )
        outputs, start = [], 0
        for size in sizes:
            part = found[start : start + batch * size]
            outputs.append(ops.reshape(part, (batch, size, *found.shape[1:])))
            start = start + batch * size
        return outputs
