"""Callables to time, and the comparisons they stand in.

One rule: a callable returns one number that depends on everything it is timed for, so
that nothing is pruned and the time ends when the work does.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from experiments.speed import timing

Step = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Ways to do one thing, the plain Keras one first.

    A round has `calls_per_round` calls of each, more where one takes a millisecond; slow
    steps have fewer `rounds`.
    """

    case: str
    steps: Mapping[str, Step]
    calls_per_round: int = 1
    rounds: int = 15

    def rows(self) -> list[dict[str, Any]]:
        calls = {"calls_per_round": self.calls_per_round}
        ratios = timing.ratios_to_first(self.steps, rounds=self.rounds, **calls)
        baseline, *candidates = ratios
        names = {"case": self.case, "baseline": baseline}
        return [{**names, "candidate": c, **ratios[c], **calls} for c in candidates]


def compared(
    case: str,
    layers: Mapping[str, keras.layers.Layer],
    step: Callable[..., Step],
    inputs: tf.Tensor,
    xla: bool,
    **options: Any,
) -> Comparison:
    for layer in layers.values():
        if not layer.built:
            layer.build(tuple(inputs.shape))
    steps = {name: step(layer, inputs, xla) for name, layer in layers.items()}
    return Comparison(case, steps, **options)


def forward(layer: keras.layers.Layer, inputs: tf.Tensor, xla: bool) -> Step:
    @tf.function(jit_compile=xla)
    def run() -> tf.Tensor:
        return _digest(layer(inputs, training=False))

    return lambda: float(run())


def forward_backward(layer: keras.layers.Layer, inputs: tf.Tensor, xla: bool) -> Step:
    """Outputs in training, and gradients with respect to inputs and all weights."""
    cotangent = tf.random.normal(layer.compute_output_shape(inputs.shape))

    @tf.function(jit_compile=xla)
    def run() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
        sources = [inputs, *layer.trainable_variables]
        taken = tape.gradient(outputs, sources, output_gradients=cotangent)
        return _digest(outputs, *taken)

    return lambda: float(run())


def passes(
    case: str,
    layers: Mapping[str, keras.layers.Layer],
    inputs: tf.Tensor,
    xla: bool,
    names: Sequence[str] = ("forward", "forward+backward"),
    **options: Any,
) -> Iterator[Comparison]:
    """Yields the comparisons of layers in inference and in training, by these names."""
    for name, step in zip(names, (forward, forward_backward), strict=True):
        yield compared(f"{case}, {name}", layers, step, inputs, xla, **options)


def training_step(model: keras.Model, images: tf.Tensor, xla: bool) -> Step:
    """Loss, gradients and an SGD update of every weight; updates are never pruned."""
    # All models have ten classes or more.
    labels = tf.random.uniform((len(images),), maxval=10, dtype=tf.int32)
    variables = model.trainable_variables
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(variables)

    @tf.function(jit_compile=xla)
    def run() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        taken = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(taken, variables, strict=True))
        return loss

    return lambda: float(run())


def digested(function: Callable[[tf.Tensor], Any], inputs: tf.Tensor) -> float:
    """Runs a function and waits for all its outputs."""
    outputs = tf.nest.flatten(function(inputs))
    return float(_digest(*(tf.cast(each, "float32") for each in outputs)))


#: What models are timed in.
OF_MODELS = {"inference": forward, "training step": training_step}


def _digest(*tensors: tf.Tensor) -> tf.Tensor:
    # Squares, because a compiler may move a plain sum in front of a linear operation.
    return tf.add_n([tf.nn.l2_loss(tensor) for tensor in tensors])
