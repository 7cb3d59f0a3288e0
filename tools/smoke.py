"""What an installed package must do, away from its repository.

    python smoke.py    # trains, saves, loads in another process, folds, and serves

It imports nothing that `pip install "nsl_keras[tensorflow-cpu]"` or `[jax]` does not bring.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import nsl_keras

PREDICT = """
import sys
import numpy as np
import keras
import nsl_keras
model = keras.saving.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]), verbose=0))
"""
SERVE = """
import sys
import numpy as np
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1])
np.save(sys.argv[3], served.serve(np.load(sys.argv[2])).numpy())
"""


def main() -> None:
    """Runs all parts, each of which fails with an error."""
    installed = pathlib.Path(nsl_keras.__file__).parent
    if "site-packages" not in installed.parts:
        raise SystemExit(f"`nsl_keras` must be installed. Received: {installed}")
    if not (installed / "py.typed").exists():
        raise SystemExit("`nsl_keras` must carry its types: py.typed is missing.")
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    labels = np.arange(96) % 3
    images = generator.normal(size=(96, 8, 8, 1)).astype("float32")
    images += labels[:, None, None, None] - 1
    model = train(images, labels)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        np.save(folder / "images.npy", images[:5])
        expected = model.predict(images[:5], verbose=0)
        model.save(folder / "model.keras")
        found = in_another_process(PREDICT, folder / "model.keras", folder)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        if keras.backend.backend() == "tensorflow":
            nsl_keras.export.save_model(model, folder / "served")
            found = in_another_process(SERVE, folder / "served", folder)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    fold(images)
    print(
        f"nsl_keras {nsl_keras.__version__} trains, saves and folds: "
        f"Python {sys.version.split()[0]}, Keras {keras.__version__}, "
        f"{keras.backend.backend()}"
    )


def train(images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Trains a dynamic layer and a dictionary; the loss must fall."""
    inputs = keras.Input(images.shape[1:])
    x = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, predictor="sphere")(inputs)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Model(inputs, x), keras.layers.Dense(3), dictionary=12
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(images, labels, epochs=5, verbose=0).history
    if not history["loss"][-1] < history["loss"][0]:
        raise SystemExit(f"The loss must fall. Received: {history['loss']}")
    return model


def fold(images: np.ndarray) -> None:
    """Folds a static similarity into a plain layer; outputs must stay."""
    static = keras.Sequential(
        [
            keras.Input(images.shape[1:]),
            nsl_keras.layers.NeuralSimilarityConv2D(4, 3, similarity="unconstrained"),
        ]
    )
    plain = nsl_keras.convert.fold(static)
    if any(type(layer).__module__.startswith("nsl_keras") for layer in plain.layers):
        raise SystemExit("A folded model must hold plain Keras layers alone.")
    np.testing.assert_allclose(
        plain.predict(images, verbose=0),
        static.predict(images, verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )


def in_another_process(script: str, path: pathlib.Path, folder: pathlib.Path) -> np.ndarray:
    """Returns what a script makes of the model at a path."""
    results = folder / "results.npy"
    subprocess.run(
        [sys.executable, "-c", script, path, folder / "images.npy", results],
        check=True,
        timeout=600,
        cwd=folder,
    )
    return np.load(results)


if __name__ == "__main__":
    main()
