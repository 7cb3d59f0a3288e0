"""Trains on four host devices of JAX, in a process of `test_distribution.py`.

    KERAS_BACKEND=jax XLA_FLAGS=--xla_force_host_platform_device_count=4 \
        python tests/jax_distribution.py

The last line it prints is JSON.
"""

import contextlib
import io
import json
import pathlib
import re

import keras
import numpy as np

import nsl_keras

layers, distribution = nsl_keras.layers, keras.distribution
ENTRIES, FEATURES, CLASSES = 1000, 16, 8
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "devices.md"


def make_model():
    return nsl_keras.MetaNeighborhoodModel(
        None, layers.CosineDense(CLASSES), layers.NeighborDictionary(ENTRIES, dropout=0.0)
    )


def train():
    """The model, and losses, predictions and weights after training from one start."""
    keras.utils.set_random_seed(0)
    model = make_model()
    model.build((None, FEATURES))
    optimizer = keras.optimizers.SGD(0.002, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(32, FEATURES)).astype("float32")
    y = generator.integers(0, CLASSES, size=32)
    options = {"batch_size": 16, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **options).history
    weights = [np.asarray(each.value) for each in model.trainable_variables]
    return model, [np.ravel(history["loss"]), model.predict(x, **options), *weights]


_, alone = train()
mesh = distribution.DeviceMesh((2, 2), ["batch", "model"], distribution.list_devices())
layout = distribution.LayoutMap(mesh)
layout[".*dictionary.*/(keys|value_logits)"] = ("model", None)
chosen = distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
distribution.set_distribution(chosen)
model, together = train()
differences = [np.abs(one - two).max() for one, two in zip(alone, together, strict=True)]
found = {"difference": float(max(differences)), "bytes": {}}
for each in model.dictionary.weights:
    shards = each.value.addressable_shards
    found["bytes"][each.name] = [shard.data.nbytes for shard in shards]
# The page's code for JAX, after a block for TensorFlow.
blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec("\n".join(blocks[1:]), {})
found["page"] = printed.getvalue()
print(json.dumps(found))
