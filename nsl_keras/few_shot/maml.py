"""Model-agnostic meta-learning: a classifier that is trained to be finetuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, gradients_of, map_elements
from nsl_keras.few_shot.episodic_learner import EpisodicLearner, episode_shapes
from nsl_keras.few_shot.functional import (
    POLICIES,
    FunctionalClassifier,
    Selection,
    select_variables,
)
from nsl_keras.neighborhoods.inner_loop import cross_entropy
from nsl_keras.training.second_order import require_second_derivatives

FORMS = ("fixed", "learned")


@keras.saving.register_keras_serializable("nsl_keras")
class MAML(EpisodicLearner):
    """A classifier that adapts to the support set of an episode, then scores its queries.

    With a classifier `f` of weights `theta`, part of which are the inner variables `phi`,
    and the mean cross-entropy `L`,

        phi'            = phi - rate * d/dphi L(f_phi(support images), support labels)
        logits          = f_phi'(query images)

    where the first line is repeated `inner_steps` times. Training takes the gradient of
    the loss of these logits with respect to all trainable variables of the classifier
    (and to learned rates), through the inner steps: the same `fit` as for any Keras
    model. The wrapped model itself is what is trained, and is never changed by a call.

    Special cases: `inner_variables="classifier"` is ANIL, which adapts the last layer
    alone. `inner_variables="similarity+classifier"` on a network with static neural
    similarities is the meta-learned static network of the paper, which finetunes both for
    5 steps of rate 0.2 and then the classifier alone for 20:
    `MAML(model, "similarity+classifier", inner_steps=5, inner_learning_rate=0.2,
    test_extra_steps=20)`. It starts from a pretrained network, whose other variables stay
    as they are where they are frozen (`kernel_trainable=False`, `layer.trainable=False`);
    `nsl_keras.convert.add_similarity` freezes them. A network that was trained on other
    classes needs a new last layer, of the episodes' ways: see the second example.

    Batch norms. `batch_normalization` says whose statistics they normalize by:

    * `"support"`: those of the support set; the queries too, by statistics that the
      adapted network has on the support set. The answer for a query does not depend on
      other queries.
    * `"transductive"`: each set by its own, the queries by those of all queries of the
      episode. Numbers published with it, most of MAML's before 2020, are not comparable:
      an answer depends on the other queries.
    * `"moving"`: the moving statistics, in all passes. It suits a pretrained network.

    The moving statistics change in training under `"moving"` alone: each step moves them,
    by the layer's momentum, towards the statistics of the query images under the adapted
    weights, all episodes of the batch taken together. Under the other policies they are
    neither read nor written. Batch norms with `trainable=False` always normalize by their
    moving statistics. All other layers run in inference mode, in training too: no
    dropout, no augmentation (augment the images that episodes are made of).

    A Keras batch norm inside a layer or model with a `call` of its own is out of reach: it
    is refused under the first two policies, and under `"moving"` the pass that moves the
    statistics runs the whole model in training mode, as Keras does. Those of a functional
    or Sequential model, models nested in it and this package's predictors are within
    reach.

    Cost. An inner step is a forward and a backward pass over the support set, through
    both of which the outer gradient goes back once more. Training holds the activations
    of all inner steps of all episodes of a batch, so memory grows linearly with the number
    of steps and with the batch; `first_order=True` drops what the second differentiation
    needs of each step, not the activations that the query pass needs. Where memory is
    short, a batch of one episode and an optimizer with `gradient_accumulation_steps` (on
    one device) give the same update as the batch they stand for. Outside training nothing
    of a step outlives it. Episodes of a batch are computed one after the other in a loop
    of the graph, so tracing time does not depend on the batch.

    Losses that layers add (activity regularizers, `add_loss`) do not count, neither in
    the inner steps nor in training. Weight regularizers count in training, as in any
    Keras model. On JAX with the batch spread over several devices, the loop goes over all
    episodes on each of them: it is right, and no faster than on one.

    Non-finite inner losses. In `fit`, `evaluate` and `predict` on TensorFlow without XLA,
    and in eager calls, an inner loss that is not finite raises
    `tf.errors.InvalidArgumentError` that names the step and the episode. XLA and JAX have
    no assertions: there `fit` raises `NonFiniteLossError` after the step. The same holds
    for images that are not finite and for support labels that are not the classes, where
    they come from a data set; the logits of such an episode are NaN. Arrays are checked
    before the first step.

    Args:
        model: Keras classifier of any kind, from images to logits of shape `(batch,
            ways)`, without a softmax.
        inner_variables: Which trainable variables the inner steps change: `"all"`,
            `"classifier"` (the last layer with weights), `"similarity"` (the parameters
            of static neural similarities), `"similarity+classifier"`; a collection of
            names or paths of variables; or a function that takes a variable and returns
            whether to change it, registered with
            `keras.saving.register_keras_serializable` if the model is to be saved.
        inner_steps: int of at least 1, the number of inner steps in training.
        inner_learning_rate: float above 0, the rate of the inner steps, or its start.
        learning_rate_form: `"fixed"`, or `"learned"`: one trained rate for each variable
            that is adapted, used by its absolute value.
        first_order: bool, whether the inner gradients count as constants in training.
        extra_steps: int of at least 0, the number of further steps, on `extra_variables`
            alone, in training.
        extra_variables: As `inner_variables`, for the further steps.
        test_inner_steps: int or `None`, the number of inner steps outside training;
            `None` is `inner_steps`.
        test_extra_steps: int or `None`, the number of further steps outside training;
            `None` is `extra_steps`.
        batch_normalization: `"support"`, `"transductive"` or `"moving"`, see above.
        **kwargs: `name`, `trainable` of `keras.Model`. The dtype policy is that of
            `model`.

    Call arguments:
        inputs: Tuple `(support_images, support_labels, query_images)`, with labels from 0
            to `ways - 1`, each of them present.
        training: bool, whether this is a training step.

    Input shape:
        `(batch, support, ...)`, `(batch, support)` and `(batch, queries, ...)`; the sizes
        of the first axes may be unknown.

    Output shape:
        `(batch, queries, ways)`, logits. Compile with
        `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`; the targets are
        query labels of shape `(batch, queries)`, and `sample_weight` one weight for each
        episode or for each query.

    Raises:
        ValueError: For arguments outside the ranges above; for a selection that matches
            no variable, which lists their names; for a model that ends in a softmax, whose
            outputs are no vector of known width, whose batch norms are synchronized or
            renormalize, (with `"support"`) are called more than once, or (unless
            `"moving"`) are inside a layer or model with a `call` of its own; without
            `first_order` on TensorFlow, for a layer that has no second derivative
            (resizing, softsign) or an inexact one (layer and group normalization), which
            is named; at `compile`, for a loss of probabilities; at `fit`, `evaluate` and
            `predict` with arrays or a `keras.utils.PyDataset` (its first batch), for
            support labels that are not the model's `ways` classes, and for images that are
            not finite.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> network = keras.Sequential([
    ...     keras.Input((8, 8, 1)),
    ...     keras.layers.Conv2D(4, 3, activation="relu"),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(2),
    ... ])
    >>> model = nsl_keras.few_shot.MAML(network, inner_steps=2)
    >>> model.compile(
    ...     "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ...     metrics=["accuracy"])
    >>> sampler = nsl_keras.few_shot.EpisodeSampler(
    ...     np.random.default_rng(0).random((40, 8, 8, 1)).astype("float32"),
    ...     np.arange(40) % 4, ways=2, shots=1, queries=3)
    >>> episodes = sampler.episodes(8)
    >>> inputs = (
    ...     episodes.support_images, episodes.support_labels, episodes.query_images)
    >>> history = model.fit(inputs, episodes.query_labels, batch_size=4, verbose=0)
    >>> model.predict(inputs, verbose=0).shape
    (8, 6, 2)

    From a network that was pretrained on ten classes, with similarities that are new and
    a new last layer, the paper's meta-learned static network for episodes of two:

    >>> pretrained = keras.Sequential([
    ...     keras.Input((8, 8, 1)),
    ...     keras.layers.Conv2D(4, 3, activation="relu"),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(10),
    ... ])
    >>> features = keras.Model(pretrained.inputs, pretrained.layers[-2].output)
    >>> static = nsl_keras.convert.add_similarity(features, "diagonal")
    >>> network = keras.Model(static.inputs, keras.layers.Dense(2)(static.output))
    >>> model = nsl_keras.few_shot.MAML(
    ...     network, "similarity+classifier", inner_steps=5, inner_learning_rate=0.2,
    ...     test_extra_steps=20)
    >>> tuple(model(inputs).shape), len(model.trainable_variables)
    ((8, 6, 2), 3)

    Reference:
        Model-Agnostic Meta-Learning (Finn et al., ICML 2017); ANIL: Rapid Learning or
        Feature Reuse? (Raghu et al., ICLR 2020); learned rates: Meta-SGD (Li et al.,
        2017), there one for each weight. Neural Similarity Learning (Liu et al., NeurIPS
        2019), Section 7.2, Eq. (7) and Appendix A ("5 gradient steps on both the static
        similarity matrices and the classifier with step size = 0.2", then "additional 20
        gradient steps with the same step size but on the classifier only"). The authors
        published no code for it. Eq. (7) has one step on the similarity; the text says
        that only the similarity is updated, the appendix that the classifier is too.
    """

    def __init__(
        self,
        model: keras.Model,
        inner_variables: Selection = "all",
        inner_steps: int = 5,
        inner_learning_rate: float = 0.01,
        learning_rate_form: str = "fixed",
        first_order: bool = False,
        extra_steps: int = 0,
        extra_variables: Selection = "classifier",
        test_inner_steps: int | None = None,
        test_extra_steps: int | None = None,
        batch_normalization: str = "support",
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, keras.Model):
            raise ValueError(f"`model` must be a Keras model. Received: model={model!r}")
        kwargs.setdefault("dtype", model.dtype_policy)
        selected = kwargs.pop("selected", None)
        super().__init__(**kwargs)
        #: Places of the selected variables among the model's, of inner and extra steps;
        #: given by `from_config`, since flags may have changed after they were selected.
        self._selected: list[list[int]] | None = selected
        self.inner_steps = validation.number_of_steps(inner_steps, "inner_steps")
        self.inner_learning_rate = validation.positive_number(
            inner_learning_rate, "inner_learning_rate"
        )
        self.learning_rate_form = validation.one_of(
            learning_rate_form, FORMS, "learning_rate_form"
        )
        self.first_order = validation.boolean(first_order, "first_order")
        self.extra_steps = validation.non_negative_integer(
            extra_steps, "extra_steps", validation.MOST_STEPS
        )
        self.test_inner_steps = validation.optional(
            validation.number_of_steps, test_inner_steps, "test_inner_steps"
        )
        self.test_extra_steps = validation.optional(
            validation.non_negative_integer,
            test_extra_steps,
            "test_extra_steps",
            validation.MOST_STEPS,
        )
        self.batch_normalization = validation.one_of(
            batch_normalization, POLICIES, "batch_normalization"
        )
        self.inner_variables = inner_variables
        self.extra_variables = extra_variables
        self.model = model
        self.ways = 0
        self._logits_dtype = "float32"
        self._rates: list[Any] = []
        if model.built:
            self._select()

    def _select(self) -> None:
        """Finds the variables that are adapted, and in which of the steps.

        Once and for all: what is frozen or trained later adapts as it did, also after the
        model is loaded.
        """
        variables = self.model.variables
        if self._selected is None:
            chosen = [
                select_variables(self.model, self.inner_variables, "inner_variables"),
                select_variables(self.model, self.extra_variables, "extra_variables")
                if self.extra_steps or self.test_extra_steps
                else [],
            ]
            number = {id(variable): i for i, variable in enumerate(variables)}
            self._selected = [[number[id(each)] for each in group] for group in chosen]
        inner, extra = ([variables[i] for i in group] for group in self._selected)
        self.classifier = FunctionalClassifier(
            self.model, [*inner, *extra], self.batch_normalization
        )
        place = {id(each): i for i, each in enumerate(self.classifier.variables)}
        self._inner = [place[id(variable)] for variable in inner]
        self._extra = [place[id(variable)] for variable in extra]

    def build(self, input_shape: Sequence[Sequence[int | None]]) -> None:
        if self.built:
            return
        support, _, _ = episode_shapes(input_shape)
        images = (None, *support[2:])
        if not self.model.built:
            # On a symbolic batch: a `call` of the model's own may have no `build`.
            self.model(keras.KerasTensor(images, keras.config.floatx()))
            self._select()
        found = self._model_outputs(images)
        shape: tuple[int | None, ...] = tuple(getattr(found, "shape", ()))
        if len(shape) != 2 or shape[1] is None:
            raise ValueError(
                "`model` must return logits of shape (batch, ways). "
                f"Received: model {self.model.name!r} with outputs {found!r}"
            )
        self.ways = shape[1]
        self._logits_dtype = keras.backend.result_type(found.dtype, "float32")
        if self.learning_rate_form == "learned":
            self._rates = [
                self.add_weight(
                    name=f"inner_learning_rate_{index}",
                    shape=(),
                    initializer=keras.initializers.Constant(self.inner_learning_rate),
                    dtype=variable.dtype,
                )
                for index, variable in enumerate(self.classifier.variables)
            ]
        if not self.first_order:
            require_second_derivatives(self.model, remedy=", or pass first_order=True")

    def _model_outputs(self, image_shape: tuple[int | None, ...]) -> keras.KerasTensor:
        images = keras.KerasTensor(image_shape, keras.config.floatx())
        return self.model.compute_output_spec(images)

    @property
    def inner_learning_rates(self) -> dict[str, Tensor]:
        """The rates as they stand, by the path of the variable that each one adapts.

        Raises:
            ValueError: If the model is not built: rates are variables of their own.
        """
        validation.built(self, "inner_learning_rates")
        paths = [variable.path for variable in self.classifier.variables]
        return dict(zip(paths, self._rates_of_variables(), strict=True))

    def _rates_of_variables(self) -> list[Tensor]:
        if self.learning_rate_form == "learned":
            return [ops.abs(ops.convert_to_tensor(rate)) for rate in self._rates]
        return [
            # Not `ops.cast`, which rounds a Python number to float32 first.
            ops.convert_to_tensor(self.inner_learning_rate, variable.dtype)
            for variable in self.classifier.variables
        ]

    def call(self, inputs: Sequence[Tensor], training: bool | None = None) -> Tensor:
        support_images, support_labels, query_images = map(ops.convert_to_tensor, inputs)
        support_images, membership, valid = self._checked(
            support_images, support_labels, query_images
        )
        shape = (query_images.shape[1], self.ways)
        outputs = [keras.KerasTensor(shape, self._logits_dtype)]
        updates = bool(training) and self.batch_normalization == "moving"
        if updates:
            outputs += [
                keras.KerasTensor(each.shape, each.dtype)
                for each in self.classifier.moving_statistics
            ]

        def one_episode(elements: list[Tensor]) -> list[Tensor]:
            number, images, targets, queries = elements
            values = self._adapted(images, targets, number, bool(training))
            logits = self.classifier.query_outputs(values, images, queries)
            if not updates:
                return [logits]
            fixed = [ops.stop_gradient(value) for value in values]
            statistics = self.classifier.batch_statistics(fixed, queries)
            return [logits, *map(ops.stop_gradient, statistics)]

        numbers = ops.arange(ops.shape(support_images)[0])
        logits, *statistics = map_elements(
            one_episode, [numbers, support_images, membership, query_images], outputs
        )
        if updates:
            queries = ops.shape(query_images)[0] * ops.shape(query_images)[1]
            self.classifier.update_moving_statistics(_pooled(statistics), queries)
        # Where no check can run, in compiled code, wrong labels do not go unseen.
        return ops.where(valid[:, None, None], logits, float("nan"))

    def _adapted(
        self, images: Tensor, targets: Tensor, episode: Tensor, training: bool
    ) -> list[Tensor]:
        """Returns the values of the adapted variables after all steps on a support set."""
        rates = self._rates_of_variables()
        values = self.classifier.values()
        for step, places in enumerate(self._places_of_steps(training), start=1):

            def loss_at(
                at: list[Tensor],
                values: list[Tensor] = values,
                places: list[int] = places,
                step: int = step,
            ) -> tuple[Tensor, None]:
                tried = list(values)
                for place, value in zip(places, at, strict=True):
                    tried[place] = value
                logits, _ = self.classifier.outputs(tried, images)
                loss = ops.mean(cross_entropy(ops.cast(targets, logits.dtype), logits))
                return loss, None

            gradients, _ = gradients_of(loss_at, [values[place] for place in places])
            values = list(values)
            for place, gradient in zip(places, gradients, strict=True):
                if self.first_order:
                    gradient = ops.stop_gradient(gradient)
                values[place] = values[place] - rates[place] * gradient  # NSL Eq. (7)
        return values

    def _places_of_steps(self, training: bool) -> list[list[int]]:
        """Returns which of the classifier's variables each step changes."""
        inner, extra = self.inner_steps, self.extra_steps
        if not training:
            inner = inner if self.test_inner_steps is None else self.test_inner_steps
            extra = extra if self.test_extra_steps is None else self.test_extra_steps
        return [self._inner] * inner + [self._extra] * extra

    def _labels_demand(self) -> str:
        return (
            f"`support_labels` must be the classes 0 to {self.ways - 1}, each of them "
            f"present, as many as model {self.model.name!r} has outputs: give a network "
            "that was trained on more classes a new last layer of the episodes' ways."
        )

    def compute_output_shape(
        self, input_shape: Sequence[Sequence[int | None]]
    ) -> tuple[int | None, ...]:
        support, _, query = episode_shapes(input_shape)
        ways = self._model_outputs((None, *support[2:])).shape[-1]
        return (support[0], query[1], ways)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "model": keras.saving.serialize_keras_object(self.model),
            "inner_variables": _serialized(self.inner_variables),
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.inner_learning_rate,
            "learning_rate_form": self.learning_rate_form,
            "first_order": self.first_order,
            "extra_steps": self.extra_steps,
            "extra_variables": _serialized(self.extra_variables),
            "test_inner_steps": self.test_inner_steps,
            "test_extra_steps": self.test_extra_steps,
            "batch_normalization": self.batch_normalization,
            "selected": self._selected,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MAML:
        config = dict(config)
        for part in ("model", "inner_variables", "extra_variables"):
            if isinstance(config[part], dict):
                config[part] = keras.saving.deserialize_keras_object(
                    config[part], custom_objects=custom_objects
                )
        return cls(**config)


def _serialized(selection: Any) -> Any:
    if callable(selection):
        return keras.saving.serialize_keras_object(selection)
    return selection if isinstance(selection, str) else list(selection)


def _pooled(statistics: Sequence[Tensor]) -> list[Tensor]:
    """Returns mean and variance over all episodes, from those of each episode."""
    pooled = []
    for means, variances in zip(statistics[::2], statistics[1::2], strict=True):
        pooled.append(ops.mean(means, axis=0))
        pooled.append(ops.mean(variances, axis=0) + ops.var(means, axis=0))
    return pooled
