"""Adds a similarity to a trained network, trains it, and folds it back.

A plain CNN is trained on sharp digits. Then the images arrive out of focus: of these you
have 200 with labels. Only the similarities are trained on them, some hundred parameters
beside thousands of frozen ones. Folded, the network costs what the first one did.

    python examples/convert_and_fold.py          # 20 seconds on one core
"""

import argparse
import pathlib
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nsl_keras


def compiled(model, rate):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    return model


def accuracy(model, x, y):
    return 100 * np.mean(model.predict(x, verbose=0).argmax(axis=-1) == y)


def largest_change(one, other, x):
    return np.abs(one.predict(x, verbose=0) - other.predict(x, verbose=0)).max()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", default=None, help="folder; by default a new one")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)

    digits = load_digits()
    sharp = digits.images[..., None].astype("float32") / 16
    # Each pixel becomes the mean of itself and its eight neighbours.
    blurred = keras.ops.average_pool(sharp, 3, strides=1, padding="same")
    blurred = keras.ops.convert_to_numpy(blurred)
    train_x, test_x, _, blurred_x, train_y, test_y = train_test_split(
        sharp, blurred, digits.target, test_size=0.5, stratify=digits.target, random_state=0
    )
    # The labelled images of the new kind are not among those of the test.
    few_x, blurred_test_x, few_y, blurred_test_y = train_test_split(
        blurred_x, test_y, train_size=200, stratify=test_y, random_state=0
    )

    trained = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    compiled(trained, 3e-3).fit(train_x, train_y, epochs=args.epochs, verbose=0)
    print(f"trained CNN, sharp images: {accuracy(trained, test_x, test_y):.1f} %")

    similar = nsl_keras.convert.add_similarity(trained, similarity="unconstrained")
    change = largest_change(trained, similar, test_x)
    print(f"largest change of a logit by add_similarity: {change:.1g}")
    print(nsl_keras.convert.summary(similar))

    # The alternative without this package: a copy whose classifier alone is trained.
    classifier = keras.models.clone_model(trained)
    classifier.set_weights(trained.get_weights())
    for layer in classifier.layers[:-1]:
        layer.trainable = False
    at_first = accuracy(trained, blurred_test_x, blurred_test_y)
    print(f"blurred images: {at_first:.1f} % at first")
    for name, model in {"similarities": similar, "classifier": classifier}.items():
        compiled(model, 1e-3).fit(few_x, few_y, epochs=5 * args.epochs, verbose=0)
        size = sum(int(np.prod(each.shape)) for each in model.trainable_weights)
        found = accuracy(model, blurred_test_x, blurred_test_y)
        print(f"{name} trained, {size} parameters: {found:.1f} %")

    folded = nsl_keras.convert.fold(similar)
    change = largest_change(similar, folded, test_x)
    print(f"largest change of a logit by fold: {change:.1g}")
    folder = pathlib.Path(args.output or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    folded.save(folder / "folded.keras")
    print("saved", folder / "folded.keras")
    print("Look at both accuracies: if close, training the classifier would do as well.")
    print("The file loads with Keras alone: it holds no layer of nsl_keras.")


if __name__ == "__main__":
    main()
