"""What all models of episodes have in common in `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, is_known, variable_scope
from nsl_keras.data import is_array
from nsl_keras.few_shot.functional import effective_policy
from nsl_keras.training.checks import CheckedModel, loss_of_logits


class EpisodicLearner(CheckedModel):
    """Base of the models from `(support_images, support_labels, query_images)` to logits.

    Arrays are checked on the host, data sets inside the step where the backend can. In
    graphs of one's own, exported ones included, no label is checked: there the logits of
    an episode with wrong support labels are NaN.

    Attributes:
        ways: int, the number of classes of an episode; known once the model is built.
    """

    ways: int
    batch_normalization: str

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.compute_dtype != self.variable_dtype:
            # In a scope of half precision every variable that is read here would be
            # rounded. The layers of the model that is held open scopes of their own.
            self.dtype_policy = keras.dtype_policies.get(self.variable_dtype)

    @property
    def effective_batch_normalization(self) -> str | None:
        """The policy that batch norms follow as their `trainable` flags are now.

        `batch_normalization`; or `"moving"` if none is trainable; `None` without any.
        """
        return effective_policy(self, self.batch_normalization)

    def compile(
        self, optimizer: Any = "rmsprop", loss: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Configures training, as `keras.Model.compile` does.

        Layers that compute in float16 have the loss scaled, whatever the learner's own
        policy, unless `auto_scale_loss=False`.

        Args:
            optimizer: Optimizer, or its name.
            loss: Loss of the logits: one that takes logits, not probabilities.
            *args: Further arguments of `keras.Model.compile`, in its order.
            **kwargs: Those by name.

        Raises:
            ValueError: If the loss takes probabilities (`from_logits=False`).
        """
        loss_of_logits(loss)
        optimizer = keras.optimizers.get(optimizer)
        if (
            kwargs.get("auto_scale_loss", True)
            and optimizer is not None
            and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            and any(each.compute_dtype == "float16" for each in rewiring.sublayers(self))
        ):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        super().compile(optimizer, loss, *args, **kwargs)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("class_weight") is not None:
            raise ValueError(
                "`class_weight` must be None: classes are numbered anew in each episode. "
                "Weigh queries by `sample_weight`. "
                f"Received: class_weight={kwargs['class_weight']}"
            )
        return super().fit(*args, **kwargs)

    @functools.wraps(keras.Model.predict)
    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_data(x)
        return super().predict(x, *args, **kwargs)

    def _check_data(self, x: Any, y: Any = None) -> None:
        if isinstance(x, keras.utils.PyDataset):
            x = x[0][0]
        if not isinstance(x, (tuple, list)) or not all(map(is_array, x)):
            return
        if len(x) != 3:
            raise ValueError(
                "`x` must be (support_images, support_labels, query_images). "
                f"Received: {len(x)} arrays"
            )
        images, labels, queries = x
        validation.finite(images, "support_images")
        validation.finite(queries, "query_images")
        if not self.built:
            with variable_scope(self):
                self.build([(None, *np.shape(each)[1:]) for each in x])
        self._check_labels(ops.convert_to_numpy(labels))
        if is_array(y):
            self._check_targets(ops.convert_to_numpy(y))

    def _check_targets(self, y: np.ndarray) -> None:
        """Raises unless query labels are classes, or rows of probabilities."""
        if y.ndim not in (2, 3):
            raise ValueError(
                "`y` must have shape (batch, queries), (batch, queries, 1) or (batch, "
                f"queries, {self.ways}). Received: y.shape={y.shape}"
            )
        flat = y.reshape(-1, *y.shape[2:])
        validation.class_labels(flat, self.ways)

    def _check_labels(self, labels: np.ndarray) -> None:
        for episode, row in enumerate(labels):
            if not np.array_equal(np.unique(row), np.arange(self.ways)):
                raise ValueError(
                    f"{self._labels_demand()} Received: the labels "
                    f"{np.unique(row).tolist()} in episode {episode}"
                )

    def _labels_demand(self) -> str:
        """What support labels must be, a sentence of an error."""
        return (
            f"`support_labels` must be the classes 0 to {self.ways - 1}, each of them "
            f"present: {self.name!r} has ways={self.ways}."
        )

    def _checked(
        self, support_images: Tensor, support_labels: Tensor, query_images: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns support images, one-hot labels, and which episodes have valid labels.

        Wrong labels at hand raise.
        """
        if is_known(support_labels):
            self._check_labels(ops.convert_to_numpy(support_labels))
        labels = ops.cast(support_labels, "int32")
        membership = ops.one_hot(labels, self.ways)
        in_range = ops.all((labels >= 0) & (labels < self.ways), axis=1)
        valid = in_range & ops.all(ops.sum(membership, axis=1) > 0, axis=1)
        return support_images, membership, valid

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Tensor:
        """Returns the loss; `sample_weight` may have one weight an episode, or a query."""
        weights = _weights_of_queries(sample_weight, y_pred)
        return super().compute_loss(x, y, y_pred, weights, training=training)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Updates the metrics; `sample_weight` as for `compute_loss`."""
        weights = _weights_of_queries(sample_weight, y_pred)
        return super().compute_metrics(x, y, y_pred, weights)


def _weights_of_queries(weights: Any, logits: Tensor) -> Any:
    """Returns one weight a query; Keras would take one an episode for one a column."""
    if weights is None:
        return None
    episodes, queries, _ = ops.shape(logits)
    # Of any rank, which TensorFlow does not always know.
    return ops.broadcast_to(ops.reshape(weights, (episodes, -1)), (episodes, queries))


def episode_shapes(
    input_shape: Sequence[Sequence[int | None]],
) -> tuple[tuple[int | None, ...], ...]:
    """Returns the shapes of an episode's inputs as tuples; raises for other inputs."""
    # A `tf.TensorShape` is iterable too.
    shapes = tuple(
        tuple(each) if isinstance(each, Iterable) else (each,) for each in input_shape
    )
    if len(shapes) != 3:
        raise ValueError(
            "Inputs must be (support_images, support_labels, query_images). "
            f"Received: input_shape={input_shape}"
        )
    support, labels, query = shapes
    if len(support) < 3 or len(query) != len(support) or support[2:] != query[2:]:
        raise ValueError(
            "Support and query images must have shape (batch, images, ...), with "
            "images of one shape. "
            f"Received: support_images.shape={support}, query_images.shape={query}"
        )
    if len(labels) != 2 or any(
        None not in pair and pair[0] != pair[1]
        for pair in zip(labels, support[:2], strict=True)
    ):
        raise ValueError(
            "`support_labels` must have shape (batch, support images), one label an "
            f"image. Received: support_labels.shape={labels}, "
            f"support_images.shape={support}"
        )
    if None not in (support[0], query[0]) and support[0] != query[0]:
        raise ValueError(
            "There must be as many support sets as query sets. "
            f"Received: support_images.shape={support}, query_images.shape={query}"
        )
    return shapes
