"""Many training steps as one compiled loop on the device, under JAX.

Keras trains a step at a time: each batch is made and augmented on the host, copied to the
device, and each step is started from Python, which takes longer than the step itself for
small networks on a GPU. Here the images stay on the device, and a chunk of steps is one
call: the host sends the numbers of the images, and how they are moved.

The batches are those of `recipe.Batches`, to the last bit.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from experiments.common import augmentation


class DeviceLoop:
    """Trains a compiled model for a chunk of steps of `recipe.Batches` in each call."""

    def __init__(self, model: keras.Model, batches: Any) -> None:
        if keras.backend.backend() != "jax":
            raise ValueError(
                "`on_device` needs the JAX backend: set KERAS_BACKEND=jax. Received: "
                f"{keras.backend.backend()}"
            )
        import jax

        self.model, self.batches = model, batches
        images = augmentation.pad(batches.split.images, batches.recipe.augmentation)
        self.images = keras.ops.convert_to_tensor(images, "float32")
        self.labels = keras.ops.convert_to_tensor(batches.split.labels, "int32")

        # Keras makes metrics when they are first needed.
        split = batches.split
        model.test_on_batch(split.images[:100], split.labels[:100])

        @functools.partial(jax.jit, donate_argnums=0)
        def run(state: list, images: Any, labels: Any, drawn: tuple) -> tuple[list, dict]:
            def step(state: list, each: tuple) -> tuple[list, dict]:
                batch = augmentation.take_moved(images, *each), labels[each[0]]
                logs, state = model.train_step(state, batch)
                return [list(group) for group in state], logs

            return keras.ops.scan(step, state, drawn)

        self.run = run

    def __call__(self) -> dict[str, float]:
        """Trains for the chunk that the batches stand at; returns Keras's logs."""
        drawn = [self.batches.draw(index) for index in range(len(self.batches))]
        stacked = tuple(np.stack(each) for each in zip(*drawn, strict=True))
        self.model.reset_metrics()
        # What a step of Keras changes, in its order.
        groups = [
            self.model.trainable_variables,
            self.model.non_trainable_variables,
            self.model.optimizer.variables,
            self.model.metrics_variables,
        ]
        state = [[each.value for each in group] for group in groups]
        state, logs = self.run(state, self.images, self.labels, stacked)
        for group, values in zip(groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
        return {name: float(values[-1]) for name, values in logs.items()}
