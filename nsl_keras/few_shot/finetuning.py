"""Finetuning a classifier in each episode, for many episodes at once.

A copy of the model is cut before the first layer that adapts. The part before the cut is
computed once per episode. A classifier alone is finetuned in all episodes at once; anything
deeper in one episode after the other, inside one compiled loop.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, apart, compiled, gradients_of, map_elements
from nsl_keras.few_shot.adapted_copy import copy_with_classifier, cut
from nsl_keras.few_shot.adapted_model import Adapting, adapted_copy
from nsl_keras.few_shot.dampened_momentum import DampenedMomentum
from nsl_keras.few_shot.episodic_learner import episode_shapes, shapes_of
from nsl_keras.few_shot.functional import (
    POLICIES,
    FunctionalModel,
    Selection,
    effective_policy,
    last_layer_with_weights,
    select_variables,
)
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.inner_loop import cross_entropy
from nsl_keras.training.checks import NonFiniteLossError, require_logits

#: The most steps or epochs per episode.
MOST_STEPS = 1_000_000
#: The most episodes that are finetuned at once, which bounds the memory.
_AT_ONCE = 8

#: Kernel and bias uniform in ±1 / sqrt(features).
TORCH_LINEAR = "torch_linear"

_RECIPES: dict[str, dict[str, Any]] = {
    "zero_start": {},
    "closer_look": {
        "variables": "classifier",
        "epochs": 100,
        "batch_size": 4,
        "classifier_initializer": TORCH_LINEAR,
        "batch_normalization": "moving",
    },
}


class Finetuner(Adapting):
    """Finetunes chosen variables of a classifier on the support set of each episode.

    Each episode has its own values; the model does not change. With the mean cross-entropy
    `L` of the support set, or of a batch of it,

        w <- rule(w, dL / dw)        `steps` times

    by the rule `DampenedMomentum` (PyTorch's SGD with dampening). Then the queries are
    scored. A new classifier starts at zero. Gradient steps stay in the span of the support
    features, so the component of a random start outside it would never be trained, yet
    would affect queries. From zero the first step leads to the scores `f(query) . sum_i
    (onehot(y_i) - 1 / ways) f(x_i)`, those of class means.

    A finetuner is a learner for `evaluate`, and follows the model's weights. It has none of
    its own: save `model`, or the finetuned network that `adapt` returns. Layers other than
    batch norms run in inference mode (no dropout), and regularizers add nothing to the
    loss. Random draws depend on `seed` and the episode's support examples alone, not on its
    place in a batch.

    Cost: a classifier alone costs little more than one forward pass per episode. Through
    the network it takes `steps` forward and backward passes over the support set.

    Args:
        model: A built functional or Sequential model from examples to logits, of layers
            that can be made from their configs. Train it on examples in the range of the
            episodes' images.
        ways: int, the number of classes in an episode.
        variables: `"similarity"`, `"classifier"`, `"similarity+classifier"`, `"all"`, a
            list of names or paths of variables, or a function that takes a variable
            (of the copy, with the model's names) and returns whether to adapt it. `None`:
            `"similarity+classifier"` where static similarities can be adapted, else
            `"classifier"`, the strategies of the paper.
        steps: int, the number of steps, which are updates of the variables.
        rule: `DampenedMomentum`, the rule of a step; `None` for the paper's.
        batch_normalization: See `MAML`. Batch norms of Keras are converted in the copy.
        new_classifier: bool, whether a new last layer of `ways` outputs, like the model's
            and not frozen, replaces the trained one.
        seed: int of at least 0.
        jit_compile: bool, whether TensorFlow compiles with XLA. On CPUs XLA's
            convolutions take many times as long. JAX always compiles.
        batch_size: int, the number of support examples in a step. Each pass over the
            support set draws a new order; its last batch is smaller if the size does not
            divide it. `None`: the whole support set in each step.
        epochs: int, the number of passes over the support set, instead of `steps`: there
            are `epochs * ceil(examples / batch_size)` steps. `None`: `steps` counts.
        classifier_initializer: The new classifier's start: a Keras initializer of the
            kernel or its name, drawn in each episode (its own seed is ignored), with
            biases at zero; or `"torch_linear"`, kernel and biases uniform in
            `±1 / sqrt(features)`, as PyTorch's `nn.Linear`.
        similarity_rule: `DampenedMomentum` for the similarities' parameters. `None`:
            `rule`.

    Call arguments:
        episodes: `Episode` with a leading axis of episodes on each array; or a tuple of
            its first three, if the queries' labels are not known.

    Returns:
        NumPy array of the queries' logits, of shape `(episodes, queries, ways)`.

    Raises:
        ValueError: For arguments outside these ranges, selections that match nothing, a
            last layer that cannot be copied, and data that are not episodes of these
            ways with finite images.
        NonFiniteLossError: If a loss in the finetuning is not finite; it names step and
            episode.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.random.default_rng(0).normal(size=(120, 8, 8, 1))
    >>> sampler = few_shot.EpisodeSampler(images, np.arange(120) // 20, shots=2, queries=3)
    >>> network = keras.Sequential([
    ...     keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(64)])
    >>> recipe = few_shot.finetuning_recipe("closer_look")
    >>> few_shot.Finetuner(network, ways=5, **recipe)(sampler.episodes(3)).shape
    (3, 15, 5)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2 ("Static NSN",
        "Dynamic NSN") and Appendix A, which says "query sets" for the labelled examples of
        the episode, and 100 epochs without a batch size. No code was released for it. The
        start at zero is this package's.
    """

    def __init__(
        self,
        model: keras.Model,
        ways: int,
        variables: Selection | None = None,
        steps: int = 100,
        rule: DampenedMomentum | None = None,
        batch_normalization: str = "support",
        new_classifier: bool = True,
        seed: int = 0,
        jit_compile: bool = False,
        batch_size: int | None = None,
        epochs: int | None = None,
        classifier_initializer: Any = "zeros",
        similarity_rule: DampenedMomentum | None = None,
    ) -> None:
        rewiring.require_graph(model)
        require_logits(model, "model")
        self.model = model
        self.ways = validation.positive_integer(ways, "ways")
        self.steps = validation.positive_integer(steps, "steps", MOST_STEPS)
        self.batch_normalization = validation.one_of(
            batch_normalization, POLICIES, "batch_normalization"
        )
        self.seed = validation.non_negative_integer(seed, "seed")
        self.batch_size = validation.optional(
            validation.positive_integer, batch_size, "batch_size"
        )
        self.epochs = validation.optional(
            validation.positive_integer, epochs, "epochs", MOST_STEPS
        )
        if classifier_initializer != TORCH_LINEAR:
            classifier_initializer = keras.initializers.get(classifier_initializer)
            if not isinstance(classifier_initializer, keras.initializers.Initializer):
                raise ValueError(
                    "`classifier_initializer` must be a Keras initializer. "
                    f"Received: {classifier_initializer!r}"
                )
        self.classifier_initializer = classifier_initializer
        self.rule = DampenedMomentum() if rule is None else rule
        self.similarity_rule = self.rule if similarity_rule is None else similarity_rule
        for name in ("rule", "similarity_rule"):
            each = getattr(self, name)
            if not isinstance(each, DampenedMomentum):
                raise ValueError(f"`{name}` must be a DampenedMomentum. Received: {each!r}")
        copy, self._sources = copy_with_classifier(
            model, self.ways, validation.boolean(new_classifier, "new_classifier")
        )
        if variables is None:
            # In a model that is frozen as a whole, all variables may adapt.
            adaptable = copy.trainable_variables or copy.variables
            static = any(each.name == "similarity" for each in adaptable)
            variables = "similarity+classifier" if static else "classifier"
        adapted = select_variables(copy, variables, "variables")
        before, after = cut(copy, adapted)
        policy = self.batch_normalization
        self._before: Any = before and FunctionalModel(before, (), policy)
        self._after = FunctionalModel(after, adapted, policy)
        self._require_no_small_batches(after)
        classifier = last_layer_with_weights(copy)
        #: The new classifier's kernel, and its bias if that adapts.
        self._drawn = self._drawn_variables(classifier) if new_classifier else []
        self._rules = [
            self.similarity_rule if each.name == "similarity" else self.rule
            for each in self._after.variables
        ]
        # `after.layers` would leave out operations such as a factor after the classifier.
        called = [call.layer for call in rewiring.calls(after)]
        self._is_shallow = called == [classifier]
        self._copy, self._variables = copy, copy.variables
        self._images_dtype = copy.inputs[0].dtype
        wide = copy.outputs[0].dtype == "float64"
        self._logits_dtype = "float64" if wide else "float32"
        jit_compile = validation.boolean(jit_compile, "jit_compile")
        self._compiled = compiled(self._with_values, jit_compile)

    def _require_no_small_batches(self, after: keras.Model) -> None:
        policy = effective_policy(after, self.batch_normalization)
        if self.batch_size is not None and policy not in (None, "moving"):
            raise ValueError(
                '`batch_normalization` must be "moving" where batches of the support set '
                "go through batch norms, which would normalize by few examples. Received: "
                f"batch_normalization={policy!r}, and batch_size={self.batch_size}"
            )

    def _drawn_variables(self, classifier: keras.layers.Layer) -> list[Any]:
        adapted = set(map(id, self._after.variables))
        if id(classifier.kernel) not in adapted:
            raise ValueError(
                "`variables` must hold the kernel of the new classifier, which would stay "
                "untrained; or `new_classifier` must be False. "
                f"Received: variables {[each.path for each in self._after.variables]}"
            )
        if isinstance(classifier, CosineDense) and isinstance(
            self.classifier_initializer, keras.initializers.Zeros
        ):
            raise ValueError(
                "`classifier_initializer` must not be zero for a CosineDense, whose kernel "
                'has no direction there: pass "glorot_uniform". '
                f"Received: layer {classifier.name!r}"
            )
        bias = getattr(classifier, "bias", None)
        return [classifier.kernel, *([bias] if id(bias) in adapted else [])]

    def __call__(self, episodes: Any) -> np.ndarray:
        support, labels, queries = map(np.asarray, episodes[:3])
        episode_shapes(shapes_of((support, labels, queries)), ())
        validation.positive_integer(len(labels), "episodes")
        validation.class_labels(labels.reshape(-1), self.ways, "support_labels")
        # Not left to the loss: a ReLU or a pooling may turn a NaN into a zero.
        validation.finite(support, "support_images")
        validation.finite(queries, "query_images")
        values = self._values()
        count = len(labels)
        # Equal batch sizes, so that it compiles once with little padding.
        size = math.ceil(count / math.ceil(count / _AT_ONCE))
        found = []
        for start in range(0, count, size):
            places = np.minimum(np.arange(start, start + size), count - 1)
            logits, losses = self._compiled(
                values,
                ops.convert_to_tensor(support[places], self._images_dtype),
                ops.convert_to_tensor(labels[places], "int32"),
                ops.convert_to_tensor(queries[places], self._images_dtype),
                *map(ops.convert_to_tensor, self._draws(support[places])),
            )
            _check_losses(ops.convert_to_numpy(losses), start)
            found.append(ops.convert_to_numpy(logits))
        return np.concatenate(found)[:count]

    def _values(self) -> list[Tensor]:
        """Returns the values of the copy's variables, which are the model's."""
        return [ops.convert_to_tensor(source) for source in self._sources]

    def _adapted(self, images: np.ndarray, labels: np.ndarray, ways: int) -> Any:
        support = features = ops.convert_to_tensor(images, self._images_dtype)
        drawn = [ops.convert_to_tensor(each[0]) for each in self._draws(images[None])]
        state = [*zip(self._variables, self._values(), strict=True)]
        with keras.StatelessScope(state):
            if self._before is not None:
                features = self._before.outputs([], support)[0]
            values, losses = self._values_after(features, labels, *drawn)
        _check_losses(ops.convert_to_numpy(losses)[None], 0)
        state += zip(self._after.variables, values, strict=True)
        new = {id(variable): value for variable, value in state}
        return adapted_copy(self._copy, self.batch_normalization, support, new)

    def _draws(self, support_images: np.ndarray) -> list[np.ndarray]:
        """Returns all that is random in each episode.

        Returns:
            The start of each drawn variable, of shape `(episodes, ...)`; then the examples
            of each step as their places in the support set, of shape `(episodes, steps,
            batch size)`, with -1 where a batch is smaller.
        """
        count = support_images.shape[1]
        drawn = []
        for images in support_images:
            digest = zlib.crc32(np.ascontiguousarray(images, "float32").tobytes())
            of_starts, of_batches = np.random.default_rng([self.seed, digest]).spawn(2)
            starts = [self._start(each, of_starts) for each in self._drawn]
            size = min(self.batch_size or count, count)
            drawn.append([*starts, self._batches(count, size, of_batches)])
        return [np.stack(each) for each in zip(*drawn, strict=True)]

    def _start(self, variable: Any, generator: np.random.Generator) -> np.ndarray:
        """Returns the start of the new classifier's kernel or bias in one episode."""
        initializer, shape = self.classifier_initializer, variable.shape
        kernel = self._drawn[0]
        if initializer == TORCH_LINEAR:
            limit = 1 / math.sqrt(kernel.shape[0])
            return generator.uniform(-limit, limit, shape).astype(variable.dtype)
        if variable is not kernel:
            return np.zeros(shape, variable.dtype)
        config = initializer.get_config()
        if "seed" in config:
            config["seed"] = int(generator.integers(2**31))
            initializer = type(initializer).from_config(config)
        return ops.convert_to_numpy(initializer(shape, variable.dtype))

    def _batches(
        self, images: int, size: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Returns the places of the examples of each step; each pass has its own order."""
        of_pass = math.ceil(images / size)
        steps = self.steps if self.epochs is None else self.epochs * of_pass
        passes = math.ceil(steps / of_pass)
        places = np.full((passes, of_pass * size), -1, "int32")
        in_order = np.tile(np.arange(images, dtype="int32"), (passes, 1))
        if size < images:
            in_order = generator.permuted(in_order, axis=1)
        places[:, :images] = in_order
        return places.reshape(-1, size)[:steps]

    def _with_values(self, values: Sequence[Tensor], *arrays: Tensor) -> Any:
        """Returns queries' logits, and losses `(episodes, steps)`, for a model's values.

        The values are arguments, since a compiled function would keep those of its trace.
        """
        mapping = list(zip(self._variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self._finetuned(*arrays)

    def _finetuned(
        self, support: Tensor, labels: Tensor, queries: Tensor, *drawn: Tensor
    ) -> list[Tensor]:
        if self._before is not None:
            shape = self._before.model.output_shape[1:]
            support, queries = map_elements(
                self._features,
                [support, queries],
                [
                    keras.KerasTensor((images.shape[1], *shape), self._logits_dtype)
                    for images in (support, queries)
                ],
            )
        elements = [support, labels, queries, *drawn]
        if self._is_shallow:
            return ops.vectorized_map(self._finetuned_in_episode, elements)
        return map_elements(
            self._finetuned_in_episode,
            elements,
            [
                keras.KerasTensor((queries.shape[1], self.ways), self._logits_dtype),
                keras.KerasTensor((drawn[-1].shape[1],), self._logits_dtype),
            ],
        )

    def _features(self, images: list[Tensor]) -> list[Tensor]:
        """Returns the inputs of the first adapted layer in an episode."""
        support, queries = images
        return [
            self._before.outputs([], support)[0],
            self._before.query_outputs([], support, queries),
        ]

    def _finetuned_in_episode(self, elements: list[Tensor]) -> list[Tensor]:
        """Returns queries' logits, and the loss before each step."""
        support, labels, queries, *drawn = elements
        values, history = self._values_after(support, labels, *drawn)
        return [self._after.query_outputs(values, support, queries), history]

    def _values_after(
        self, support: Tensor, labels: Tensor, *drawn: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the finetuned values, and the loss before each step."""
        *starts, batches = drawn

        def loss_at(values: list[Tensor], places: Tensor) -> tuple[Tensor, Tensor]:
            if self.batch_size is None:
                chosen, targets, counted = support, labels, ops.ones_like(places)
            else:
                taken, counted = ops.maximum(places, 0), places >= 0
                chosen, targets = (
                    ops.take(each, taken, axis=0) for each in (support, labels)
                )
            logits, _ = self._after.outputs(values, chosen)
            targets = ops.one_hot(targets, self.ways, dtype=logits.dtype)
            shares = ops.cast(counted, logits.dtype)
            loss = ops.sum(shares * cross_entropy(targets, logits)) / ops.sum(shares)
            return loss, loss

        # The gradients of a step are a graph of their own inside the loop.
        gradients_at = apart(
            lambda values, places: gradients_of(lambda at: loss_at(at, places), values)
        )

        def step(index: Tensor, state: Any) -> Any:
            values, buffers, history = state
            gradients, loss = gradients_at(values, ops.take(batches, index, axis=0))
            moved = [
                rule.step(value, gradient, buffer, index)
                for rule, value, gradient, buffer in zip(
                    self._rules, values, gradients, buffers, strict=True
                )
            ]
            values, buffers = ([each[place] for each in moved] for place in (0, 1))
            history = ops.where(ops.equal(ops.arange(steps), index), loss, history)
            return values, buffers, history

        own = dict(zip(map(id, self._drawn), starts, strict=True))
        pairs = zip(self._after.variables, self._after.values(), strict=True)
        values = [own.get(id(variable), value) for variable, value in pairs]
        steps = ops.shape(batches)[0]
        history = ops.zeros((steps,), self._logits_dtype)
        state: Any = (values, [*map(ops.zeros_like, values)], history)
        values, _, history = ops.fori_loop(0, steps, step, state)
        return values, history


def finetuning_recipe(name: str) -> dict[str, Any]:
    """Returns the arguments of `Finetuner` for a named recipe.

    * `"zero_start"`: the defaults of this package: 100 steps on the whole support set,
      from a classifier at zero.
    * `"closer_look"`: the recipe of CloserLookFewShot's code: 100 epochs in batches of 4,
      from a classifier drawn in each episode as PyTorch's `nn.Linear`, on frozen features,
      with batch norms by their moving statistics.

    Both follow the rule of Appendix A (`DampenedMomentum`), as that code does. To change
    an argument: `{**finetuning_recipe(name), "variables": "all"}`.

    Args:
        name: `"zero_start"` or `"closer_look"`.

    Example:

    >>> from nsl_keras import few_shot
    >>> recipe = few_shot.finetuning_recipe("closer_look")
    >>> recipe["batch_size"], recipe["epochs"], recipe["classifier_initializer"]
    (4, 100, 'torch_linear')

    Reference:
        A Closer Look at Few-shot Classification (Chen et al., ICLR 2019), Section 3.2, and
        `methods/baselinefinetune.py` of its authors' code,
        https://github.com/wyharveychen/CloserLookFewShot. Neural Similarity Learning (Liu
        et al., NeurIPS 2019), Appendix A, has the same rule and number of epochs.
    """
    return dict(_RECIPES[validation.one_of(name, _RECIPES, "name")])


def _check_losses(losses: np.ndarray, first: int) -> None:
    finite = np.isfinite(losses)
    if not finite.all():
        episode, step = (int(each) for each in np.argwhere(~finite)[0])
        raise NonFiniteLossError(
            f"The loss became {losses[episode, step]} in step {step + 1} of episode "
            f"{first + episode}. Check the range of the inputs, or lower the learning rate."
        )
