"""Converts a SavedModel of `nsl_keras.export.save_model` for LiteRT or ONNX Runtime.

    python -m examples.serving.convert saved_models/digits_static/1 digits.tflite
    python -m examples.serving.convert saved_models/digits_static/1 digits.onnx

The extra `onnx` makes and runs ONNX files; the extra `litert` runs LiteRT files.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

SIGNATURE = "serving_default"


def to_litert(folder: str | pathlib.Path, images: Iterable[np.ndarray] = ()) -> bytes:
    """A version of a model as LiteRT's file; with example images, in 8-bit integers.

    Inputs and outputs stay float32. A head that adapts in several steps needs
    `tf.lite.OpsSet.SELECT_TF_OPS` (Flex) besides, and a runtime that has it.
    """
    converter = tf.lite.TFLiteConverter.from_saved_model(
        str(folder), signature_keys=[SIGNATURE]
    )
    images = list(images)
    if images:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ([image[None]] for image in images)
    return converter.convert()


def to_onnx(folder: str | pathlib.Path) -> bytes:
    """A version of a model as ONNX.

    Raises:
        ValueError: If the file would hold operations that ONNX has not: the head adapts
            on a nested tape, or in several steps.
    """
    import onnx
    import tf2onnx

    loaded = tf.saved_model.load(str(folder))
    serve = loaded.signatures[SIGNATURE]
    inputs = serve.structured_input_signature[1]
    model, _ = tf2onnx.convert.from_function(
        tf.function(lambda *tensors: serve(**dict(zip(inputs, tensors, strict=True)))),
        list(inputs.values()),
    )
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(
            "`folder` must not hold a head that adapts on a nested tape or in several "
            "steps: ONNX has no operations for its gradients. Take the SavedModel, or "
            f"LiteRT. Received: folder={str(folder)!r}"
        ) from error
    return model.SerializeToString()


def main(folder: str, file: str) -> None:
    convert = to_onnx if file.endswith(".onnx") else to_litert
    pathlib.Path(file).write_bytes(convert(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
