"""A convolution with a learned similarity, in place of Keras's `Conv2D`.

Two small networks differ only in their convolutions. Both are trained by the same recipe,
from the same seeds. Then the learned similarity is folded into the kernels, and a plain
Keras model is left.

    python examples/similarity_layer.py                   # 35 seconds on one core
    python examples/similarity_layer.py --dataset=mnist   # downloads it the first time
"""

import argparse
import functools

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nsl_keras

DATASETS = ("digits", "mnist", "cifar10")


def load(name):
    """Images in [0, 1] and labels: of training and test, in scikit-learn's order."""
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
        return train_test_split(x, y, test_size=0.3, stratify=y, random_state=0)
    (train_x, train_y), (test_x, test_y) = getattr(keras.datasets, name).load_data()
    shape = (-1, *train_x.shape[1:3], 1 if train_x.ndim == 3 else 3)
    train_x, test_x = (x.reshape(shape).astype("float32") / 255 for x in (train_x, test_x))
    # A part is enough to look at, and short on one core.
    return train_x[:5000], test_x, train_y[:5000].ravel(), test_y.ravel()


def network(convolution, shape):
    return keras.Sequential(
        [
            keras.Input(shape),
            convolution(16, 3, padding="same", activation="relu"),
            convolution(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def train(convolution, data, epochs, seed):
    """Returns a trained network and its test accuracy in %."""
    train_x, test_x, train_y, test_y = data
    keras.utils.set_random_seed(seed)
    model = network(convolution, train_x.shape[1:])
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train_x, train_y, batch_size=64, epochs=epochs, verbose=0)
    _, accuracy = model.evaluate(test_x, test_y, verbose=0)
    return model, 100 * accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", choices=DATASETS)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()

    data = load(args.dataset)
    similar = functools.partial(
        nsl_keras.layers.NeuralSimilarityConv2D, similarity="unconstrained"
    )
    differences = []
    for seed in range(args.seeds):
        _, plain = train(keras.layers.Conv2D, data, args.epochs, seed)
        model, static = train(similar, data, args.epochs, seed)
        differences.append(static - plain)
        print(f"seed {seed}: plain CNN {plain:.2f} %, with similarity {static:.2f} %")
    print(f"mean difference: {np.mean(differences):+.2f} points")

    folded = nsl_keras.convert.fold(model)
    test_x = data[1][:100]
    gap = np.abs(folded.predict(test_x, verbose=0) - model.predict(test_x, verbose=0)).max()
    print("layers after folding:", ", ".join(type(each).__name__ for each in folded.layers))
    sizes = model.count_params(), folded.count_params()
    print(f"parameters: {sizes[0]} before folding, {sizes[1]} after")
    print(f"largest change of a logit by folding: {gap:.1g}")
    print("Compare the difference in each seed with the spread over the seeds.")
    print(f"One test image is {100 / len(data[1]):.2f} points. Folding costs no accuracy.")


if __name__ == "__main__":
    main()
