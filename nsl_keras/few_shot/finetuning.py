"""Finetuning a classifier in each episode.

A classifier alone is finetuned in all episodes at once, on features that are computed once.
Deeper layers are finetuned in one episode after the other, inside one compiled loop.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import backend, graphs, nesting, validation
from nsl_keras.backend import Tensor, gradients_of, map_elements
from nsl_keras.copying import copied, paired_variables, registered
from nsl_keras.few_shot import stateless
from nsl_keras.few_shot.adapting import Adapting, adapted_copy
from nsl_keras.few_shot.class_logits import AdaptedModel
from nsl_keras.few_shot.episodic_learner import episode_shapes
from nsl_keras.few_shot.metric_learner import outputs_of_sets
from nsl_keras.few_shot.stateless import POLICIES, Selection, StatelessModel
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.inner_loop import cross_entropy
from nsl_keras.normalization import turn_batch_norm

#: The rule of finetuning, but for the learning rate.
MOMENTUM = 0.9
DAMPENING = 0.9
WEIGHT_DECAY = 0.001


class Finetuner(Adapting):
    """Finetunes chosen variables of a classifier on the support set of each episode.

    Each episode gets its own values; the model does not change. With a buffer `m` and the
    gradient `g` of the support set's mean cross-entropy, a step changes a value `w` by

        g <- g + 0.001 w
        m <- g                       in the first step
        m <- 0.9 m + 0.1 g           in all others
        w <- w - learning_rate * m

    This is PyTorch's momentum with dampening and weight decay, which Keras does not have.

    A new last layer of `ways` outputs, of the same kind and not frozen, replaces the
    trained one. It starts at zero (a `CosineDense` from its own initializer): the part of a
    random start outside the span of the support features would never be trained, but would
    affect queries. From zero the first step leads to the scores of class means,
    `f(query) . sum_i (onehot(y_i) - 1 / ways) f(x_i)`.

    `evaluate` takes a finetuner, which uses the model's current weights and has none of its
    own: save `model`, or the finetuned network that `adapt` returns. Layers other than
    batch norms run in inference mode, and regularizers add nothing to the loss.

    Args:
        model: A built functional or Sequential model from examples to logits, of layers
            that can be made from their configs.
        ways: int or `None`, the number of classes in an episode; `None` is the number of
            the model's outputs.
        variables: What to finetune; see `inner_variables` of `MAML`. The paper adapts
            `"similarity+classifier"` of static networks.
        steps: int, the number of updates.
        learning_rate: float above 0.
        batch_normalization: See `MAML`. Batch norms of Keras are converted in a copy.

    Call arguments:
        episodes: `Episode` with a leading axis of episodes on each array, or a tuple of its
            first three arrays.

    Returns:
        NumPy array of the queries' logits, of shape `(episodes, queries, ways)`. If an
        episode diverges, its logits are not finite.

    Raises:
        ValueError: For arguments outside these ranges, a last layer that cannot be copied,
            data other than episodes of these ways with finite images, and a model whose
            variables quantization or LoRA has replaced since.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import backbones, few_shot
    >>> images = np.random.default_rng(0).normal(size=(3, 10, 16, 16, 1))  # 3 episodes.
    >>> network = backbones.cnn4((16, 16, 1), classes=64)
    >>> finetuner = few_shot.Finetuner(network, ways=5, steps=10)
    >>> finetuner((images, [[*range(5)] * 2] * 3, images)).shape
    (3, 10, 5)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2 ("Static NSN",
        "Dynamic NSN") and Appendix A, which names the rule and its numbers, but no batch
        size. No code was released for it. This package adds the start at zero.
    """

    def __init__(
        self,
        model: keras.Model,
        ways: int | None = None,
        variables: Selection = "classifier",
        steps: int = 100,
        learning_rate: float = 0.01,
        batch_normalization: str = "moving",
    ) -> None:
        graphs.require_graph(model)
        graphs.require_linear(model, "model")
        self.model = model
        self._original = StatelessModel(model, (), "moving")
        ways = model.output_shape[-1] if ways is None else ways
        self.ways = validation.positive_integer(ways, "ways")
        self.steps = validation.positive_integer(steps, "steps")
        self.learning_rate = validation.positive_number(learning_rate, "learning_rate")
        policy = validation.one_of(batch_normalization, POLICIES, "batch_normalization")
        self.batch_normalization = policy
        copy, classifier, self._sources = copy_with_classifier(model, self.ways)
        adapted = stateless.select_variables(copy, variables, "variables")
        demand = "a selection with the kernel of the new classifier, which starts at zero"
        is_trained = any(each is classifier.kernel for each in adapted)
        validation.require(is_trained, "variables", demand, variables)
        # What lies before a classifier that adapts alone is computed once per episode.
        own = set(map(id, classifier.variables))
        self._before, after = None, copy
        if all(id(each) in own for each in adapted):
            self._before = keras.Model(copy.inputs, classifier.input)
            after = keras.Model(classifier.input, copy.outputs[0])
        self._after = StatelessModel(after, adapted, policy)
        self._copy, self._variables = copy, copy.variables
        self._dtype = copy.inputs[0].dtype
        # Not by XLA, whose convolutions take many times as long on CPUs.
        self._compiled = backend.compiled(self._scores, jit_compile=False)
        self._compiled_finetuning = backend.compiled(self._finetune, jit_compile=False)

    def __call__(self, episodes: Any) -> np.ndarray:
        support, labels, queries = map(np.asarray, episodes[:3])
        episode_shapes([each.shape for each in (support, labels, queries)], ())
        validation.positive_integer(len(labels), "episodes")
        validation.require_class_labels(labels.reshape(-1), self.ways, "support_labels")
        # Not left to the logits: a ReLU or a pooling may turn a NaN into a zero.
        validation.require_finite(support, "support_images")
        validation.require_finite(queries, "query_images")
        dtypes = (self._dtype, "int32", self._dtype)
        sets = map(ops.convert_to_tensor, (support, labels, queries), dtypes)
        return ops.convert_to_numpy(self._compiled(self._values(), *sets))

    def _values(self) -> list[Tensor]:
        """Returns the model's values for the copy's variables."""
        self._original.values()  # Raises if the model has lost or gained variables.
        return [ops.convert_to_tensor(source) for source in self._sources]

    def _adapt(self, images: Any, labels: np.ndarray, classes: Any) -> Any:
        support, values = ops.convert_to_tensor(images, self._dtype), self._values()
        adapted = self._compiled_finetuning(values, support, labels)
        new = dict(zip(map(id, self._variables), values, strict=True))
        new |= zip(map(id, self._after.variables), adapted, strict=True)
        layers = adapted_copy(self._copy, self.batch_normalization, support, new)
        return AdaptedModel([*layers, classes]), self, support

    def _finetune(self, values: Any, support: Tensor, labels: Any) -> list[Tensor]:
        with keras.StatelessScope([*zip(self._variables, values, strict=True)]):
            (features,) = self._inputs_of_after([support[None]])
            return self._values_after(features[0], labels)

    def _scores(
        self, values: Any, support: Tensor, labels: Tensor, queries: Tensor
    ) -> Tensor:
        """Returns logits; `values` are an argument, or the trace would keep the model's."""
        with keras.StatelessScope([*zip(self._variables, values, strict=True)]):
            support, queries = self._inputs_of_after([support, queries])
            elements = [support, labels, queries]
            if self._before is not None:
                return backend.vectorized_map(self._logits, elements)[0]
            dtype = backend.wide_dtype(self._copy.outputs[0].dtype)
            spec = keras.KerasTensor((queries.shape[1], self.ways), dtype)
            return map_elements(self._logits, elements, [spec])[0]

    def _inputs_of_after(self, sets: list[Tensor]) -> list[Tensor]:
        if self._before is None:
            return sets
        return outputs_of_sets(self._before, self.batch_normalization, sets, False)

    def _logits(self, episode: list[Tensor]) -> list[Tensor]:
        support, labels, queries = episode
        values = self._values_after(support, labels)
        return [self._after.query_outputs(values, support, queries)]

    def _values_after(self, support: Tensor, labels: Tensor) -> list[Tensor]:
        def loss(values: list[Tensor], index: Tensor) -> Tensor:
            return ops.mean(self._losses(values, support, labels))

        return self._descend(self._after.values(), loss, self.steps)

    def _losses(self, values: list[Tensor], images: Tensor, labels: Tensor) -> Tensor:
        logits, _ = self._after.outputs(values, images)
        return cross_entropy(ops.one_hot(labels, self.ways, dtype=logits.dtype), logits)

    def _descend(self, values: list[Tensor], loss: Any, steps: Any) -> list[Tensor]:
        @backend.not_inlined
        def gradients(values: list[Tensor], index: Tensor) -> list[Tensor]:
            return gradients_of(lambda at: (loss(at, index), None), values)[0]

        def step(index: Tensor, state: Any) -> Any:
            values, buffers = state
            triples = zip(values, gradients(values, index), buffers, strict=True)
            moved = [self._move(*each, index) for each in triples]
            return [each[0] for each in moved], [each[1] for each in moved]

        state = (values, [*map(ops.zeros_like, values)])
        return ops.fori_loop(0, steps, step, state)[0]

    def _move(self, value: Tensor, gradient: Tensor, buffer: Tensor, index: Any) -> Any:
        """Returns value and buffer after step `index`, which counts from 0."""
        # In the value's own dtype: a share of float32 would be rounded.
        whole, part = (ops.convert_to_tensor(s, value.dtype) for s in (1, 1 - DAMPENING))
        share = ops.where(ops.equal(index, 0), whole, part)
        buffer = MOMENTUM * buffer + share * (gradient + WEIGHT_DECAY * value)
        return value - self.learning_rate * buffer, buffer


def copy_with_classifier(model: keras.Model, ways: int) -> tuple[keras.Model, Any, Any]:
    """Returns a copy with a new classifier, this layer, and each variable's source."""
    copy = copied(model)
    sources = {id(new): own for own, new in paired_variables(model, copy)}
    for layer in graphs.layers(copy):
        turn_batch_norm(layer)
    trained = graphs.classifier_of(copy)
    classifier = _new_classifier(copy, trained, ways)
    outputs = classifier(trained.input)
    for layer in reversed(graphs.ending(copy)[1]):
        outputs = type(layer).from_config(layer.get_config())(outputs)
    made = keras.Model(copy.inputs, outputs, name=model.name)
    return made, classifier, [sources.get(id(own), own) for own in made.variables]


def _new_classifier(model: keras.Model, layer: Any, ways: int) -> Any:
    is_cosine = isinstance(layer, CosineDense)
    is_dense = is_cosine or isinstance(layer, keras.layers.Dense)
    demand = (
        "a network that ends in `Dense` or `CosineDense`, outside of inner models and "
        "without LoRA or quantization, which a new classifier can replace; to features "
        "append `keras.layers.Dense(ways)`"
    )
    is_plain = is_dense and nesting.has_plain_kernel(layer) and layer in model.layers
    validation.require(is_plain, "model", demand, layer)
    changes: dict[str, Any] = {"units": ways, "trainable": True}
    if not is_cosine:
        changes |= {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
    with registered(layer) as known, keras.saving.custom_object_scope(known):
        return type(layer).from_config(layer.get_config() | changes)
