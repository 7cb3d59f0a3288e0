"""Meta-Neighborhoods with the support set as its dictionary."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, leave_out_of_xla, vectorized_map
from nsl_keras.few_shot.class_logits import ClassLogits, NamesClasses
from nsl_keras.few_shot.metric_learner import MetricLearner, class_means
from nsl_keras.neighborhoods import key_metrics
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.dictionary import NeighborDictionary
from nsl_keras.neighborhoods.dual_form import DenseStage, DualForm
from nsl_keras.neighborhoods.head import Neighbors
from nsl_keras.neighborhoods.inner_loop import Entries, InnerLearningRate
from nsl_keras.neighborhoods.key_metrics import inverse_norm
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel


@keras.saving.register_keras_serializable("nsl_keras")
class NeighborhoodLearner(MetricLearner):
    """Finetunes a head for each query on the support examples that it attends to.

    In Meta-Neighborhoods with the support set as dictionary, support features are the keys
    `k_j`, and their one-hot labels the values `v_j`. For a query with features `z`,

        w_j(z)  = softmax_j(sim(z, k_j) / temperature)
        phi_z   = phi - rate * d/dphi sum_j w_j(z) L(h_phi(k_j), v_j)   (inner_steps times)
        logits  = h_{phi_z}(z)

    where `L` is the cross-entropy and `rate` the inner learning rate. In every episode the
    head starts as `h(z)_c = scale * cos(z, W_c)`, from class prototypes `W_c`, the means of
    support features of length 1. Backbone, rate and scale are trained through the inner
    steps. Compile as `ProtoNet`.

    Args:
        Same as `ProtoNet` without `learn_temperature`, plus:
        metric: Metric of the attention, `"cosine"` by default.
        temperature: float above 0, the attention's temperature; not trained.
        inner_steps: int, the number of inner steps. Each query stores `features * ways`
            weights.
        inner_learning_rate: float above 0, the initial inner learning rate.
        learning_rate_form: See `MetaNeighborhoodHead`.
        scale: float above 0, the initial scale.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> backbone = nsl_keras.backbones.convnet4((8, 8, 1))
    >>> model = nsl_keras.few_shot.NeighborhoodLearner(backbone, ways=3)
    >>> rng = np.random.default_rng(0)
    >>> support, labels = rng.normal(size=(1, 3, 8, 8, 1)), np.array([[2, 0, 1]])
    >>> model.predict((support, labels, support), verbose=0).argmax(axis=-1).tolist()
    [[2, 0, 1]]

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Sections 2.1 to 2.3, Eq. (3) and
        (5). This package adds the support set as dictionary, and the head's start.
    """

    def __init__(
        self,
        backbone: keras.Model,
        ways: int = 5,
        metric: str | key_metrics.KeyMetric = "cosine",
        temperature: float = 0.2,
        inner_steps: int = 1,
        inner_learning_rate: float = 0.05,
        learning_rate_form: str = "scalar",
        scale: float = 10.0,
        batch_normalization: str = "moving",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ways, batch_normalization, **kwargs)
        leave_out_of_xla(self)
        self.metric = key_metrics.get(metric)
        self.temperature = validation.positive_number(temperature, "temperature")
        self.inner_steps = validation.positive_integer(inner_steps, "inner_steps")
        dtype = self.variable_dtype
        self.rate = InnerLearningRate(inner_learning_rate, learning_rate_form, dtype=dtype)
        self.scale = validation.positive_number(scale, "scale")

    def build_weights(self, feature_shape: tuple[int, ...]) -> None:
        self.rate.build_for([(math.prod(feature_shape), self.ways)])
        start = keras.initializers.Constant(self.scale)
        self.learned_scale = self.add_weight((), start, name="scale", autocast=False)

    def compare(self, support: Tensor, membership: Tensor, queries: Tensor) -> Tensor:
        scores = self.metric(queries, support) / self.temperature
        attention = ops.softmax(scores)  # MN Eq. (5)
        prototypes = self._prototypes(support, membership)

        def one_episode(tensors: list[Tensor]) -> Tensor:
            keys, values, attention, queries, prototypes = tensors
            weights = [ops.transpose(prototypes), self.learned_scale]
            stages = [DenseStage(weights, is_cosine=True)]
            # In one chunk: the size of a support set may be unknown.
            inner_loop = DualForm(
                self.rate, self.inner_steps, stages=lambda: stages, chunk_size=None
            )
            # MN Eq. (3).
            return inner_loop.outputs(Entries(keys, values), attention, queries)

        return vectorized_map(
            one_episode, [support, membership, attention, queries, prototypes]
        )

    def _prototypes(self, support: Tensor, membership: Tensor) -> Tensor:
        return class_means(support * inverse_norm(support), membership)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "metric": keras.saving.serialize_keras_object(self.metric),
            "temperature": self.temperature,
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.rate.initial,
            "learning_rate_form": self.rate.form,
            "scale": self.scale,
        }

    def with_support(self, layers: Any, features: Any, labels: Any, classes: Any) -> Any:
        options: dict[str, Any] = {"dtype": features.dtype}
        keys = ops.reshape(features, (len(features), -1))
        membership = np.eye(self.ways)[labels]
        model = AdaptedNeighborhoods(
            keras.Sequential([*layers, keras.layers.Flatten(**options)]),
            CosineDense(self.ways, **options),
            NeighborDictionary(
                len(keys),
                metric=self.metric,
                temperature=self.temperature,
                fixed_values=membership,
                dropout=0.0,
                **options,
            ),
            classes,
            inner_steps=self.inner_steps,
            inner_learning_rate=self.rate.initial,
            learning_rate_form=self.rate.form,
            **options,
        )
        model.build(layers[0].shape)
        model.dictionary.keys.assign(keys)
        prototypes = self._prototypes(keys[None], ops.cast(membership[None], keys.dtype))
        start = ops.transpose(prototypes[0]), self.learned_scale
        model.head.set_weights([*map(ops.convert_to_numpy, start)])
        model.neighborhood.learning_rate.set_weights(self.rate.get_weights())
        return model


@keras.saving.register_keras_serializable("nsl_keras")
class AdaptedNeighborhoods(NamesClasses, MetaNeighborhoodModel):
    """Meta-Neighborhoods on a support set; `classes` divides all logits."""

    def __init__(
        self,
        backbone: keras.Model,
        head: keras.layers.Layer,
        dictionary: NeighborDictionary,
        classes: ClassLogits,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, head, dictionary, **kwargs)
        self.classes = classes

    def call(self, inputs: Any, training: bool | None = None, adapt: bool = True) -> Any:
        return self.classes(super().call(inputs, training=training, adapt=adapt))

    def neighbors_of_batch(
        self, inputs: Any, k: int, by: str = "attention", effects: bool = False
    ) -> Neighbors:
        found = super().neighbors_of_batch(inputs, k, by, effects)
        before, after = self.classes(found.before), self.classes(found.after)
        found = found._replace(before=before, after=after)
        if found.output_changes is None:
            return found
        return found._replace(output_changes=self.classes(found.output_changes))

    def _make_unadapted(self) -> keras.Model:
        plain = super()._make_unadapted()
        return keras.Model(plain.input, self.classes(plain.output), name=plain.name)

    def get_config(self) -> dict[str, Any]:
        classes = keras.saving.serialize_keras_object(self.classes)
        return {**super().get_config(), "classes": classes}
