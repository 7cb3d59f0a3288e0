"""Trains each kind of model by `fit`, in a process of `test_distribution.py`.

    python tests/distributed_training.py [names of trainings]

On one device and on two replicas of this process; where TF_CONFIG is set, with its workers
alone. The last line it prints is JSON: what each training reported and ended with.
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf

WORKERS = "TF_CONFIG" in os.environ
if not WORKERS:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )

import keras

import nsl_keras

layers = nsl_keras.layers

EXAMPLES, BATCH, EPOCHS = 80, 16, 2

generator = np.random.default_rng(0)
images = generator.normal(size=(EXAMPLES, 8, 8, 1)).astype("float32")
labels = generator.integers(0, 3, size=EXAMPLES)
episodes = nsl_keras.few_shot.EpisodeSampler(
    images, np.arange(EXAMPLES) % 5, ways=3, shots=1, queries=2, seed=0
).episodes(EXAMPLES)
of_episodes = (episodes.support_images, episodes.support_labels, episodes.query_images)


def network(*convolution, units=3, **options):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *convolution,
            keras.layers.Activation("relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(units, **options),
        ]
    )


def plain():
    return nsl_keras.distribution.distribute(
        network(
            keras.layers.Conv2D(4, 3, kernel_regularizer="l2"),
            layers.BatchNormalization(synchronized=True),
        )
    )


def simple():
    return nsl_keras.distribution.distribute(network(keras.layers.Conv2D(4, 3)))


def neighborhoods():
    predictor = nsl_keras.predictors.SimilarityPredictor(
        batch_normalization={"synchronized": True}
    )
    return nsl_keras.MetaNeighborhoodModel(
        network(layers.NeuralSimilarityConv2D(4, 3, predictor=predictor), units=6),
        layers.CosineDense(3),
        layers.NeighborDictionary(12, dropout=0.0),
    )


def maml():
    return nsl_keras.few_shot.MAML(network(keras.layers.Conv2D(4, 3)), inner_steps=2)


def train(
    strategy,
    make,
    x=images,
    y=labels,
    examples=67,
    validation=BATCH,
    rate=0.002,
    clip=None,
    policy="float32",
):
    """Trains for ten steps, and reports all; the last batch of an epoch may be odd."""
    x, y = keras.tree.map_structure(lambda each: each[:examples], (x, y))
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    with strategy.scope():
        model = make()
        optimizer = keras.optimizers.SGD(rate, momentum=0.9, clipvalue=clip)
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    losses = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"]))
    )
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[record],
        validation_data=keras.tree.map_structure(lambda each: each[:validation], (x, y)),
    ).history
    evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return {
        "losses": losses,
        "history": history,
        "evaluation": evaluation,
        "predictions": np.ravel(model.predict(x, batch_size=BATCH, verbose=0)).tolist(),
        "scale": None if scale is None else float(keras.ops.convert_to_numpy(scale)),
        "weights": [
            np.ravel(keras.ops.convert_to_numpy(each)).tolist()
            for each in model.variables
            if "seed" not in each.path
        ],
    }


# The first images make float16 gradients of the first replica overflow, once an epoch.
bright = images.copy()
bright[:8] *= 2000
TRAININGS = {
    # One example is left over for two replicas in training; three in validation.
    "plain": {"make": plain, "examples": 65, "validation": 19, "clip": 0.02},
    "neighborhoods": {"make": neighborhoods, "examples": 65},
    "maml": {"make": maml, "x": of_episodes, "y": episodes.query_labels, "rate": 0.05},
    "bfloat16": {"make": plain, "examples": 80, "policy": "mixed_bfloat16"},
    "float16": {"make": simple, "x": bright, "examples": 80, "policy": "mixed_float16"},
}


def refusals(strategy):
    """What is refused on several replicas, and what works."""
    keras.config.set_dtype_policy("float32")
    x, y = np.ones((4, 4)), np.ones((4, 2))

    def compiled(optimizer="sgd", loss="mse", **options):
        with strategy.scope():
            model.compile(optimizer, loss, **options)

    def error(method):
        try:
            method(x, y, verbose=0)
        except ValueError as refusal:
            return str(refusal)

    with strategy.scope():
        dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model = nsl_keras.distribution.distribute(dense)
    reductions = []
    for reduction in ("sum", "mean_with_sample_weight"):
        compiled(loss=keras.losses.MeanSquaredError(reduction=reduction))
        reductions += [error(model.fit), error(model.evaluate)]
    compiled(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(gradient_accumulation_steps=2)
        )
    )
    accumulating = error(model.fit)
    compiled(metrics=["mae"])
    before = model.get_weights()[0]
    model.train_on_batch(x, y)
    moved = float(np.abs(before - model.get_weights()[0]).max())
    model.trainable = False
    compiled()
    predicted = [model.predict(x[:1], verbose=0), model.predict_on_batch(x[:3])]
    return {
        "reductions": reductions,
        "accumulating": accumulating,
        "moved": moved,
        "frozen": model.fit(x, y, verbose=0).history["loss"][0],
        "on_batch": model.test_on_batch(x[:1], y[:1], return_dict=True)["loss"],
        "predicted": [each.shape for each in predicted],
    }


def train_all(strategy, names):
    return {name: train(strategy, **TRAININGS[name]) for name in names or TRAININGS}


def drawn(strategy):
    """The entries of a dictionary that each worker would draw from another seed."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    keras.utils.set_random_seed(task)
    with strategy.scope():
        model = neighborhoods()
        model.build((None, 8, 8, 1))
    return model.initialize_from(images, labels).tolist()


if WORKERS:
    workers = nsl_keras.distribution.multi_worker_strategy(timeout=60)
    assert workers.num_replicas_in_sync == 2
    found = {"workers": train_all(workers, sys.argv[1:]), "drawn": drawn(workers)}
else:
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert mirrored.num_replicas_in_sync == 2
    found = {
        "one": train_all(tf.distribute.get_strategy(), sys.argv[1:]),
        "mirrored": train_all(mirrored, sys.argv[1:]),
        "refused": refusals(mirrored),
    }
print(json.dumps(found))
