"""Finetuning a classifier in each episode, for many episodes at once.

A copy of the model is cut before the first layer that adapts. The part before the cut is
computed once per episode. A classifier alone is finetuned in all episodes at once. Deeper
layers are finetuned in one episode after the other, inside one compiled loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import backend, graphs, validation
from nsl_keras.backend import Tensor, apart, compiled, gradients_of, map_elements
from nsl_keras.few_shot.adapted_copy import adapted_copy, copy_with_classifier, cut
from nsl_keras.few_shot.adapted_model import Adaptation, Adapting
from nsl_keras.few_shot.class_logits import AdaptedModel
from nsl_keras.few_shot.dampened_momentum import DampenedMomentum
from nsl_keras.few_shot.episodic_learner import episode_shapes, shapes_of
from nsl_keras.few_shot.functional import (
    POLICIES,
    FunctionalModel,
    Selection,
    classifier_of,
    select_variables,
)
from nsl_keras.graphs import require_linear
from nsl_keras.neighborhoods.inner_loop import cross_entropy


class Finetuner(Adapting):
    """Finetunes chosen variables of a classifier on the support set of each episode.

    Each episode gets its own values; the model does not change. With the mean cross-entropy
    `L` of the support set,

        w <- rule(w, dL / dw)        `steps` times

    by the rule `DampenedMomentum` (PyTorch's SGD with dampening). Then the queries are
    scored. A new classifier starts at zero (a `CosineDense`, which has no direction there,
    starts from its own initializer). Gradient steps stay in the span of the support
    features. The part of a random start outside this span would never be trained, but it
    would affect queries. From zero the first step leads to the scores of class means,
    `f(query) . sum_i (onehot(y_i) - 1 / ways) f(x_i)`.

    A finetuner is a learner for `evaluate`, and uses the model's current weights. It has no
    weights of its own: save `model`, or the finetuned network that `adapt` returns. Layers
    other than batch norms run in inference mode, and regularizers add nothing to the loss.

    Args:
        model: A built functional or Sequential model from examples to logits, of layers
            that can be made from their configs.
        ways: int, the number of classes in an episode.
        variables: What to finetune; see `inner_variables` of `MAML`. The paper adapts
            `"similarity+classifier"` of static networks.
        steps: int, the number of updates.
        rule: `DampenedMomentum`; `None` uses the paper's settings.
        batch_normalization: See `MAML`. Batch norms of Keras are converted in the copy.
        new_classifier: bool, whether a new last layer of `ways` outputs, of the same kind
            and not frozen, replaces the trained layer.

    Call arguments:
        episodes: `Episode` with a leading axis of episodes on each array; or a tuple of
            the first three arrays, if the queries' labels are not known.

    Returns:
        NumPy array of the queries' logits, of shape `(episodes, queries, ways)`. If an
        episode diverges, its logits are not finite.

    Raises:
        ValueError: For arguments outside these ranges, a last layer that cannot be copied,
            data that are not episodes of these ways with finite images, and a model that
            has other variables than at construction (by quantization or LoRA).

    Example:

    >>> import numpy as np
    >>> from nsl_keras import backbones, few_shot
    >>> images = np.random.default_rng(0).normal(size=(120, 16, 16, 1))
    >>> sampler = few_shot.EpisodeSampler(images, np.arange(120) // 20, shots=2, queries=3)
    >>> network = backbones.cnn4((16, 16, 1), classes=64)
    >>> finetuner = few_shot.Finetuner(network, 5, steps=10, batch_normalization="moving")
    >>> finetuner(sampler.episodes(3)).shape
    (3, 15, 5)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2 ("Static NSN",
        "Dynamic NSN") and Appendix A, which names no batch size. No code was released for
        it. The start at zero is an addition of this package.
    """

    def __init__(
        self,
        model: keras.Model,
        ways: int,
        variables: Selection = "classifier",
        steps: int = 100,
        rule: DampenedMomentum | None = None,
        batch_normalization: str = "moving",
        new_classifier: bool = True,
    ) -> None:
        graphs.require_graph(model)
        require_linear(model, "model")
        self.model = model
        self._original = FunctionalModel(model, (), "moving")
        self.ways = validation.positive_integer(ways, "ways")
        self.steps = validation.positive_integer(steps, "steps")
        self.batch_normalization = validation.one_of(
            batch_normalization, POLICIES, "batch_normalization"
        )
        self.rule = DampenedMomentum() if rule is None else rule
        validation.boolean(new_classifier, "new_classifier")
        copy, self._sources = copy_with_classifier(model, self.ways, new_classifier)
        adapted = select_variables(copy, variables, "variables")
        classifier = classifier_of(copy)
        if new_classifier and not any(each is classifier.kernel for each in adapted):
            raise ValueError(
                "`variables` must hold the kernel of the new classifier, which would stay "
                "untrained; or `new_classifier` must be False. "
                f"Received: variables={variables!r}"
            )
        before, after = cut(copy, adapted)
        policy = self.batch_normalization
        self._before = None if before is None else FunctionalModel(before, (), policy)
        self._after = FunctionalModel(after, adapted, policy)
        self._is_shallow = after.operations[1:] == [classifier]
        self._copy, self._variables = copy, copy.variables
        self._dtype = copy.inputs[0].dtype
        self._outputs_dtype = backend.wide_dtype(copy.outputs[0].dtype)
        # Not by XLA, whose convolutions take many times as long on CPUs.
        self._compiled = compiled(self._scores, jit_compile=False)

    def __call__(self, episodes: Any) -> np.ndarray:
        support, labels, queries = map(np.asarray, episodes[:3])
        episode_shapes(shapes_of((support, labels, queries)), ())
        validation.positive_integer(len(labels), "episodes")
        validation.class_labels(labels.reshape(-1), self.ways, "support_labels")
        # Not left to the logits: a ReLU or a pooling may turn a NaN into a zero.
        validation.finite(support, "support_images")
        validation.finite(queries, "query_images")
        inputs = [
            ops.convert_to_tensor(support, self._dtype),
            ops.convert_to_tensor(labels, "int32"),
            ops.convert_to_tensor(queries, self._dtype),
            *map(ops.convert_to_tensor, self._draws(support)),
        ]
        return ops.convert_to_numpy(self._compiled(self._values(), *inputs))

    def _values(self) -> list[Tensor]:
        """Returns the values of the copy's variables, which are the model's."""
        self._original.require_kept()
        return [ops.convert_to_tensor(source) for source in self._sources]

    def _draws(self, support_images: np.ndarray) -> list[np.ndarray]:
        """Returns what a subclass draws for each episode, for its `_values_after`."""
        return []

    def _adapted(self, images: Any, labels: np.ndarray, head: Any) -> Adaptation:
        support = features = ops.convert_to_tensor(images, self._dtype)
        drawn = [ops.convert_to_tensor(each[0]) for each in self._draws(images[None])]
        state = [*zip(self._variables, self._values(), strict=True)]
        with keras.StatelessScope(state):
            if self._before is not None:
                features = self._before.outputs([], support)[0]
            values = self._values_after(features, ops.convert_to_tensor(labels), *drawn)
        state += zip(self._after.variables, values, strict=True)
        new = {id(variable): value for variable, value in state}
        layers = adapted_copy(self._copy, self.batch_normalization, support, new)
        return Adaptation(AdaptedModel([*layers, head]), self, np.asarray(images))

    def _scores(
        self,
        values: Sequence[Tensor],
        support: Tensor,
        labels: Tensor,
        queries: Tensor,
        *drawn: Tensor,
    ) -> Tensor:
        """Returns queries' logits for a model's values.

        The values are arguments, or a compiled function would keep the values of its trace.
        """

        def outputs(images: Tensor, *shape: int) -> keras.KerasTensor:
            return keras.KerasTensor((images.shape[1], *shape), self._outputs_dtype)

        with keras.StatelessScope([*zip(self._variables, values, strict=True)]):
            if self._before is not None:
                shape, sets = self._before.model.output_shape[1:], [support, queries]
                specs = [outputs(each, *shape) for each in sets]
                support, queries = map_elements(self._features, sets, specs)
            elements = [support, labels, queries, *drawn]
            if self._is_shallow:
                return backend.vectorized_map(self._logits, elements)[0]
            spec = outputs(queries, self.ways)
            return map_elements(self._logits, elements, [spec])[0]

    def _features(self, images: list[Tensor]) -> list[Tensor]:
        """Returns the inputs of the first adapted layer in an episode."""
        support, queries = images
        before: Any = self._before
        return [before.outputs([], support)[0], before.query_outputs([], support, queries)]

    def _logits(self, episode: list[Tensor]) -> list[Tensor]:
        support, labels, queries, *drawn = episode
        values = self._values_after(support, labels, *drawn)
        return [self._after.query_outputs(values, support, queries)]

    def _values_after(self, support: Tensor, labels: Tensor) -> list[Tensor]:
        """Returns the values that all steps on a support set lead to."""

        def loss(values: list[Tensor], index: Tensor) -> Tensor:
            return ops.mean(self._losses(values, support, labels))

        return self._descended(self._after.values(), loss, self.steps)

    def _losses(self, values: list[Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """Returns the cross-entropy of each image."""
        logits, _ = self._after.outputs(values, images)
        return cross_entropy(ops.one_hot(labels, self.ways, dtype=logits.dtype), logits)

    def _descended(self, values: list[Tensor], loss: Any, steps: Any) -> list[Tensor]:
        """Returns values after steps by the rule, down a loss of values and step."""

        @apart  # The gradients of a step are a graph of their own inside the loop.
        def gradients(values: list[Tensor], index: Tensor) -> list[Tensor]:
            return gradients_of(lambda at: (loss(at, index), None), values)[0]

        def step(index: Tensor, state: Any) -> Any:
            values, buffers = state
            triples = zip(values, gradients(values, index), buffers, strict=True)
            moved = [self.rule.step(*each, index) for each in triples]
            return [each[0] for each in moved], [each[1] for each in moved]

        state = (values, [*map(ops.zeros_like, values)])
        return ops.fori_loop(0, steps, step, state)[0]
