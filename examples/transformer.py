"""Adapts a small transformer to new classes: the classifier, a similarity, all weights.

The script trains a transformer on the digits 0 to 4; the rows of an image are its tokens.
Then it adapts it to the digits 5 to 9, and prints accuracy and size of a task's file.

    python examples/transformer.py        # a minute on one core
"""

import argparse
import os
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import nsl_keras


def block(x, width):
    """A block of a transformer encoder."""
    attention = keras.layers.MultiHeadAttention(4, width // 4)
    x = keras.layers.LayerNormalization()(x + attention(x, x))
    hidden = keras.layers.Dense(2 * width, "gelu")(x)
    return keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))


def network(width=32, blocks=2):
    """From images of 8 rows, each with its place, to the logits of five classes."""
    inputs = keras.Input((8, 8))
    places = keras.layers.Embedding(8, width)(keras.ops.arange(8))
    x = keras.layers.Dense(width, name="rows")(inputs) + places
    for _ in range(blocks):
        x = block(x, width)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(5, name="classifier")(x))


def fit(model, x, y, rate, epochs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    return model


def classifier_alone(model):
    for layer in model.layers:
        layer.trainable = layer.name == "classifier"


def similarity(model):
    options = {"block_size": 4, "train_classifier": True, "inplace": True}
    nsl_keras.convert.add_similarity(model, "orthogonal", **options)


METHODS = {
    "classifier alone": classifier_alone,
    "orthogonal similarity": similarity,
    "all weights": lambda model: None,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype("float32") / 16
    old, new = labels < 5, np.flatnonzero(labels >= 5)
    found = {name: [] for name in METHODS}
    for seed in range(args.seeds):
        keras.utils.set_random_seed(seed)
        trained = fit(network(), images[old], labels[old], 3e-3, args.epochs // 3)
        order = np.random.default_rng(seed).permutation(new)
        few = np.concatenate([order[labels[order] == each][:10] for each in range(5, 10)])
        test = np.setdiff1d(new, few)
        for name, change in METHODS.items():
            model = network()
            model.set_weights(trained.get_weights())
            change(model)
            fit(model, images[few], labels[few] - 5, 3e-3, args.epochs)
            right = model.predict(images[test], verbose=0).argmax(-1) == labels[test] - 5
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "task")
                nsl_keras.convert.save_task(model, path)
                found[name].append((100 * right.mean(), os.path.getsize(path) / 1000))
            before = model.predict(images[:50], verbose=0)
            if name == "orthogonal similarity":
                nsl_keras.convert.fold(model, inplace=True)
                gap = np.abs(model.predict(images[:50], verbose=0) - before).max()
    for name, each in found.items():
        accuracies = ", ".join(f"{accuracy:.1f}" for accuracy, _ in each)
        print(f"{name:22} test accuracy {accuracies} %, a task of {each[0][1]:.1f} kB")
    print(f"largest change of a logit by folding: {gap:.1g}")


if __name__ == "__main__":
    main()
