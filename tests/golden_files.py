"""Reading the golden numbers, and comparing with them."""

import json
import pathlib
import zlib

import keras
import numpy as np
from helpers import DTYPES as DTYPES, gradients as gradients

FOLDER = pathlib.Path(__file__).parent / "golden"


class Golden:
    """One file: arrays by key, `meta` as a dictionary."""

    def __init__(self, name):
        with np.load(FOLDER / f"{name}.npz") as archive:
            self.arrays = {key: archive[key] for key in archive.files}
        self.meta = json.loads(str(self.arrays.pop("meta")))

    def __getitem__(self, key):
        return self.arrays[key]

    def __contains__(self, key):
        return key in self.arrays

    def check(self, key, value, dtype, tolerance32=1e-5, tolerance64=1e-8):
        """Asserts agreement with `key`, relative to the largest entry."""
        expected = np.asarray(self.arrays[key], "float64")
        tensor = keras.ops.convert_to_tensor(value)
        value = np.asarray(keras.ops.convert_to_numpy(tensor), "float64")
        assert value.shape == expected.shape, (key, value.shape, expected.shape)
        kind = "noise_grad" if key.startswith("grad") else "noise_out"
        tolerance = (
            tolerance64
            if dtype == "float64"
            else max(tolerance32, 3 * self.meta.get(kind, 0.0))
        )
        error = np.max(np.abs(value - expected)) / max(np.max(np.abs(expected)), 1e-30)
        assert error <= tolerance, f"{key}: relative error {error:.2e} > {tolerance:.1e}"


def recipe_weights(meta):
    """Fills the variables of a whole-network file from its seed."""
    weights = {}
    for variable in meta["vars"]:
        seed = (meta["seed"] + zlib.crc32(variable["name"].encode())) % 2**32
        normal = np.random.RandomState(seed).standard_normal(tuple(variable["shape"]))
        if variable.get("absval"):
            normal = np.abs(normal)
        base = {"zeros": 0.0, "ones": 1.0}.get(variable["base"], variable["base"])
        if variable["base"] == "eye":
            base = np.eye(variable["shape"][0])
        value = (base + variable["std"] * normal).astype(np.float32)
        np.testing.assert_allclose(value.sum(dtype="float64"), variable["sum"], rtol=1e-9)
        weights[variable["name"]] = value
    return weights
