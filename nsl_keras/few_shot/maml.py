"""Model-agnostic meta-learning: trains a network to be finetuned.

Keras's `train_step` runs `MAML.call`, which in each episode takes the inner steps
(`_values_after`) and evaluates the network at the new weights by `StatelessModel`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, gradients_of, map_elements
from nsl_keras.few_shot.adapting import adapted_copy
from nsl_keras.few_shot.class_logits import AdaptedModel
from nsl_keras.few_shot.episodic_learner import EpisodicLearner, one_hot
from nsl_keras.few_shot.stateless import Selection, StatelessModel, select_variables
from nsl_keras.graphs import require_linear
from nsl_keras.neighborhoods.inner_loop import InnerLearningRate

#: Forms of the learning rates, and those of their layer, for one number per variable.
_FORMS = {"fixed": "fixed", "learned": "diagonal"}

_CROSS_ENTROPY = functools.partial(keras.losses.categorical_crossentropy, from_logits=True)


@keras.saving.register_keras_serializable("nsl_keras")
class MAML(EpisodicLearner):
    """A network that adapts to the support set of an episode, then answers its queries.

    With a network `f`, the inner variables `phi` that adapt, and the mean cross-entropy or
    the inner loss `L`,

        phi'            = phi - rate * d/dphi L(f_phi(support examples), support labels)
        outputs         = f_phi'(query examples)

    The first line is repeated `inner_steps` times; `rate` is the inner learning rate. `fit`
    trains the network's trainable variables (and learned rates) on the loss of these
    outputs, through the inner steps. Freeze layers before you make the learner.

    Except batch norms that normalize by batches, all layers run in inference mode, also in
    training: there is no dropout, and losses from `add_loss` are ignored. Unless
    `first_order=True`, training stores the activations of all inner steps of a batch, and
    needs the second derivatives of all layers (see `check_second_order`).

    Args:
        model: Keras classifier of any kind, from examples to logits of shape `(batch,
            ways)`, without a softmax; with an `inner_loss` any network of one input and
            output.
        inner_variables: The trainable variables that the inner steps change: `"all"`,
            `"classifier"` (the last layer with weights: ANIL), `"similarity"` (of static
            layers), `"predictor"` (the networks of dynamic layers), or two joined as
            `"similarity+classifier"`; or a list of names or paths of variables.
        inner_steps: int of at least 1, the number of inner steps in training.
        inner_learning_rate: float above 0, the (initial) learning rate of the inner steps.
        learning_rate_form: `"fixed"`, or `"learned"` for one trained learning rate per
            adapted variable, of which the absolute value is used.
        first_order: bool, whether training treats the inner gradients as constants.
        test_inner_steps: int, the inner steps outside training; `None` for `inner_steps`.
        batch_normalization: Statistics that batch norms normalize by. `"support"` and
            `"transductive"` are as in `ProtoNet`. `"moving"` uses moving statistics, which
            stay unchanged.
        inner_loss: `None` for classification. For regression, a Keras loss or its name, for
            example `"mean_squared_error"`.
        **kwargs: `name`, `trainable` of `keras.Model`. The learner takes the dtype policy
            of `model`.

    Call arguments:
        inputs: Same as for `ProtoNet`; with an `inner_loss`, targets in place of labels.
        training: bool, whether this is a training step.

    Input shape:
        `(batch, support, ...)`, `(batch, support)` and `(batch, queries, ...)`. Targets
        have the shape `(batch, support, ...)` of the network's outputs.

    Output shape:
        `(batch, queries, ways)`, logits: compile as `ProtoNet`. In a regression
        `(batch, queries, ...)`: compile with any loss.

    Raises:
        ValueError: For arguments outside these ranges, other models than described, data
            that `ProtoNet` refuses, and targets of another shape or that are not finite.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> network = keras.Sequential([
    ...     keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2)])
    >>> model = nsl_keras.few_shot.MAML(network, inner_steps=2)
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> images, labels = np.ones((4, 2, 8, 8, 1)), np.array([[0, 1]] * 4)  # 4 episodes.
    >>> sorted(model.fit((images, labels, images), labels, verbose=0).history)
    ['loss']

    Reference:
        Model-Agnostic Meta-Learning (Finn et al., ICML 2017), Algorithm 2; ANIL (Raghu et
        al., ICLR 2020); learned rates: Meta-SGD (Li et al., 2017), with one per weight.
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2, Eq. (7), takes
        one step on the similarity alone.
    """

    def __init__(
        self,
        model: keras.Model,
        inner_variables: Selection = "all",
        inner_steps: int = 5,
        inner_learning_rate: float = 0.01,
        learning_rate_form: str = "fixed",
        first_order: bool = False,
        test_inner_steps: int | None = None,
        batch_normalization: str = "support",
        inner_loss: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, batch_normalization, **kwargs)
        self.inner_steps = validation.positive_integer(inner_steps, "inner_steps")
        form = validation.one_of(learning_rate_form, _FORMS, "learning_rate_form")
        self.learning_rate_form = form
        dtype = self.variable_dtype
        self.rate = InnerLearningRate(inner_learning_rate, _FORMS[form], dtype=dtype)
        self.first_order = validation.boolean(first_order, "first_order")
        self.test_inner_steps = validation.optional(
            validation.positive_integer, test_inner_steps, "test_inner_steps"
        )
        self.model = model
        validation.require_built(model, "MAML")
        self.inner_loss = inner_loss
        self.classifies = inner_loss is None
        self._loss_of: Any = keras.losses.get(inner_loss) or _CROSS_ENTROPY
        if self.classifies:
            require_linear(model, "model")
        inner = select_variables(model, inner_variables)
        self.stateless = StatelessModel(model, inner, batch_normalization)

    def build_weights(self, shape: tuple[int, ...]) -> None:
        if self.classifies:
            demand = "a network with logits of shape (batch, ways), for two or more ways"
            is_vector = len(shape) == 1 and shape[0] > 1
            validation.require(is_vector, "model", demand, (None, *shape))
            (self.ways,) = shape
        self.outputs_shape = shape
        self.rate.build_for([()] * len(self.stateless.variables))

    @property
    def inner_learning_rates(self) -> list[Tensor]:
        """The current learning rates of the adapted variables, in the network's order."""
        return self.rate.rates()

    def call(self, inputs: Sequence[Tensor], training: bool | None = None) -> Tensor:
        support, targets, queries = inputs
        if self.classifies:
            targets = one_hot(targets, self.ways)

        def one_episode(episode: list[Tensor]) -> list[Tensor]:
            support, targets, queries = episode
            values = self._values_after(support, targets, bool(training))
            return [self.stateless.query_outputs(values, support, queries)]

        outputs = keras.KerasTensor(
            (queries.shape[1], *self.outputs_shape), self._outputs_dtype
        )
        return map_elements(one_episode, [support, targets, queries], [outputs])[0]

    def _values_after(
        self, support: Tensor, targets: Tensor, training: bool
    ) -> list[Tensor]:
        at_test = self.test_inner_steps or self.inner_steps
        steps = self.inner_steps if training else at_test
        values = self.stateless.values()
        for _ in range(steps):
            values = self._step(values, support, targets)
        return values

    def _step(self, values: list[Tensor], support: Any, targets: Any) -> list[Tensor]:
        """Returns values after one step: Algorithm 2, lines 6 and 7; NSL Eq. (7)."""

        def loss(values: list[Tensor]) -> tuple[Tensor, None]:
            outputs, _ = self.stateless.outputs(values, support)
            of_example = self._loss_of(ops.cast(targets, outputs.dtype), outputs)
            return ops.mean(of_example), None

        gradients, _ = gradients_of(loss, values)
        if self.first_order:
            gradients = [*map(ops.stop_gradient, gradients)]
        triples = zip(values, self.inner_learning_rates, gradients, strict=True)
        return [
            value - ops.cast(rate, value.dtype) * slope for value, rate, slope in triples
        ]

    def get_config(self) -> dict[str, Any]:
        # Places: names and `trainable` flags may have changed when the model is loaded.
        inner = set(map(id, self.stateless.variables))
        places = [p for p, v in enumerate(self.model.variables) if id(v) in inner]
        return {
            **super().get_config(),
            "inner_variables": places,
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.rate.initial,
            "learning_rate_form": self.learning_rate_form,
            "first_order": self.first_order,
            "test_inner_steps": self.test_inner_steps,
            "inner_loss": keras.saving.serialize_keras_object(self.inner_loss),
        }

    def _adapt(self, images: Any, labels: np.ndarray, classes: Any) -> Any:
        targets = ops.one_hot(labels, self.ways) if classes else labels
        shape = (len(images), *self.outputs_shape)
        demand = f"of the shape of the outputs, {shape}"
        validation.require(np.shape(targets) == shape, "y", demand, np.shape(labels))
        validation.require_finite(labels, "y")
        inputs = getattr(self.model, "inputs", None)
        dtype = inputs[0].dtype if inputs else self.compute_dtype
        support = ops.convert_to_tensor(images, dtype)
        values = self._values_after(support, targets, training=False)
        new = dict(zip(map(id, self.stateless.variables), values, strict=True))
        layers = adapted_copy(self.model, self.batch_normalization, support, new)
        model = AdaptedModel([*layers, classes]) if classes else keras.Sequential(layers)
        return model, self, support
