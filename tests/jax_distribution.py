"""Trains on two host devices of JAX, in a process of `test_distribution.py`.

    KERAS_BACKEND=jax XLA_FLAGS=--xla_force_host_platform_device_count=2 \
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
ENTRIES, FEATURES, CLASSES = 10**5, 16, 8
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "devices.md"


def train(make, x, y, **options):
    """Losses, predictions and weights, by name, after training from the same start."""
    keras.utils.set_random_seed(0)
    model = make()
    model.build((None, *x.shape[1:]))
    model.compile(
        keras.optimizers.SGD(0.002, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(x, y, shuffle=False, verbose=0, **options).history
    return model, {
        "losses": np.ravel(list(history.values())).tolist(),
        "predictions": model.predict(x[:16], batch_size=16, verbose=0),
        "weights": [np.asarray(each.value) for each in model.trainable_variables],
    }


def largest_difference(first, second):
    pairs = [(first[key], second[key]) for key in ("losses", "predictions")]
    pairs += zip(first["weights"], second["weights"], strict=True)
    return max(float(np.max(np.abs(np.subtract(*pair)))) for pair in pairs)


def small_model():
    backbone = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.NeuralSimilarityConv2D(4, 3, predictor="sphere", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(6),
        ]
    )
    return nsl_keras.MetaNeighborhoodModel(
        backbone, layers.CosineDense(3), layers.NeighborDictionary(12, dropout=0.0)
    )


def large_model():
    return nsl_keras.MetaNeighborhoodModel(
        None, layers.CosineDense(CLASSES), layers.NeighborDictionary(ENTRIES, dropout=0.0)
    )


generator = np.random.default_rng(0)
images = generator.normal(size=(80, 8, 8, 1)).astype("float32")
labels = generator.integers(0, 3, size=80)
features = generator.normal(size=(16, FEATURES)).astype("float32")
classes = generator.integers(0, CLASSES, size=16)
settings = {
    "small": (small_model, images, labels, {"batch_size": 16, "epochs": 2}),
    "large": (large_model, features, classes, {"batch_size": 16, "epochs": 2}),
}
alone = {name: train(*each[:3], **each[3])[1] for name, each in settings.items()}

mesh = distribution.DeviceMesh((1, 2), ["batch", "model"], distribution.list_devices())
layout = distribution.LayoutMap(mesh)
layout[".*dictionary.*/(keys|value_logits)"] = ("model", None)
found = {}
for name, chosen in {
    "small": distribution.DataParallel(),
    "large": distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"),
}.items():
    distribution.set_distribution(chosen)
    make, x, y, options = settings[name]
    model, trained = train(make, x, y, **options)
    found[name] = {"difference": largest_difference(alone[name], trained)}
    if name == "large":
        found[name]["bytes"] = {
            each.path.rpartition("/")[2]: [
                shard.data.nbytes for shard in each.value.addressable_shards
            ]
            for each in model.dictionary.weights
        }
# The page's code for JAX, after a block for TensorFlow.
blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec("\n".join(blocks[1:]), {})
found["page"] = printed.getvalue()
print(json.dumps(found))
