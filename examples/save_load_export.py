"""Keeps a model in three ways: as a Keras file, as weights alone, and as a SavedModel.

The script trains a network with dynamic and static similarities and learned neighbors for
some epochs, writes it, and reads it in a fresh process, which trains it further.

    python examples/save_load_export.py          # 30 seconds on one core
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import nsl_keras  # Registers its layers and models with Keras, which then loads them.


def make_model():
    backbone = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            nsl_keras.layers.NeuralSimilarityConv2D(8, 3, activation="relu"),
            nsl_keras.layers.NeuralSimilarityConv2D(16, 3, predictor="sphere"),
            keras.layers.Flatten(),
            keras.layers.Dense(32),
        ]
    )
    model = nsl_keras.MetaNeighborhoodModel(
        backbone, nsl_keras.layers.CosineDense(10), dictionary=100
    )
    model.build((None, 8, 8, 1))
    return model


def data():
    digits = load_digits()
    return digits.images[..., None].astype("float32") / 16, digits.target


def read(folder):
    """What the fresh process does."""
    x, y = data()
    expected = np.load(folder / "expected.npy")
    model = keras.saving.load_model(folder / "model.keras")
    gap = np.abs(model.predict(x[:50], verbose=0) - expected).max()
    print(f"  model.keras: largest change of a logit {gap:.1g}")
    steps = int(model.optimizer.iterations)
    history = model.fit(x, y, epochs=1, verbose=0).history
    print(f"  goes on after step {steps}, with training loss {history['loss'][0]:.4f}")

    model = make_model()
    model.load_weights(folder / "model.weights.h5")
    gap = np.abs(model.predict(x[:50], verbose=0) - expected).max()
    print(f"  model.weights.h5: largest change of a logit {gap:.1g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default=None, help="folder; by default a new one")
    parser.add_argument("--read", type=pathlib.Path, help="read only, from this folder")
    args = parser.parse_args()
    if args.read:
        read(args.read)
        return

    keras.utils.set_random_seed(0)
    x, y = data()
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    history = model.fit(x, y, epochs=args.epochs, verbose=0).history
    print(f"training loss after {args.epochs} epochs: {history['loss'][-1]:.4f}")

    folder = pathlib.Path(args.output or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "expected.npy", model.predict(x[:50], verbose=0))
    model.save(folder / "model.keras")  # With the optimizer, so that `fit` can continue.
    model.save_weights(folder / "model.weights.h5")  # Without the architecture.
    # For servers and other languages: needs neither this package nor Keras.
    nsl_keras.export.save_model(model, folder / "served" / "1")
    for path in sorted(folder.iterdir()):
        files = [each for each in (path, *path.rglob("*")) if each.is_file()]
        print(f"  {path.name}: {sum(each.stat().st_size for each in files) // 1024} KiB")

    print("a fresh process:", flush=True)
    subprocess.run([sys.executable, __file__, f"--read={folder}"], check=True)
    print("Look at the changes: rounding errors at most. Keep model.keras to train on;")
    print("export for servers. A folded model's file needs Keras alone.")


if __name__ == "__main__":
    main()
