"""Trains each kind of model by `fit`, in a process of `test_distribution.py`.

    python tests/distributed_training.py none|mirrored|multiworker [names of trainings]

The last line it prints is JSON: what each training reported, and the weights it ended with.
"""

import json
import sys

import numpy as np
import tensorflow as tf

strategies = {
    "none": tf.distribute.get_strategy,
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    # Of this package, which is imported after the logical devices are made.
    "multiworker": lambda: nsl_keras.distribution.multi_worker_strategy(timeout=60),
}
mode = sys.argv[1]
if mode == "mirrored":
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )

import keras

import nsl_keras

layers = nsl_keras.layers

EXAMPLES, BATCH, EPOCHS = 80, 16, 4

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


def dynamic():
    predictor = nsl_keras.predictors.SimilarityPredictor(
        batch_normalization={"synchronized": True}
    )
    return nsl_keras.distribution.distribute(
        network(layers.NeuralSimilarityConv2D(4, 3, predictor=predictor))
    )


def neighborhoods():
    return nsl_keras.MetaNeighborhoodModel(
        network(layers.NeuralSimilarityConv2D(4, 3), units=6),
        layers.CosineDense(3),
        layers.NeighborDictionary(12, dropout=0.0),
    )


def maml():
    return nsl_keras.few_shot.MAML(network(keras.layers.Conv2D(4, 3)), inner_steps=2)


def train(
    make,
    x=images,
    y=labels,
    examples=67,
    validation=BATCH,
    rate=0.002,
    clip=None,
    policy="float32",
):
    """Trains for 20 steps, and reports all; the last batch of an epoch may be odd."""
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


strategy = strategies[mode]()
if mode != "none":
    assert strategy.num_replicas_in_sync == 2
# The first images make float16 gradients of the first replica overflow, once an epoch.
bright = images.copy()
bright[:8] *= 2000
trainings = {
    # One example is left over for two replicas in training; three in validation.
    "plain": lambda: train(plain, examples=65, validation=19, clip=0.02),
    "dynamic": lambda: train(dynamic),
    "neighborhoods": lambda: train(neighborhoods, examples=65),
    "maml": lambda: train(maml, of_episodes, episodes.query_labels, rate=0.05),
    "bfloat16": lambda: train(plain, examples=80, policy="mixed_bfloat16"),
    "float16": lambda: train(simple, bright, examples=80, policy="mixed_float16"),
}
print(json.dumps({name: trainings[name]() for name in sys.argv[2:] or trainings}))
