"""Trains on several devices of one machine, and compares with one device. TensorFlow only.

Without two GPUs the script divides the CPU into two logical devices. This is no faster, but
runs the same program. The weights equal those of one device.

    python examples/several_devices.py          # 20 seconds on one core
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nsl_keras


def make_strategy():
    """A strategy for all GPUs, or for two logical CPUs."""
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]  # Before TensorFlow first uses it.
    parts = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def make_model():
    keras.utils.set_random_seed(0)
    backbone = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            nsl_keras.layers.NeuralSimilarityConv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32),
        ]
    )
    model = nsl_keras.MetaNeighborhoodModel(
        backbone,
        nsl_keras.layers.CosineDense(10),
        # Dropout would draw different numbers in each replica.
        nsl_keras.layers.NeighborDictionary(100, dropout=0.0, seed=0),
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    if keras.backend.backend() != "tensorflow":  # It would ignore the strategy.
        raise SystemExit(
            "Set KERAS_BACKEND=tensorflow. JAX has keras.distribution instead."
        )

    strategy = make_strategy()
    devices = ", ".join(strategy.extended.worker_devices)
    print(f"{strategy.num_replicas_in_sync} replicas: {devices}")

    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images[..., None].astype("float32") / 16,
        digits.target,
        train_size=19 * 64,  # Whole batches divide evenly among the replicas.
        stratify=digits.target,
        random_state=0,
    )
    with strategy.scope():  # Model, optimizer and metrics belong to all replicas.
        on_several = make_model()
    on_one = make_model()
    for name, model in {"several devices": on_several, "one device": on_one}.items():
        # The size of a batch counts the examples of all replicas together.
        history = model.fit(
            train_x, train_y, batch_size=64, epochs=args.epochs, shuffle=False, verbose=0
        )
        found = model.evaluate(test_x, test_y, verbose=0, return_dict=True)
        loss, accuracy = history.history["loss"][-1], 100 * found["accuracy"]
        print(f"{name}: training loss {loss:.6f}, test accuracy {accuracy:.2f} %")
    gap = max(
        np.abs(one - several).max()
        for one, several in zip(on_one.get_weights(), on_several.get_weights(), strict=True)
    )
    print(f"largest difference of a weight: {gap:.1g}")
    print("Look at the last line: sums round in another order, and nothing else differs.")


if __name__ == "__main__":
    main()
