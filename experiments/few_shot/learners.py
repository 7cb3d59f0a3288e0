"""Learners of the few-shot table that the package does not have."""

from typing import Any

import keras
from keras import ops

import nsl_keras
from nsl_keras.few_shot import NearestCentroid, ProtoNet
from nsl_keras.few_shot.metric_learner import MetricLearner, outputs_of_sets


@keras.saving.register_keras_serializable("experiments")
class NearestNeighbor(NearestCentroid):
    """The baseline of Matching Networks (Vinyals et al., NeurIPS 2016); trains nothing.

        logits_c = max over support examples x of class c of sim(z(query), z(x))

    with the metric as `sim`, and `z` of `NearestCentroid`.
    """

    def compare(self, support: Any, membership: Any, queries: Any) -> Any:
        similarity = self.metric(self.vectors(queries), self.vectors(support))
        of_class = ops.where(membership[:, None] > 0, similarity[..., None], -1e30)
        return ops.max(of_class, axis=2)


@keras.saving.register_keras_serializable("experiments")
class MatchingNet(ProtoNet):
    """Matching networks (Vinyals et al., NeurIPS 2016): attention on the labels.

        a_i       = softmax_i(metric(f(query), f(x_i)) / temperature)
        logits_c  = log sum over i with label c of a_i

    The paper's Eq. (1) has cosines, and no temperature. Full context embeddings are left
    out, as in later comparisons. The logits are logarithms of probabilities. Compile as
    `ProtoNet`.
    """

    def compare(self, support: Any, membership: Any, queries: Any) -> Any:
        scores = self.scaled(self.metric(queries, support))
        of_class = ops.where(membership[:, None] > 0, scores[..., None], -1e30)
        total = ops.logsumexp(scores, axis=-1, keepdims=True)
        # The logarithm of Matching Networks Eq. (1): attention on each class's images.
        return ops.logsumexp(of_class, axis=2) - total


def relation_module(
    map_shape: tuple[int, ...], filters: int = 64, units: int = 8
) -> keras.Model:
    """From two joined feature maps to a score (Figure 2), without the paper's sigmoid."""
    inputs = outputs = keras.Input(map_shape)
    for _ in range(2):
        outputs = keras.layers.Conv2D(filters, 3, padding="same")(outputs)
        outputs = nsl_keras.layers.BatchNormalization()(outputs)
        outputs = keras.layers.ReLU()(outputs)
        outputs = keras.layers.MaxPooling2D(2)(outputs)
    outputs = keras.layers.Flatten()(outputs)
    outputs = keras.layers.Dense(units, activation="relu")(outputs)
    outputs = keras.layers.Dense(1)(outputs)
    return keras.Model(inputs, outputs, name="relation_module")


@keras.saving.register_keras_serializable("experiments")
class RelationNet(MetricLearner):
    """Relation networks (Sung et al., CVPR 2018): a learned comparison of maps.

    With the feature maps `f`, the support examples `S_c` of class `c` and the relation
    module `g`,

        logits_c = g(concatenate[sum over x in S_c of f(x), f(query)])

    along the channels (Section 3.2, Eq. (1)). Compile it with `RelationLoss()`. `relation`
    is a model from joined maps to one number, `None` for `relation_module`. With
    `batch_normalization="support"` its batch norms see the pairs of the support examples
    with the classes of their episode, with `"transductive"` the pairs of the queries.
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
        self.relation = relation

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        self.is_training = bool(training)
        return super().call(inputs, training=training)

    def build_weights(self, feature_shape: tuple[int, ...]) -> None:
        self.maps = feature_shape
        if self.relation is None:
            self.relation = relation_module((*feature_shape[:-1], 2 * feature_shape[-1]))

    def compare(self, support: Any, membership: Any, queries: Any) -> Any:
        sums = ops.matmul(ops.swapaxes(membership, 1, 2), support)
        sums, support, queries = (
            ops.reshape(each, (*ops.shape(each)[:2], *self.maps))
            for each in (sums, support, queries)
        )
        sets = [self._pairs(sums, queries)]
        if self.batch_normalization == "support":
            sets.insert(0, self._pairs(sums, support))
        found = outputs_of_sets(  # Relation Network Eq. (1): relation score
            self.relation, self.batch_normalization, sets, self.is_training
        )[-1]
        shape = (*ops.shape(queries)[:2], self.ways)
        return ops.cast(ops.reshape(found, shape), "float32")

    def get_config(self) -> dict[str, Any]:
        relation = keras.saving.serialize_keras_object(self.relation)
        return {**super().get_config(), "relation": relation}

    def _pairs(self, sums: Any, maps: Any) -> Any:
        """Each map joined to each class, of shape `(batch, maps * ways, ...)`."""
        batch, count = ops.shape(maps)[:2]
        shape = (batch, count, self.ways, *maps.shape[2:])
        pairs = [sums[:, None], maps[:, :, None]]
        joined = ops.concatenate([ops.broadcast_to(each, shape) for each in pairs], axis=-1)
        return ops.reshape(joined, (batch, count * self.ways, *joined.shape[3:]))


@keras.saving.register_keras_serializable("experiments")
class RelationLoss(keras.losses.Loss):
    """Squared error between relation scores and one-hot labels (Section 3.2, Eq. (2)).

        loss = mean over classes c of (sigmoid(logits_c) - [label = c])^2

    The paper sums over classes, a constant factor.
    """

    def __init__(self, name: str = "relation_loss", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        scores = ops.sigmoid(ops.convert_to_tensor(y_pred))
        y_true = ops.reshape(ops.cast(y_true, "int32"), ops.shape(scores)[:-1])
        labels = ops.one_hot(y_true, scores.shape[-1], dtype=scores.dtype)
        return ops.mean(ops.square(scores - labels), axis=-1)  # Relation Network Eq. (2)
