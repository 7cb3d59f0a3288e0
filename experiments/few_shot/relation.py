"""Relation networks: a learned comparison of feature maps."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.few_shot.metric_learner import MetricLearner, outputs_of_sets
from nsl_keras.training.normalization import BatchNormalization


def relation_module(
    map_shape: tuple[int, ...], filters: int = 64, units: int = 8
) -> keras.Model:
    """Returns the relation module of the paper: from two joined feature maps to a score.

    It has two blocks of 3x3 convolution ("same"), batch norm, ReLU and 2x2 max pooling,
    then a dense layer with ReLU and a dense layer with one output. The paper's sigmoid is
    in `RelationLoss`.

    Args:
        map_shape: tuple of 3 ints, the shape of the joined maps (in the order of
            `keras.config.image_data_format()`): height and width of at least 4, and
            twice the channels of the backbone.
        filters: int, the filters of the convolutions.
        units: int, the width of the first dense layer.

    Returns:
        A functional `keras.Model`, with outputs of shape `(batch, 1)`.

    Raises:
        ValueError: If the maps are smaller than 4x4, or for sizes that are not positive.

    Example:

    >>> from experiments.few_shot.relation import relation_module
    >>> relation_module((7, 7, 128)).output_shape
    (None, 1)

    Reference:
        Learning to Compare: Relation Network for Few-Shot Learning (Sung et al., CVPR
        2018), Section 3.4 and Figure 2.
    """
    filters = validation.positive_integer(filters, "filters")
    units = validation.positive_integer(units, "units")
    map_shape = validation.positive_integers(tuple(map_shape), 3, "map_shape")
    first = keras.config.image_data_format() == "channels_first"
    if min(map_shape[1:] if first else map_shape[:-1]) < 4:
        raise ValueError(
            "`map_shape` must be at least 4x4 for two poolings: use a backbone that pools "
            f"less, or pass a custom `relation`. Received: map_shape={map_shape}"
        )
    inputs = outputs = keras.Input(map_shape)
    for _ in range(2):
        outputs = keras.layers.Conv2D(filters, 3, padding="same")(outputs)
        outputs = BatchNormalization(axis=1 if first else -1)(outputs)
        outputs = keras.layers.ReLU()(outputs)
        outputs = keras.layers.MaxPooling2D(2)(outputs)
    outputs = keras.layers.Flatten()(outputs)
    outputs = keras.layers.Dense(units, activation="relu")(outputs)
    outputs = keras.layers.Dense(1)(outputs)
    return keras.Model(inputs, outputs, name="relation_module")


@keras.saving.register_keras_serializable("experiments")
class RelationNet(MetricLearner):
    """Relation network: a small network compares a query with each class.

    With the feature maps `f`, the support examples `S_c` of class `c` and the relation
    module `g`,

        logits_c = g(concatenate[sum over x in S_c of f(x), f(query)])

    along the channels. The paper's relation scores are `sigmoid(logits)`, trained with
    their squared error to one-hot labels: compile with `RelationLoss()`. With
    `SparseCategoricalCrossentropy(from_logits=True)`, as in other learners, classes
    compete in a softmax instead. The predicted class is the largest logit either way.

    Args:
        Same as `ProtoNet` without `metric`, `temperature` and `learn_temperature`, plus:
        backbone: Keras model from examples to features; without a `relation` feature
            maps of shape `(batch, height, width, channels)` (in the order of
            `keras.config.image_data_format()`).
        relation: Keras model from joined features, of twice the channels, to one number;
            `None` for `relation_module` of that shape.
        batch_normalization: See `ProtoNet`. The relation module's batch norms see pairs
            of an example and a class: with `"moving"` the pairs of all queries of the step
            in training; with `"support"` the pairs of the support examples with the classes
            of their episode; with `"transductive"` the episode's query pairs.

    Raises:
        ValueError: See `ProtoNet`; and at build, for a backbone whose output is no feature
            map, maps too small for the default relation module, and a relation module
            whose output is not one number.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from experiments.few_shot.relation import RelationLoss, RelationNet
    >>> backbone = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3)])
    >>> model = RelationNet(backbone, ways=3)
    >>> model.compile("adam", RelationLoss(), metrics=["accuracy"])
    >>> rng = np.random.default_rng(0)
    >>> support, labels = rng.normal(size=(2, 3, 8, 8, 1)), np.array([[2, 0, 1]] * 2)
    >>> queries = rng.normal(size=(2, 4, 8, 8, 1))
    >>> history = model.fit((support, labels, queries), np.zeros((2, 4)), verbose=0)
    >>> model.predict((support, labels, queries), verbose=0).shape
    (2, 4, 3)

    Reference:
        Learning to Compare: Relation Network for Few-Shot Learning (Sung et al., CVPR
        2018), Section 3.2, Eq. (1); sum over shots: Section 3.2, "K-shot".
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        relation: keras.Model | None = None,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, batch_normalization, **kwargs)
        if relation is not None and not isinstance(relation, keras.Model):
            raise ValueError(
                "`relation` must be a Keras model from joined feature maps to one number, "
                f"or None. Received: relation={relation!r}"
            )
        self.relation = relation

    def build_for(self, feature_shape: tuple[int, ...]) -> None:
        if len(feature_shape) != 3 and self.relation is None:
            raise ValueError(
                "`backbone` must return feature maps, with two spatial axes and a channel "
                "axis, neither pooled away nor flattened, or a custom `relation` be given. "
                f"Received: features of shape {(None, *feature_shape)}"
            )
        self.maps = feature_shape
        first = keras.config.image_data_format() == "channels_first"
        self.channel_axis = 0 if first else len(feature_shape) - 1
        joined = list(feature_shape)
        joined[self.channel_axis] *= 2
        if self.relation is None:
            self.relation = relation_module(tuple(joined))
        found = self.relation(keras.KerasTensor((None, *joined)))
        if getattr(found, "shape", None) != (None, 1):
            raise ValueError(
                "`relation` must return one number for each pair, of shape (batch, 1). "
                f"Received: outputs {found!r} for pairs of shape {tuple(joined)}"
            )

    def compare(
        self, support: Tensor, membership: Tensor, queries: Tensor, training: bool
    ) -> Tensor:
        sums = ops.matmul(ops.swapaxes(membership, 1, 2), support)
        sums, support, queries = (
            ops.reshape(each, (*ops.shape(each)[:2], *self.maps))
            for each in (sums, support, queries)
        )
        sets = [self._pairs(sums, queries)]
        if self.batch_normalization == "support":
            sets.insert(0, self._pairs(sums, support))
        found = outputs_of_sets(  # Relation Network Eq. (1): relation score
            self.relation, self.batch_normalization, sets, training
        )[-1]
        return at_least_float32(ops.reshape(found, (*ops.shape(queries)[:2], self.ways)))

    def get_config(self) -> dict[str, Any]:
        relation = keras.saving.serialize_keras_object(self.relation)
        return {**super().get_config(), "relation": relation}

    def _pairs(self, sums: Tensor, maps: Tensor) -> Tensor:
        """Returns each map joined to each class, of shape `(batch, maps * ways, ...)`."""
        batch, count = ops.shape(maps)[:2]
        shape = (batch, count, self.ways, *maps.shape[2:])
        pairs = [sums[:, None], maps[:, :, None]]
        joined = ops.concatenate(
            [ops.broadcast_to(each, shape) for each in pairs], axis=3 + self.channel_axis
        )
        return ops.reshape(joined, (batch, count * self.ways, *joined.shape[3:]))


@keras.saving.register_keras_serializable("experiments")
class RelationLoss(keras.losses.Loss):
    """Squared error between relation scores and one-hot labels.

        loss = mean over classes c of (sigmoid(logits_c) - [label = c])^2

    The paper sums over classes, a constant factor.

    Args:
        name: str, the loss's name.
        **kwargs: `reduction`, `dtype` of `keras.losses.Loss`.

    Call arguments:
        y_true: Class numbers, of shape `(batch, queries)` or `(batch, queries, 1)`.
        y_pred: Logits, of shape `(batch, queries, ways)`.

    Example:

    >>> import numpy as np
    >>> from experiments.few_shot.relation import RelationLoss
    >>> loss = RelationLoss()
    >>> float(loss(np.array([[1]]), np.zeros((1, 1, 4))))
    0.25

    Reference:
        Learning to Compare: Relation Network for Few-Shot Learning (Sung et al., CVPR
        2018), Section 3.2, Eq. (2).
    """

    def __init__(self, name: str = "relation_loss", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        scores = ops.sigmoid(ops.convert_to_tensor(y_pred))
        y_true = ops.reshape(ops.cast(y_true, "int32"), ops.shape(scores)[:-1])
        labels = ops.one_hot(y_true, scores.shape[-1], dtype=scores.dtype)
        loss = ops.mean(ops.square(scores - labels), axis=-1)  # Relation Network Eq. (2)
        # A number outside the classes would only lower the loss.
        is_class = ops.logical_and(y_true >= 0, y_true < scores.shape[-1])
        return ops.where(is_class, loss, ops.cast(float("nan"), loss.dtype))
