"""Finetuning a classifier anew in each episode, for many episodes at once.

A copy of the model is cut before the first layer that is adapted: what lies before it is
computed once an episode. A classifier alone is finetuned in all episodes together, by
batched products; whatever reaches into the network, in one episode after the other, by
plain convolutions inside one compiled loop.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, apart, compiled, gradients_of, map_elements
from nsl_keras.few_shot.adapted_copy import copy_with_classifier, cut, require_outputs
from nsl_keras.few_shot.dampened_momentum import DampenedMomentum
from nsl_keras.few_shot.episodes import Episode, filled_up
from nsl_keras.few_shot.functional import (
    POLICIES,
    FunctionalClassifier,
    Selection,
    effective_policy,
    last_layer_with_weights,
    select_variables,
)
from nsl_keras.neighborhoods.cosine import CosineDense, unit_norm
from nsl_keras.neighborhoods.inner_loop import cross_entropy
from nsl_keras.progress import Progress
from nsl_keras.training.checks import NonFiniteLossError

#: The most steps or epochs of an episode: more would not end.
MOST_STEPS = 1_000_000
#: The most episodes that `finetune` gives a `Finetuner` at once.
_AT_ONCE = 8

#: Kernel and bias uniform in ±1 / sqrt(features).
TORCH_LINEAR = "torch_linear"

_RECIPES: dict[str, dict[str, Any]] = {
    "zero_start": {"steps": 100, "batch_size": None, "classifier_initializer": "zeros"},
    "closer_look": {
        "variables": "classifier",
        "epochs": 100,
        "batch_size": 4,
        "classifier_initializer": TORCH_LINEAR,
        "batch_normalization": "moving",
    },
}


class Finetuner:
    """Finetunes chosen variables of a classifier on the support set of each episode.

    Each episode has values of its own; none are written into the model. With the mean
    cross-entropy `L` of the support set, or of a batch of it,

        w <- rule(w, dL / dw)        `steps` times

    where the rule is `DampenedMomentum` (PyTorch's SGD with dampening). Then the queries
    are scored. By default the variables are those of the paper's strategies: a network
    with static similarities at the identity is finetuned in these and its classifier, one
    with dynamic similarities, like a plain one, in its classifier.

    A new classifier starts at zero. With few images that matters: gradients lie in the
    span of the support features, so that what a random start has outside of it is never
    trained away, and the queries see it. From zero the first step leads to the scores
    `f(query) . sum_i (onehot(y_i) - 1 / ways) f(x_i)`, those of class means.

    What is random is drawn by `seed` and an episode's support images: an episode has
    draws of its own, which are the same in any batch of episodes.

    The finetuner is a learner for `evaluate`. It compiles once for each shape and follows
    the model's weights: those of the time of a call count. Layers other than batch norms
    run in inference mode (no dropout), and regularizers add nothing to the loss.

    Cost: a classifier alone costs one forward pass an episode, and hardly anything
    besides. Through the network it is `steps` forward and backward passes over the
    support set; memory is that of one of them, whatever the number of steps, for each
    episode that is under way (TensorFlow without XLA begins up to ten where there are
    cores for them).

    Args:
        model: A built functional or Sequential model from images to logits, of layers
            that can be made from their configs. It is not changed. Train it on images in
            the range that episodes have them in: `EpisodeSampler` divides uint8 images by
            255.
        ways: int, the number of classes in an episode.
        variables: `"similarity"`, `"classifier"`, `"similarity+classifier"`, `"all"`, a
            collection of names or paths of variables, or a function that takes a variable
            (of the copy, with the model's names) and returns whether to adapt it. `None`:
            `"similarity+classifier"` where static similarities can be adapted, else
            `"classifier"`.
        steps: int, the number of steps, which are updates of the variables.
        learning_rate: float above 0.
        momentum: float in [0, 1).
        dampening: float in [0, 1).
        weight_decay: float of at least 0, on all adapted variables.
        batch_normalization: `"support"`: batch norms normalize the support set by its own
            statistics, and queries by those of the support set, of the adapted network;
            `"transductive"`: queries by their own batch's; `"moving"`: all by the moving
            statistics that the model has stored, as batch norms with `trainable=False`
            always do.
        new_classifier: bool, whether a fresh last layer of `ways` outputs, like the
            model's and not frozen, takes the place of the trained one.
        seed: int of at least 0.
        jit_compile: bool, whether TensorFlow compiles with XLA. On CPUs XLA's
            convolutions take many times as long. JAX always compiles.
        batch_size: int, the support images of a step: batches in an order that is drawn
            anew for each pass over the support set, the last of a pass smaller where
            the size does not divide it. `None`: the whole support set in each step.
        epochs: int, the number of passes over the support set, in place of `steps`: there
            are `epochs * ceil(images / batch_size)` steps. `None`: `steps` counts.
        classifier_initializer: What the new classifier's kernel starts from: a Keras
            initializer or its name, drawn anew in each episode (a seed of its own does
            not count), with biases at zero; or `"torch_linear"`, kernel and biases
            uniform in `±1 / sqrt(features)`, as PyTorch's `nn.Linear`.
        similarity_learning_rate: float above 0, the rate of the similarities' parameters.
            `None`: `learning_rate`.

    Call arguments:
        episodes: `Episode` with a leading axis of episodes on each array; or a tuple of
            its first three, where the queries' labels are not known.

    Returns:
        NumPy array of the queries' logits, of shape `(episodes, queries, ways)`.

    Raises:
        ValueError: For arguments outside the ranges above; if the selection matches
            nothing (the message lists the names); if the last layer cannot be made anew,
            its new kernel is not among the variables, or the model has not `ways`
            outputs; for a `CosineDense` that starts at zero, where it has no direction;
            with `batch_size`, for batch norms after the first adapted layer that would
            normalize by a few images; for anything but an `Episode`, support labels
            outside the ways, and images that are not finite.
        NonFiniteLossError: If a loss in the finetuning is not finite; the message names
            step and episode.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> from nsl_keras import few_shot
    >>> images = np.random.default_rng(0).normal(size=(120, 16, 16, 1))
    >>> sampler = few_shot.EpisodeSampler(images, np.arange(120) // 20, shots=2, queries=3)
    >>> network = nsl_keras.backbones.cnn4(
    ...     (16, 16, 1), 64, nsl_keras.layers.NeuralSimilarityConv2D, filters=4)
    >>> static = few_shot.Finetuner(network, ways=5, steps=2)
    >>> static(sampler.episodes(3)).shape
    (3, 15, 5)

    By the recipe of the paper's baselines, see `finetuning_recipe`:

    >>> recipe = few_shot.finetuning_recipe("closer_look")
    >>> few_shot.Finetuner(network, ways=5, **recipe)(sampler.episodes(3)).shape
    (3, 15, 5)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2 ("Static NSN",
        "Dynamic NSN") and Appendix A, which says "query sets" where it means the labelled
        images of the episode, and 100 epochs without a batch size. The authors released
        no code for it. The start at zero is this package's.
    """

    def __init__(
        self,
        model: keras.Model,
        ways: int,
        variables: Selection | None = None,
        steps: int = 100,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        dampening: float = 0.9,
        weight_decay: float = 0.001,
        batch_normalization: str = "support",
        new_classifier: bool = True,
        seed: int = 0,
        jit_compile: bool = False,
        batch_size: int | None = None,
        epochs: int | None = None,
        classifier_initializer: Any = "zeros",
        similarity_learning_rate: float | None = None,
    ) -> None:
        rewiring.require_graph(model)
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
        self.classifier_initializer = _initializer(classifier_initializer)
        self.similarity_learning_rate = similarity_learning_rate
        self.rule = DampenedMomentum(learning_rate, momentum, dampening, weight_decay)
        new_classifier = validation.boolean(new_classifier, "new_classifier")
        copy, self._sources = copy_with_classifier(
            model, ways if new_classifier else None, self.seed
        )
        require_outputs(copy, self.ways)
        if variables is None:
            variables = _paper_strategy(copy)
        self._adapted = select_variables(copy, variables, "variables")
        before, after = cut(copy, self._adapted)
        self._before = before and FunctionalClassifier(
            before, (), batch_normalization, second_order=False, logits=False
        )
        self._classifier = last_layer_with_weights(copy)
        #: The new classifier's kernel, and its bias where that is adapted.
        self._drawn: list[Any] = []
        if new_classifier:
            self._drawn = self._variables_to_draw(variables)
        self._similarity_rule = self._rule_of_similarities(variables)
        self._run: Callable[..., tuple[Tensor, Tensor]]
        # `after.layers` would leave out operations such as a factor after the classifier.
        called = [call.layer for call in rewiring.calls(after)]
        if _is_linear(self._classifier) and called == [self._classifier]:
            self._run = self._together
        else:
            self._check_batches(after)
            self._after = FunctionalClassifier(
                after, self._adapted, batch_normalization, second_order=False
            )
            self._run = self._separately
        self._variables = copy.variables
        self._images_dtype = copy.inputs[0].dtype
        wide = copy.outputs[0].dtype == "float64"
        self._logits_dtype = "float64" if wide else "float32"
        jit_compile = validation.boolean(jit_compile, "jit_compile")
        self._compiled = compiled(self._with_values, jit_compile)

    @property
    def effective_batch_normalization(self) -> str | None:
        """The policy that batch norms follow: `"moving"` if none was trainable."""
        return effective_policy(self.model, self.batch_normalization)

    def _variables_to_draw(self, selection: Selection) -> list[Any]:
        layer = self._classifier
        adapted = {id(variable) for variable in self._adapted}
        if id(layer.kernel) not in adapted:
            raise ValueError(
                "`variables` must hold the kernel of the new classifier, which would stay "
                "as it starts; or `new_classifier` must be False. "
                f"Received: variables={selection!r}"
            )
        zero = isinstance(self.classifier_initializer, keras.initializers.Zeros)
        if isinstance(layer, CosineDense) and zero:
            raise ValueError(
                "`classifier_initializer` must not be zero for a CosineDense, whose kernel "
                'has no direction there: take "glorot_uniform". '
                f"Received: classifier_initializer={self.classifier_initializer!r}, and "
                f"layer {layer.name!r}"
            )
        bias = getattr(layer, "bias", None)
        return [layer.kernel, *([bias] if id(bias) in adapted else [])]

    def _rule_of_similarities(self, selection: Selection) -> DampenedMomentum:
        rate = self.similarity_learning_rate
        if rate is None:
            return self.rule
        rate = validation.positive_number(rate, "similarity_learning_rate")
        if not any(_is_similarity(variable) for variable in self._adapted):
            raise ValueError(
                "`similarity_learning_rate` must be None where no similarity is adapted. "
                f"Received: similarity_learning_rate={rate}, and variables={selection!r}"
            )
        return dataclasses.replace(self.rule, learning_rate=rate)

    def _check_batches(self, after: keras.Model) -> None:
        """Raises if batch norms among the adapted layers would see a few images alone."""
        policy = effective_policy(after, self.batch_normalization)
        if self.batch_size is not None and policy not in (None, "moving"):
            raise ValueError(
                '`batch_normalization` must be "moving" where batches of the support set '
                "go through batch norms, which would normalize by a few images. Received: "
                f"batch_normalization={policy!r}, and batch_size={self.batch_size}"
            )

    def __call__(self, episodes: Any) -> np.ndarray:
        if type(episodes) in (tuple, list) and len(episodes) == 3:
            arrays = [*episodes, np.empty(0, "int32")]
            episodes = Episode(*arrays)
        if not isinstance(episodes, Episode):
            raise ValueError(
                "`episodes` must be an `Episode`, as `EpisodeSampler.episodes` returns it, "
                "or (support_images, support_labels, query_images). "
                f"Received: a {type(episodes).__name__}"
            )
        self._check_labels(episodes.support_labels)
        # Not left to the loss: a ReLU or a pooling may take a NaN for a zero.
        validation.finite(episodes.support_images, "episodes.support_images")
        validation.finite(episodes.query_images, "episodes.query_images")
        starts, batches = self._draws(episodes.support_images)
        logits, losses = self._compiled(
            [ops.convert_to_tensor(source) for source in self._sources],
            ops.convert_to_tensor(episodes.support_images, self._images_dtype),
            ops.convert_to_tensor(episodes.support_labels, "int32"),
            ops.convert_to_tensor(episodes.query_images, self._images_dtype),
            [ops.convert_to_tensor(start) for start in starts],
            None if batches is None else ops.convert_to_tensor(batches),
        )
        _check_losses(ops.convert_to_numpy(losses))
        return ops.convert_to_numpy(logits)

    def _draws(self, images: Any) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Returns what is random in each episode.

        Args:
            images: Support images, of shape `(episodes, images, ...)`.

        Returns:
            `(starts, batches)`: the start of each drawn variable, of shape `(episodes,
            ...)`; and the images of each step as their places in the support set, of
            shape `(episodes, steps, batch size)`, with -1 where a batch is smaller, or
            `None` without a batch size.
        """
        arrays = ops.convert_to_numpy(images)
        count = arrays.shape[1]
        starts, batches = [], []
        for episode in arrays:
            digest = zlib.crc32(np.ascontiguousarray(episode, "float32").tobytes())
            of_starts, of_batches = np.random.default_rng([self.seed, digest]).spawn(2)
            starts.append([self._start(variable, of_starts) for variable in self._drawn])
            if self.batch_size is not None:
                size, steps = min(self.batch_size, count), self._steps_on(count)
                batches.append(_shuffled_batches(of_batches, count, size, steps))
        stacked = [np.stack(each) for each in zip(*starts, strict=True)]
        return stacked, np.stack(batches) if batches else None

    def _start(self, variable: Any, generator: np.random.Generator) -> np.ndarray:
        """Returns where the new classifier's kernel or bias starts in one episode."""
        initializer, shape = self.classifier_initializer, variable.shape
        if initializer == TORCH_LINEAR:
            limit = 1 / math.sqrt(self._classifier.kernel.shape[0])
            return generator.uniform(-limit, limit, shape).astype(variable.dtype)
        if variable is not self._classifier.kernel:
            return np.zeros(shape, variable.dtype)
        config = initializer.get_config()
        if "seed" in config:
            config["seed"] = int(generator.integers(2**31))
            initializer = type(initializer).from_config(config)
        return ops.convert_to_numpy(initializer(shape, variable.dtype))

    def _steps_on(self, images: int) -> int:
        """Returns the number of steps on a support set of so many images."""
        if self.epochs is None:
            return self.steps
        return self.epochs * math.ceil(images / (self.batch_size or images))

    def _check_labels(self, labels: Any) -> None:
        labels = np.asarray(labels)
        if labels.ndim != 2 or labels.min() < 0 or labels.max() >= self.ways:
            raise ValueError(
                "`episodes.support_labels` must be of shape (episodes, images), and of "
                f"classes 0 to ways - 1 = {self.ways - 1}. Received: labels of shape "
                f"{labels.shape} between {labels.min()} and {labels.max()}"
            )

    def _with_values(self, values: Sequence[Tensor], *arrays: Tensor) -> Any:
        """Returns queries' logits, and losses `(episodes, steps)`, for a model's values.

        They are arguments since a compiled function would keep those it has seen.
        """
        mapping = list(zip(self._variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self._run(*arrays)

    def _features(self, support: Tensor, queries: Tensor) -> list[Tensor]:
        """Returns what the first adapted layer gets in an episode."""
        if self._before is None:
            return [support, queries]
        return [
            self._before.outputs([], support)[0],
            self._before.query_outputs([], support, queries),
        ]

    def _together(
        self,
        support: Tensor,
        labels: Tensor,
        queries: Tensor,
        starts: Sequence[Tensor],
        batches: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Finetunes a classifier alone, in all episodes by one batched product."""
        if self._before is not None:
            width = self._before.model.output_shape[-1]
            support, queries = map_elements(
                lambda images: self._features(*images),
                [support, queries],
                [
                    keras.KerasTensor((images.shape[1], width), self._logits_dtype)
                    for images in (support, queries)
                ],
            )
        episodes, images, features = support.shape

        def losses_of(values: Sequence[Tensor], index: Tensor) -> Tensor:
            if batches is None:
                return _mean_loss(self._scores(values, support), labels)
            chosen = ops.take(batches, index, axis=1)
            # In one axis, of which a take is one gather.
            places = images * ops.arange(episodes)[:, None] + ops.maximum(chosen, 0)
            taken = ops.take(ops.reshape(support, (-1, features)), places, axis=0)
            targets = ops.take(ops.reshape(labels, (-1,)), places, axis=0)
            return _mean_loss(self._scores(values, taken), targets, chosen >= 0)

        own = dict(zip(map(id, self._drawn), starts, strict=True))
        values, losses = self._descend(
            losses_of,
            self._adapted,
            [
                own[id(variable)]
                if id(variable) in own
                else ops.repeat(ops.convert_to_tensor(variable)[None], episodes, axis=0)
                for variable in self._adapted
            ],
            self._steps_on(images),
            (episodes,),
        )
        return self._scores(values, queries), ops.transpose(losses)

    def _scores(self, values: Sequence[Tensor], features: Tensor) -> Tensor:
        """Returns what the classifier says with one value of each variable an episode."""
        own = dict(zip(map(id, self._adapted), values, strict=True))

        def value_of(variable: Any) -> Tensor:
            if id(variable) in own:
                return own[id(variable)]
            return ops.convert_to_tensor(variable)[None]

        layer = self._classifier
        if isinstance(layer, CosineDense):
            scale = ops.reshape(value_of(layer.learned_scale), (-1, 1, 1))
            kernel = unit_norm(value_of(layer.kernel), axis=-2)
            return scale * ops.matmul(unit_norm(features), kernel)
        scores = ops.matmul(features, value_of(layer.kernel))
        return scores if layer.bias is None else scores + value_of(layer.bias)[:, None]

    def _separately(
        self,
        support: Tensor,
        labels: Tensor,
        queries: Tensor,
        starts: Sequence[Tensor],
        batches: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Finetunes whatever is adapted, in one episode after the other."""
        steps = self._steps_on(support.shape[1])

        def one_episode(arrays: list[Tensor]) -> list[Tensor]:
            support, labels, queries, *drawn = arrays
            support, queries = self._features(support, queries)

            def losses_of(values: Sequence[Tensor], index: Tensor) -> Tensor:
                if batches is None:
                    return _mean_loss(self._after.outputs(values, support)[0], labels)
                chosen = ops.take(drawn[-1], index, axis=0)
                places = ops.maximum(chosen, 0)
                logits, _ = self._after.outputs(values, ops.take(support, places, axis=0))
                return _mean_loss(logits, ops.take(labels, places, axis=0), chosen >= 0)

            own = dict(zip(map(id, self._drawn), drawn, strict=False))
            variables = self._after.variables
            values, losses = self._descend(
                losses_of,
                variables,
                [
                    own.get(id(variable), value)
                    for variable, value in zip(variables, self._after.values(), strict=True)
                ],
                steps,
            )
            return [self._after.query_outputs(values, support, queries), losses]

        logits, losses = map_elements(
            one_episode,
            [support, labels, queries, *starts, *([] if batches is None else [batches])],
            [
                keras.KerasTensor((queries.shape[1], self.ways), self._logits_dtype),
                keras.KerasTensor((steps,), self._logits_dtype),
            ],
        )
        return logits, losses

    def _descend(
        self,
        losses_of: Callable[[Sequence[Tensor], Tensor], Tensor],
        variables: Sequence[Any],
        values: Sequence[Tensor],
        steps: int,
        shape: tuple[int, ...] = (),
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the values after all steps, and the losses before each.

        Losses of several episodes come and go together: those of one do not depend on
        the values of another.

        Args:
            losses_of: Function of the values and of the number of the step.
            variables: What the values are of.
            values: Where the steps start.
            steps: Number of steps.
            shape: Shape of the losses.
        """
        rules = [
            self._similarity_rule if _is_similarity(variable) else self.rule
            for variable in variables
        ]

        def gradients_at(values: Sequence[Tensor], index: Tensor) -> Any:
            def total(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
                losses = losses_of(values, index)
                return ops.sum(losses), losses

            return gradients_of(total, values)

        gradients_apart = apart(gradients_at)

        def step(index: Tensor, state: Any) -> Any:
            values, buffers, history = state
            gradients, losses = gradients_apart(values, index)
            now = ops.equal(ops.arange(steps), index)
            now = ops.reshape(now, (-1, *(1 for _ in shape)))
            moved = [
                rule.step([value], [gradient], [buffer], index)
                for rule, value, gradient, buffer in zip(
                    rules, values, gradients, buffers, strict=True
                )
            ]
            values = [value for (value,), _ in moved]
            buffers = [buffer for _, (buffer,) in moved]
            return values, buffers, ops.where(now, losses, history)

        history = ops.zeros((steps, *shape), self._logits_dtype)
        state: Any = (list(values), self.rule.start(values), history)
        adapted, _, history = ops.fori_loop(0, steps, step, state)
        return adapted, history


def finetuning_recipe(name: str) -> dict[str, Any]:
    """Returns the arguments of `Finetuner` for a recipe with a name.

    * `"zero_start"`: this package's, and the defaults: 100 steps on the whole support set,
      from a classifier at zero.
    * `"closer_look"`: that of CloserLookFewShot's code: 100 epochs in batches of 4, from
      a classifier drawn in each episode as PyTorch's `nn.Linear`, on frozen features,
      with batch norms by their moving statistics.

    Both follow the rule of Appendix A (`DampenedMomentum`), which is that code's. Other
    arguments go beside it: `{**finetuning_recipe(name), "variables": "all"}`.

    Args:
        name: `"zero_start"` or `"closer_look"`.

    Returns:
        A dict of keyword arguments.

    Raises:
        ValueError: For another name.

    Example:

    >>> from nsl_keras import few_shot
    >>> recipe = few_shot.finetuning_recipe("closer_look")
    >>> recipe["batch_size"], recipe["epochs"], recipe["classifier_initializer"]
    (4, 100, 'torch_linear')

    Reference:
        A Closer Look at Few-shot Classification (Chen et al., ICLR 2019), Section 3.2, and
        `methods/baselinefinetune.py` of its authors' code,
        https://github.com/wyharveychen/CloserLookFewShot. Neural Similarity Learning (Liu
        et al., NeurIPS 2019), Appendix A, has its rule and its number of epochs.
    """
    return dict(_RECIPES[validation.one_of(name, _RECIPES, "name")])


def finetune(
    model: keras.Model,
    episodes: Episode,
    variables: Selection | None = None,
    verbose: Any = "auto",
    **kwargs: Any,
) -> np.ndarray:
    """Returns logits of the queries, from a model finetuned in each episode.

    `Finetuner(model, ways, variables, **kwargs)(episodes)`, at most eight episodes at once,
    with as many ways as the support labels have. For many batches make one `Finetuner`: it
    compiles once.

    Args:
        model: As of `Finetuner`.
        episodes: A batch of episodes, as `EpisodeSampler.episodes` returns it.
        variables: As of `Finetuner`.
        verbose: 0 for silence, 1 for a progress bar over batches of episodes, 2 for a line
            at the end; `"auto"` for a bar where it takes longer than two seconds.
        **kwargs: Other arguments of `Finetuner`.

    Returns:
        NumPy array of shape `(episodes, queries, ways)`.

    Raises:
        ValueError: As `Finetuner`.
        NonFiniteLossError: As `Finetuner`.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.random.default_rng(0).normal(size=(60, 8, 8, 1))
    >>> sampler = few_shot.EpisodeSampler(images, np.arange(60) // 20, ways=3, queries=4)
    >>> network = keras.Sequential([
    ...     keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    >>> few_shot.finetune(network, sampler.episodes(2), "classifier", steps=5).shape
    (2, 12, 3)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2.
    """
    ways = int(np.max(episodes.support_labels)) + 1
    finetuner = Finetuner(model, ways, variables, **kwargs)
    count = len(episodes.query_labels)
    # Of one size, so that it compiles once, and with few to fill up.
    size = math.ceil(count / math.ceil(count / _AT_ONCE))
    logits = []
    starts = range(0, count, size)
    for start in Progress(len(starts), verbose).over(starts):
        part = Episode(*(each[start : start + size] for each in episodes))
        try:
            logits.append(finetuner(filled_up(part, size)))
        except NonFiniteLossError as error:
            if not start:
                raise
            raise NonFiniteLossError(
                f"In the batch that starts at episode {start}: {error}"
            ) from error
    return np.concatenate(logits)[:count]


def _mean_loss(logits: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
    """Returns the mean cross-entropy of each episode, over the images that are counted."""
    targets = ops.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    losses = cross_entropy(targets, logits)
    if counted is None:
        return ops.mean(losses, axis=-1)
    shares = ops.cast(counted, losses.dtype)
    return ops.sum(shares * losses, axis=-1) / ops.sum(shares, axis=-1)


def _shuffled_batches(
    generator: np.random.Generator, images: int, batch_size: int, steps: int
) -> np.ndarray:
    """Returns the places of the images of each step, of shape `(steps, batch_size)`.

    Each pass has an order of its own; its last batch is filled up with -1.
    """
    of_pass = math.ceil(images / batch_size)
    passes = math.ceil(steps / of_pass)
    places = np.full((passes, of_pass * batch_size), -1, "int32")
    in_order = np.tile(np.arange(images, dtype="int32"), (passes, 1))
    places[:, :images] = generator.permuted(in_order, axis=1)
    return places.reshape(-1, batch_size)[:steps]


def _initializer(identifier: Any) -> Any:
    """Returns a Keras initializer, or `"torch_linear"`."""
    if isinstance(identifier, str) and identifier == TORCH_LINEAR:
        return identifier
    try:
        found = keras.initializers.get(identifier)
    except ValueError:
        found = None
    if not isinstance(found, keras.initializers.Initializer):
        raise ValueError(
            "`classifier_initializer` must be a Keras initializer, the name of one, or "
            f"{TORCH_LINEAR!r}. Received: classifier_initializer={identifier!r}"
        )
    return found


def _paper_strategy(model: keras.Model) -> str:
    # Those of a model that is frozen as a whole adapt: `select_variables`.
    adaptable = model.trainable_variables or model.variables
    static = any(_is_similarity(variable) for variable in adaptable)
    return "similarity+classifier" if static else "classifier"


def _is_similarity(variable: Any) -> bool:
    return variable.name == "similarity"


def _is_linear(layer: keras.layers.Layer) -> bool:
    """Whether `Finetuner` knows the layer's formula."""
    if type(layer) is keras.layers.Dense:
        return layer.activation is keras.activations.linear
    return type(layer) is CosineDense


def _check_losses(losses: np.ndarray) -> None:
    finite = np.isfinite(losses)
    if finite.all():
        return
    episode = int(np.argmin(finite.all(axis=1)))
    step = int(np.argmin(finite[episode]))
    raise NonFiniteLossError(
        f"The loss became {losses[episode, step]} in step {step + 1} of episode "
        f"{episode} of the batch. Check the range of the images, or lower the "
        "learning rate."
    )
