"""Exports a model, and answers requests in a process that has TensorFlow alone.

The model takes images of bytes: the division by 255 is part of the export. The second
process imports neither nsl_keras nor Keras, as a model server would not.

    python examples/serve.py          # 20 seconds on one core
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nsl_keras

CLIENT = """
import sys
sys.modules["nsl_keras"] = sys.modules["keras"] = None  # An import of either would fail.
import numpy as np
import tensorflow as tf

folder, file = sys.argv[1:]
served = tf.saved_model.load(folder)
images = tf.constant(np.load(file))
for name, signature in sorted(served.signatures.items()):
    outputs = signature(inputs=images)
    shapes = ", ".join(f"{key} {tuple(outputs[key].shape)}" for key in sorted(outputs))
    print(f"  {name}: {shapes}")
logits = served.signatures["serving_default"](inputs=images)["output_0"]
print("  classes:", np.argmax(logits, axis=-1).tolist())
neighbors = served.signatures["neighbors"](inputs=images)
print("  classes of the first image's neighbours:", neighbors["classes"][0].numpy())
try:
    served.signatures["serving_default"](inputs=images[:, :7])
except tf.errors.InvalidArgumentError:
    print("  images of another size are refused")
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", default=None, help="folder; by default a new one")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)

    digits = load_digits()
    images = np.round(digits.images[..., None] * 255 / 16).astype("uint8")
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.3, stratify=digits.target, random_state=0
    )
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
        nsl_keras.layers.NeighborDictionary(200, temperature=0.1, seed=0),
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train_x / 255, train_y, epochs=args.epochs, verbose=0)
    found = model.evaluate(test_x / 255, test_y, verbose=0, return_dict=True)
    print(f"test accuracy: {100 * found['accuracy']:.2f} %")

    folder = pathlib.Path(args.output or tempfile.mkdtemp()) / "digits"
    to_unit = keras.Sequential(
        [keras.Input((8, 8, 1), dtype="uint8"), keras.layers.Rescaling(1 / 255)]
    )
    path = nsl_keras.export.save_model(model, folder, version=1, preprocessing=to_unit)
    print("exported", path)

    np.save(folder / "images.npy", test_x[:5])
    print("a process with TensorFlow alone:", flush=True)
    client = [sys.executable, "-c", CLIENT, str(path), str(folder / "images.npy")]
    subprocess.run(client, check=True)
    predicted = model.predict(test_x[:5] / 255, verbose=0).argmax(axis=-1)
    print("this process:", predicted.tolist(), "labels:", test_y[:5].tolist())
    print("Look at the signatures: a client asks one of them for what it needs. The next")
    print("export takes version=2; a server such as TensorFlow Serving finds it by itself.")


if __name__ == "__main__":
    main()
