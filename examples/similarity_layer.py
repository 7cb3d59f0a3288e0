"""Compares convolutions with a static or dynamic similarity to Keras's `Conv2D`.

The script trains four small CNNs by one recipe from the same seeds. One has plain
convolutions, one a static similarity, which then folds into the kernels, and one a dynamic
similarity, which a small network predicts from the input. The last is the fair baseline: it
has more plain filters, and at least as many parameters as the dynamic CNN.

    python examples/similarity_layer.py                     # a minute on one core
    python examples/similarity_layer.py --dataset=cifar10   # downloads it; slower
"""

import argparse
import functools
import time

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
    return train_x[:5000], test_x, train_y[:5000].ravel(), test_y.ravel()


def network(convolution, shape, filters):
    return keras.Sequential(
        [
            keras.Input(shape),
            # The first layer stays plain: it sees too little to predict a similarity.
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            convolution(filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            convolution(2 * filters, 3, padding="same", activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", choices=DATASETS)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()

    train_x, test_x, train_y, test_y = load(args.dataset)
    plain, similar = keras.layers.Conv2D, nsl_keras.layers.NeuralSimilarityConv2D
    networks = {
        "plain": (plain, 16),
        "static": (functools.partial(similar, similarity="unconstrained"), 16),
        "dynamic": (functools.partial(similar, predictor="sphere"), 16),
        "plain, wider": (plain, 24),
    }
    models = {}
    for name, (convolution, filters) in networks.items():
        accuracies, seconds = [], []
        for seed in range(args.seeds):
            keras.utils.set_random_seed(seed)
            models[name] = model = network(convolution, train_x.shape[1:], filters)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(1e-2), loss)
            model.fit(train_x, train_y, batch_size=64, epochs=1, verbose=0)  # Compiles.
            start = time.perf_counter()
            model.fit(train_x, train_y, batch_size=64, epochs=args.epochs - 1, verbose=0)
            seconds.append(time.perf_counter() - start)
            predicted = model.predict(test_x, verbose=0).argmax(axis=-1)
            accuracies.append(100 * np.mean(predicted == test_y))
        each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        size, took = model.count_params(), np.mean(seconds)
        print(f"{name:13} test accuracy {each} %, {size} parameters, {took:.1f} s")
    print(nsl_keras.convert.summary(models["dynamic"]))

    static, folded = models["static"], nsl_keras.convert.fold(models["static"])
    some = test_x[:100]
    gap = np.abs(folded.predict(some, verbose=0) - static.predict(some, verbose=0)).max()
    print("layers after folding:", ", ".join(type(each).__name__ for each in folded.layers))
    print(f"parameters after folding: {folded.count_params()}")
    print(f"largest change of a logit by folding: {gap:.1g}")
    print("Compare the accuracies with their spread over the seeds, and with those of the")
    print("wider plain CNN. Folding costs no accuracy. A dynamic similarity does not fold.")


if __name__ == "__main__":
    main()
