"""Learned neighbours after weak features: what they add, and a prediction explained.

Both models have a single linear layer as features. The plain one ends in a cosine
classifier; the other finetunes the same classifier, for each image, on the entries of a
learned dictionary that resemble the image.

    python examples/neighbors.py                   # 30 seconds on one core
    python examples/neighbors.py --dataset=mnist   # downloads it the first time
"""

import argparse
import pathlib
import tempfile

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


def features(shape):
    layers = [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(32)]
    return keras.Sequential(layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", choices=DATASETS)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", default=None, help="folder; by default a new one")
    args = parser.parse_args()
    train_x, test_x, train_y, test_y = load(args.dataset)
    shape = train_x.shape[1:]

    keras.utils.set_random_seed(0)
    plain = keras.Sequential([features(shape), nsl_keras.layers.CosineDense(10)])
    keras.utils.set_random_seed(0)
    model = nsl_keras.MetaNeighborhoodModel(
        features(shape),
        nsl_keras.layers.CosineDense(10),
        nsl_keras.layers.NeighborDictionary(500, temperature=0.1, seed=0),
    )
    scores = {}
    for name, each in {"plain": plain, "neighbours": model}.items():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        each.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
        each.fit(train_x, train_y, batch_size=64, epochs=args.epochs, verbose=0)
        scores[name] = each.evaluate(test_x, test_y, verbose=0, return_dict=True)
    print(f"plain model:                   {100 * scores['plain']['accuracy']:.2f} %")
    model.unadapted.compile(loss=model.loss, metrics=["accuracy"])
    _, accuracy = model.unadapted.evaluate(test_x, test_y, verbose=0)
    print(f"neighbours, before adaptation: {100 * accuracy:.2f} %")
    print(f"neighbours, after adaptation:  {100 * scores['neighbours']['accuracy']:.2f} %")

    # The image whose logits the neighbours change most, of those whose class changes.
    after = model.predict(test_x, verbose=0)
    before = model.unadapted.predict(test_x, verbose=0)
    changed = before.argmax(axis=-1) != after.argmax(axis=-1)
    number = int((np.abs(after - before).max(axis=-1) + 1000 * changed).argmax())
    chosen = test_x[number : number + 1]
    guess, answer = before[number].argmax(), after[number].argmax()
    print(f"test image {number}, class {test_y[number]}: {guess} before, {answer} after")
    neighbors = model.neighbors(chosen, k=3)
    for entry, weight, value, change in zip(*(each[0] for each in neighbors), strict=True):
        print(
            f"  entry {entry}, attention {weight:.2f}, class {value.argmax()} with "
            f"{100 * value.max():.0f} %, adds {change[answer]:+.2f} to logit {answer}"
        )

    folder = pathlib.Path(args.output or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    shown = train_x[:500]
    figure = nsl_keras.visualize.plot_learned_neighbors(model, shown)
    figure.savefig(folder / "neighbors.png")
    figure = nsl_keras.visualize.plot_adaptation(model, chosen[0], images=shown)
    figure.savefig(folder / "prediction.png")
    print("pictures:", folder / "neighbors.png", folder / "prediction.png")
    print("Look at the plain accuracy beside the one after adaptation. The one before is")
    print("no baseline: that head was trained to be adapted.")


if __name__ == "__main__":
    main()
