"""Finetuning in each episode against a loop over `fit`.

One rule: all sides take the same steps on the same episodes from the same weights. The
loop is measured as one writes it first, with a fresh `compile` in each episode, and at its
best: compiled once, weights and the optimizer's state set back before each episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

import nsl_keras
from experiments.speed import measure
from nsl_keras import few_shot

WAYS = 5
SHOTS = 5
PIXELS = 32
EPISODES = 2
#: Which variables are adapted, and for how many steps here.
CASES = {"classifier": 100, "similarity+classifier": 10}
OURS = "Finetuner"
LOOP = "a loop over fit"
COMPILED_ONCE = "a loop over fit, compiled once"


def comparisons(xla: bool) -> Iterator[measure.Comparison]:
    """Yields the comparisons of this group, one at a time."""
    if xla:
        return  # On CPUs XLA's convolutions, and with them all of this, take far longer.
    layer = nsl_keras.layers.NeuralSimilarityConv2D
    model = nsl_keras.backbones.cnn4((PIXELS, PIXELS, 3), WAYS, layer)
    episodes = random_episodes()
    for variables, steps in CASES.items():
        finetuner = few_shot.Finetuner(model, WAYS, variables, steps, new_classifier=False)
        loop = LoopOverFit(model, variables, steps)
        compiled_once = LoopOverFit(model, variables, steps, compile_once=True)
        yield measure.Comparison(
            f"{variables}, {EPISODES} episodes of {WAYS} ways and {SHOTS} shots, "
            f"CNN-4, {PIXELS}x{PIXELS}, {steps} steps",
            {
                LOOP: step(loop, episodes),
                COMPILED_ONCE: step(compiled_once, episodes),
                OURS: step(finetuner, episodes),
            },
        )


def step(learner: Callable[..., Any], episodes: few_shot.Episode) -> measure.Step:
    return lambda: float(np.sum(learner(episodes)))


def random_episodes() -> few_shot.Episode:
    """Episodes of noise, of 15 queries a class."""
    images = np.random.default_rng(0).normal(size=(WAYS * 20, PIXELS, PIXELS, 3))
    sampler = few_shot.EpisodeSampler(images, np.arange(WAYS * 20) // 20, WAYS, SHOTS)
    return sampler.episodes(EPISODES)


class LoopOverFit:
    """Finetunes with `fit`, episode by episode, in place of `nsl_keras.few_shot`.

    Args:
        model: A classifier of the episodes' ways.
        variables: The variables to adapt, as of `few_shot.Finetuner`.
        steps: Epochs of `fit`, of one full batch each.
        compile_once: Whether all episodes share one `compile`.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: str,
        steps: int,
        compile_once: bool = False,
    ) -> None:
        self.model = keras.models.clone_model(model)
        self.model.set_weights(model.get_weights())
        for layer in self.model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.momentum = 0.0  # Keeps the support set's own statistics.
        chosen = variables.split("+")
        for variable in self.model.trainable_variables:
            variable.trainable = variable.name in chosen or "classifier" in variable.path
        self.steps = steps
        self.compile_once = compile_once
        self.compile()
        self.start = self.model.get_weights()

    def compile(self) -> None:
        self.optimizer = DampenedDescent()
        self.optimizer.build(self.model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(self.optimizer, loss)

    def __call__(self, episodes: few_shot.Episode) -> np.ndarray:
        return np.stack([self.logits(*episode) for episode in zip(*episodes, strict=True)])

    def logits(
        self, support: np.ndarray, labels: np.ndarray, queries: np.ndarray, *_: Any
    ) -> np.ndarray:
        self.model.set_weights(self.start)
        if self.compile_once:
            for variable in self.optimizer.variables:
                if variable is not self.optimizer.learning_rate:
                    variable.assign(ops.zeros_like(variable))
        else:
            self.compile()
        self.model.fit(
            support, labels, batch_size=len(support), epochs=self.steps, verbose=0
        )
        self.model(support, training=True)
        return self.model.predict_on_batch(queries)


class DampenedDescent(keras.optimizers.Optimizer):
    """`few_shot.DampenedMomentum` for `fit`."""

    def __init__(self) -> None:
        rule = few_shot.DampenedMomentum()
        super().__init__(learning_rate=rule.learning_rate)
        self.rule = rule

    def build(self, variables: list[Any]) -> None:
        if not self.built:
            super().build(variables)
            self.buffers = [
                self.add_variable_from_reference(each, name="buffer") for each in variables
            ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        del learning_rate
        buffer = self.buffers[self._get_variable_index(variable)]
        new, moved = self.rule.step(
            ops.convert_to_tensor(variable),
            gradient,
            ops.convert_to_tensor(buffer),
            self.iterations,
        )
        self.assign(buffer, moved)
        self.assign(variable, new)
