"""MLServer runs the SavedModels of `nsl_keras.export.save_model`, and any other.

A request names a signature in its parameters; the default is `serving_default`. The server
answers with status 400 (INVALID_ARGUMENT in gRPC) if the name, rank, size or type of an
input is wrong, if values are not numbers or not finite, or if a request sends more than
`MAX_EXAMPLES` examples.
"""

from __future__ import annotations

import pathlib

import mlserver
import numpy as np
import tensorflow as tf
from mlserver.codecs import NumpyCodec
from mlserver.codecs.numpy import to_datatype
from mlserver.errors import InferenceError
from mlserver.repository import ModelRepository
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor

MAX_EXAMPLES = 1024


class SavedModelRuntime(mlserver.MLModel):
    """One version of a model."""

    async def load(self) -> bool:
        self.served = tf.saved_model.load(self.settings.parameters.uri)
        serve = self.served.signatures["serving_default"]
        self.inputs = _described(serve.structured_input_signature[1])
        self.outputs = _described(serve.structured_outputs)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        name = str(getattr(payload.parameters, "signature", "serving_default"))
        if name not in self.served.signatures:
            raise InferenceError(f"There is no signature {name!r} in {self.name!r}.")
        signature = self.served.signatures[name]
        expected = signature.structured_input_signature[1]
        if sorted(each.name for each in payload.inputs) != sorted(expected):
            raise InferenceError(f"The inputs must be {', '.join(expected)}.")
        try:
            tensors = {
                each.name: self.tensor(each, expected[each.name]) for each in payload.inputs
            }
            outputs = {key: out.numpy() for key, out in signature(**tensors).items()}
        except (ValueError, TypeError, OverflowError, tf.errors.OpError) as error:
            raise InferenceError(f"The inputs do not fit: {error}") from error
        return InferenceResponse(
            model_name=self.name,
            model_version=self.version,
            outputs=[NumpyCodec.encode_output(key, out) for key, out in outputs.items()],
        )

    @staticmethod
    def tensor(given: mlserver.types.RequestInput, expected: tf.TensorSpec) -> tf.Tensor:
        """An input of a request, which must be of the signature's type and shape."""
        if given.shape and given.shape[0] > MAX_EXAMPLES:
            raise ValueError(f"{given.shape[0]} examples are more than {MAX_EXAMPLES}")
        array = NumpyCodec.decode_input(given)
        if list(array.shape) != list(given.shape):
            raise ValueError(f"{given.name!r} holds numbers of shape {array.shape}")
        if array.dtype != expected.dtype.as_numpy_dtype:
            raise ValueError(f"{given.name!r} is {array.dtype}, not {expected.dtype.name}")
        if not expected.shape.is_compatible_with(array.shape):
            raise ValueError(f"{given.name!r} is of shape {array.shape}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{given.name!r} holds NaN or infinite values")
        return tf.constant(array)


def _described(tensors: dict[str, tf.TensorSpec]) -> list[MetadataTensor]:
    return [
        MetadataTensor(
            name=name,
            datatype=to_datatype(np.dtype(each.dtype.as_numpy_dtype)),
            shape=[size or -1 for size in each.shape],
        )
        for name, each in tensors.items()
    ]


class VersionedFolder(ModelRepository):
    """All versions in a folder: `name/version/saved_model.pb`.

    New versions are served after a request to `v2/repository/models/<name>/load`. Without a
    version in its address, a request goes to the newest.
    """

    def __init__(self, root: str) -> None:
        self._root = pathlib.Path(root)

    async def find(self, name: str) -> list[mlserver.ModelSettings]:
        found = [each for each in await self.list() if each.name == name]
        if not found:
            raise mlserver.errors.ModelNotFound(name)
        return found

    async def list(self) -> list[mlserver.ModelSettings]:
        return [
            mlserver.ModelSettings(
                name=path.parent.parent.name,
                implementation=SavedModelRuntime,
                parameters=ModelParameters(uri=str(path.parent), version=path.parent.name),
            )
            for path in sorted(self._root.glob("*/*/saved_model.pb"))
            if path.parent.name.isdigit()
        ]
