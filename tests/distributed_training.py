"""Trains each kind of model by `fit`, in a process of `test_distribution.py`.

    python tests/distributed_training.py

On one device and on two replicas of this process; where TF_CONFIG is set, with its workers
alone. The last line it prints is JSON: what each training reported and ended with.
"""

import json
import os

import numpy as np
import tensorflow as tf

WORKERS = "TF_CONFIG" in os.environ
if WORKERS:
    several = tf.distribute.MultiWorkerMirroredStrategy()
else:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    several = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert several.num_replicas_in_sync == 2

import keras
from helpers import stacked

import nsl_keras

layers = nsl_keras.layers

EXAMPLES, BATCH = 16, 8

generator = np.random.default_rng(0)
images = generator.normal(size=(EXAMPLES, 8, 8, 1)).astype("float32")
labels = generator.integers(0, 3, size=EXAMPLES)
episodes = nsl_keras.few_shot.EpisodeSampler(
    images, np.arange(EXAMPLES) % 4, ways=3, shots=1, queries=2, seed=0
).episodes(EXAMPLES)
of_episodes = (episodes.support_images, episodes.support_labels, episodes.query_images)


def network(*convolution, units=3):
    end = keras.layers.Flatten(), keras.layers.Dense(units, kernel_regularizer="l2")
    return stacked((8, 8, 1), *convolution, keras.layers.Activation("relu"), *end)


def neighborhoods():
    """With static and dynamic layers, and batch norms inside and outside of layers."""
    predictor = nsl_keras.predictors.SimilarityPredictor(
        batch_normalization={"synchronized": True}
    )
    convolutions = [
        layers.NeuralSimilarityConv2D(4, 3, strides=2),
        layers.BatchNormalization(synchronized=True),
        layers.NeuralSimilarityConv2D(4, 3, predictor=predictor),
    ]
    return nsl_keras.MetaNeighborhoodModel(
        network(*convolutions, units=6),
        layers.CosineDense(3),
        layers.NeighborDictionary(12, dropout=0.0),
    )


def linear():
    return nsl_keras.MetaNeighborhoodModel(
        None, layers.CosineDense(3), layers.NeighborDictionary(12, dropout=0.0)
    )


def maml():
    return nsl_keras.few_shot.MAML(network(keras.layers.Conv2D(4, 3)), inner_steps=1)


def adapted():
    """Adapted in place, with a rotation of each kernel's taps."""
    options = {"train_classifier": True, "inplace": True}
    model = network(keras.layers.Conv2D(4, 3))
    return nsl_keras.convert.add_similarity(model, "orthogonal", **options)


def fit(strategy, make, x, y, batch, rate=0.002, **options):
    """A model after two epochs, and what `fit` returns."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile(
            keras.optimizers.SGD(rate, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    options |= {"batch_size": batch, "shuffle": False, "verbose": 0}
    return model, model.fit(x, y, epochs=2, **options)


def weights_of(model):
    weights = [each for each in model.weights if "seed" not in each.path]
    return np.concatenate([np.ravel(each.numpy()) for each in weights]).tolist()


def train(strategy, make, x=images, y=labels, **options):
    """Trains, and reports all."""
    model, found = fit(strategy, make, x, y, BATCH, **options)
    return {
        **found.history,
        "predictions": model.predict(x, batch_size=BATCH, verbose=0).ravel().tolist(),
        "weights": weights_of(model),
    }


TRAININGS = {
    "neighborhoods": {"make": neighborhoods},
    "maml": {"make": maml, "x": of_episodes, "y": episodes.query_labels, "rate": 0.05},
}

if not WORKERS:  # Keras's own models do not predict on several workers.
    TRAININGS["adapted"] = {"make": adapted, "rate": 0.05}


def uneven(strategy, **options):
    """Weights after batches of seven, of which one replica takes four."""
    given = images[:7].reshape(7, -1), labels[:7]
    return weights_of(fit(strategy, linear, *given, batch=7, **options)[0])


def drawn():
    """The entries of a dictionary that each worker would draw from another seed."""
    keras.utils.set_random_seed(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    with several.scope():
        model = neighborhoods()
        model.build((None, 8, 8, 1))
    return model.initialize_from(images, labels).tolist()


found = {"several": {name: train(several, **each) for name, each in TRAININGS.items()}}
if WORKERS:
    found["drawn"] = drawn()
else:
    one = tf.distribute.get_strategy()
    found["one"] = {name: train(one, **each) for name, each in TRAININGS.items()}
    share = np.array([7 / (2 * 4)] * 4 + [7 / (2 * 3)] * 3)
    found["uneven"] = [uneven(several), uneven(one, sample_weight=share)]
print(json.dumps(found))
