"""Serves a SavedModel with TensorFlow alone: reads images, writes predictions.

    python -m examples.serving SAVED_MODEL_FOLDER IMAGES.npy PREDICTIONS.npy

nsl_keras and Keras are blocked before anything is loaded: a SavedModel needs neither.
"""

from __future__ import annotations

import sys

for name in ("nsl_keras", "keras"):
    # None in sys.modules makes every later import of that name fail.
    sys.modules[name] = None

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


def main(folder: str, images_file: str, predictions_file: str) -> None:
    serve = tf.saved_model.load(folder).signatures["serving_default"]
    (argument,) = serve.structured_input_signature[1]
    images = np.load(images_file)
    batches = []
    # Unequal batches, as requests come.
    for batch in np.array_split(images, [1, 6, 70]):
        if len(batch):
            (logits,) = serve(**{argument: tf.constant(batch)}).values()
            batches.append(logits.numpy())
    np.save(predictions_file, np.concatenate(batches))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(
            "Three arguments: SAVED_MODEL_FOLDER IMAGES.npy PREDICTIONS.npy. "
            f"Received: {' '.join(sys.argv[1:]) or 'none'}"
        )
    main(*sys.argv[1:])
