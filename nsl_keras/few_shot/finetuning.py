"""Finetuning a classifier anew in each episode, for many episodes at once.

A copy of the model is cut before the first layer that is adapted: what lies before it is
computed once an episode. A classifier alone is finetuned in all episodes together, by
batched products; whatever reaches into the network, in one episode after the other, by
plain convolutions inside one compiled loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, apart, compiled, gradients_of, map_elements
from nsl_keras.few_shot.episodes import Episode
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
from nsl_keras.training import NonFiniteLossError


@dataclasses.dataclass(frozen=True)
class DampenedMomentum:
    """One step of gradient descent with momentum, dampening and weight decay.

    For a value `w`, its gradient `g` and a buffer `m` that starts at zero,

        g <- g + weight_decay * w
        m <- g                                        in the first step
        m <- momentum * m + (1 - dampening) * g       in all others
        w <- w - learning_rate * m

    The first buffer is the whole gradient, not dampened. Without momentum there is no
    buffer and no dampening: `m` is `g` in every step.

    Attributes:
        learning_rate: float above 0.
        momentum: float in [0, 1).
        dampening: float in [0, 1).
        weight_decay: float of at least 0; it enters the gradient of every value, biases
            included.

    Raises:
        ValueError: For numbers outside these ranges.

    Example:

    >>> from keras import ops
    >>> from nsl_keras import few_shot
    >>> rule = few_shot.DampenedMomentum(weight_decay=0.0)
    >>> values = [ops.convert_to_tensor(1.0)]
    >>> values, buffers = rule.step(values, [2.0], rule.start(values), 0)
    >>> values, buffers = rule.step(values, [3.0], buffers, 1)
    >>> round(float(buffers[0]), 4), round(float(values[0]), 4)  # 0.9 * 2 + 0.1 * 3
    (2.1, 0.959)

    The rule is PyTorch's. No setting of a Keras optimizer equals it: with dampening the
    first step differs from all others.

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Appendix A: "SGD with
        lr = 0.01, momentum = 0.9, dampening = 0.9 and weight decay = 0.001", which are
        the arguments of PyTorch's SGD.
    """

    learning_rate: float = 0.01
    momentum: float = 0.9
    dampening: float = 0.9
    weight_decay: float = 0.001

    def __post_init__(self) -> None:
        validation.positive_number(self.learning_rate, "learning_rate")
        validation.fraction(self.momentum, "momentum")
        validation.fraction(self.dampening, "dampening")
        validation.non_negative_number(self.weight_decay, "weight_decay")

    def start(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the buffers before the first step."""
        return [ops.zeros_like(value) for value in values]

    def step(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffers: Sequence[Tensor],
        index: int | Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns values and buffers after step `index`, which counts from 0."""
        first = ops.equal(index, 0)
        new_buffers = []
        for value, gradient, buffer in zip(values, gradients, buffers, strict=True):
            gradient = gradient + self.weight_decay * value
            if self.momentum:
                # In the value's own dtype: a rounded share would be one of float32.
                share = ops.where(
                    first,
                    ops.ones((), value.dtype),
                    ops.convert_to_tensor(1 - self.dampening, value.dtype),
                )
                gradient = self.momentum * buffer + share * gradient
            new_buffers.append(gradient)
        new_values = [
            value - self.learning_rate * buffer
            for value, buffer in zip(values, new_buffers, strict=True)
        ]
        return new_values, new_buffers


class Finetuner:
    """Finetunes chosen variables of a classifier on the support set of each episode.

    Each episode starts from the same values and has its own; none are written into the
    model. With the cross-entropy `L` of the whole support set,

        w <- rule(w, dL / dw)        `steps` times

    where the rule is `DampenedMomentum` (PyTorch's SGD with dampening). Then the queries
    are scored. Paper's strategies: a network trained with static similarities at the
    identity is finetuned with `"similarity+classifier"`, one with dynamic similarities
    with `"classifier"`.

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
            (of the copy, with the model's names) and returns whether to adapt it.
        steps: int, the number of steps, each on the whole support set. The paper has 100
            epochs, and gives no batch size.
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
            model's but drawn by its initializers with `seed`, and not frozen, takes the
            place of the trained one. The draw is the same for each episode.
        seed: int of at least 0.
        jit_compile: bool, whether TensorFlow compiles with XLA. On CPUs XLA's
            convolutions take many times as long. JAX always compiles.

    Call arguments:
        episodes: `Episode` with a leading axis of episodes on each array.

    Returns:
        NumPy array of the queries' logits, of shape `(episodes, queries, ways)`.

    Raises:
        ValueError: For arguments outside the ranges above; if the selection matches
            nothing (the message lists the names); if the last layer cannot be made anew,
            or the model has not `ways` outputs; for support labels outside the ways, and
            for images that are not finite.
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

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2 ("Static NSN",
        "Dynamic NSN") and Appendix A, which says "query sets" where it means the labelled
        images of the episode. The authors released no code for it.
    """

    def __init__(
        self,
        model: keras.Model,
        ways: int,
        variables: Selection = "similarity+classifier",
        steps: int = 100,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        dampening: float = 0.9,
        weight_decay: float = 0.001,
        batch_normalization: str = "support",
        new_classifier: bool = True,
        seed: int = 0,
        jit_compile: bool = False,
    ) -> None:
        rewiring.require_graph(model)
        self.model = model
        self.ways = validation.positive_integer(ways, "ways")
        self.steps = validation.positive_integer(steps, "steps")
        self.batch_normalization = validation.one_of(
            batch_normalization, POLICIES, "batch_normalization"
        )
        self.rule = DampenedMomentum(learning_rate, momentum, dampening, weight_decay)
        copy, self._sources = _copy_of(model, ways if new_classifier else None, seed)
        _check_outputs(copy, self.ways)
        self._adapted = select_variables(copy, variables, "variables")
        before, after = _cut(copy, self._adapted)
        self._before = before and FunctionalClassifier(
            before, None, batch_normalization, second_order=False, logits=False
        )
        self._classifier = last_layer_with_weights(copy)
        self._run: Callable[..., tuple[Tensor, Tensor]]
        if _is_linear(self._classifier) and after.layers[1:] == [self._classifier]:
            self._run = self._together
        else:
            chosen = {id(variable) for variable in self._adapted}
            self._after = FunctionalClassifier(
                after,
                lambda variable: id(variable) in chosen,
                batch_normalization,
                second_order=False,
            )
            self._run = self._separately
        self._variables = copy.variables
        self._images_dtype = copy.inputs[0].dtype
        wide = copy.outputs[0].dtype == "float64"
        self._logits_dtype = "float64" if wide else "float32"
        self._compiled = compiled(self._with_values, jit_compile)

    @property
    def effective_batch_normalization(self) -> str | None:
        """The policy that batch norms follow: `"moving"` if none was trainable."""
        return effective_policy(self.model, self.batch_normalization)

    def __call__(self, episodes: Episode) -> np.ndarray:
        self._check_labels(episodes.support_labels)
        # Not left to the loss: a ReLU or a pooling may take a NaN for a zero.
        validation.finite(episodes.support_images, "episodes.support_images")
        validation.finite(episodes.query_images, "episodes.query_images")
        logits, losses = self._compiled(
            [ops.convert_to_tensor(source) for source in self._sources],
            ops.convert_to_tensor(episodes.support_images, self._images_dtype),
            ops.convert_to_tensor(episodes.support_labels, "int32"),
            ops.convert_to_tensor(episodes.query_images, self._images_dtype),
        )
        _check_losses(ops.convert_to_numpy(losses))
        return ops.convert_to_numpy(logits)

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
        self, support: Tensor, labels: Tensor, queries: Tensor
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
        episodes = support.shape[0]
        values, losses = self._descend(
            lambda values: _mean_loss(self._scores(values, support), labels),
            [
                ops.repeat(ops.convert_to_tensor(variable)[None], episodes, axis=0)
                for variable in self._adapted
            ],
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
        self, support: Tensor, labels: Tensor, queries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Finetunes whatever is adapted, in one episode after the other."""

        def one_episode(arrays: list[Tensor]) -> list[Tensor]:
            support, labels, queries = arrays
            support, queries = self._features(support, queries)
            values, losses = self._descend(
                lambda values: _mean_loss(self._after.outputs(values, support)[0], labels),
                self._after.values(),
            )
            return [self._after.query_outputs(values, support, queries), losses]

        logits, losses = map_elements(
            one_episode,
            [support, labels, queries],
            [
                keras.KerasTensor((queries.shape[1], self.ways), self._logits_dtype),
                keras.KerasTensor((self.steps,), self._logits_dtype),
            ],
        )
        return logits, losses

    def _descend(
        self,
        losses_of: Callable[[Sequence[Tensor]], Tensor],
        values: Sequence[Tensor],
        shape: tuple[int, ...] = (),
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the values after all steps, and the losses before each.

        Losses of several episodes come and go together: those of one do not depend on
        the values of another.

        Args:
            losses_of: Function of the values.
            values: Where the steps start.
            shape: Shape of the losses.
        """

        def total(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            losses = losses_of(values)
            return ops.sum(losses), losses

        gradients_at = apart(lambda values: gradients_of(total, values))

        def step(index: Tensor, state: Any) -> Any:
            values, buffers, history = state
            gradients, losses = gradients_at(values)
            now = ops.equal(ops.arange(self.steps), index)
            now = ops.reshape(now, (-1, *(1 for _ in shape)))
            values, buffers = self.rule.step(values, gradients, buffers, index)
            return values, buffers, ops.where(now, losses, history)

        history = ops.zeros((self.steps, *shape), self._logits_dtype)
        state: Any = (list(values), self.rule.start(values), history)
        adapted, _, history = ops.fori_loop(0, self.steps, step, state)
        return adapted, history


def finetune(
    model: keras.Model,
    episodes: Episode,
    variables: Selection = "similarity+classifier",
    **kwargs: Any,
) -> np.ndarray:
    """Returns logits of the queries, from a model finetuned in each episode.

    `Finetuner(model, ways, variables, **kwargs)(episodes)` once, with as many ways as the
    support labels have. For many batches make one `Finetuner`: it compiles once.

    Args:
        model: As of `Finetuner`.
        episodes: A batch of episodes, as `EpisodeSampler.episodes` returns it.
        variables: As of `Finetuner`.
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
    return Finetuner(model, ways, variables, **kwargs)(episodes)


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy over the images of each episode."""
    targets = ops.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return ops.mean(cross_entropy(targets, logits), axis=-1)


def _copy_of(
    model: keras.Model, ways: int | None, seed: int
) -> tuple[keras.Model, list[Any]]:
    """Returns a copy of a model, and the variable that each of the copy's is fed from.

    Args:
        model: The model.
        ways: Outputs of a new classifier, or `None` to keep the model's own.
        seed: Seed of the new classifier.
    """
    classifier = last_layer_with_weights(model)
    new = None if ways is None else _new_classifier(classifier, ways, seed)

    def replace(layer: keras.layers.Layer) -> list[keras.layers.Layer] | None:
        return [new] if layer is classifier and new is not None else None

    copy = rewiring.rebuild(model, replace)
    replaced = {id(variable) for variable in classifier.variables} if new else set()
    sources = []
    for own, source in zip(copy.variables, model.variables, strict=True):
        if id(source) in replaced:
            sources.append(own)  # It is trained, whether the old one was frozen or not.
            continue
        sources.append(source)
        if own.trainable != source.trainable:
            own.trainable = source.trainable
    # Sequential models have no graph to be cut.
    return keras.Model(copy.inputs, copy.outputs[0], name=model.name), sources


def _new_classifier(layer: keras.layers.Layer, ways: int, seed: int) -> keras.layers.Layer:
    config = layer.get_config()
    if "units" not in config:
        raise ValueError(
            "`model` must end in a layer with `units`, such as Dense or CosineDense, for "
            "a new classifier of the episode's ways; or `new_classifier` must be False. "
            f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
        )
    config.update(units=ways, trainable=True)
    for value in config.values():
        if isinstance(value, dict) and "seed" in value.get("config", {}):
            value["config"]["seed"] = validation.non_negative_integer(seed, "seed")
    return type(layer).from_config(config)


def _check_outputs(model: keras.Model, ways: int) -> None:
    if len(model.output_shape) != 2 or model.output_shape[-1] != ways:
        raise ValueError(
            "`model` must have as many outputs as `ways`, or `new_classifier` be True and "
            f"the classifier be its end. Received: ways={ways}, and a model with outputs "
            f"of shape {model.output_shape}"
        )


def _cut(
    model: keras.Model, adapted: Sequence[Any]
) -> tuple[keras.Model | None, keras.Model]:
    """Cuts a model where one tensor carries all that the adapted variables see.

    Returns:
        What lies before the cut (`None` for nothing), and what comes after.
    """
    chosen = {id(variable) for variable in adapted}
    candidates = []
    for layer in model.layers:
        if isinstance(layer.input, keras.KerasTensor):
            candidates.append(layer.input)
        if any(id(variable) in chosen for variable in layer.variables):
            break
    for tensor in reversed(candidates):
        if tensor is model.inputs[0]:
            break
        try:
            after = keras.Model(tensor, model.outputs[0])
        except ValueError:  # Something goes round the tensor.
            continue
        return keras.Model(model.inputs, tensor), after
    return None, model


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
