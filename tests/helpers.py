"""What tests all over the suite share: arrays, random weights, gradients, processes."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras.backend import compiled, gradients_of

ROOT = pathlib.Path(__file__).parents[1]
BACKEND = keras.backend.backend()
IS_TENSORFLOW = BACKEND == "tensorflow"
#: The precisions to test in: JAX computes in float32 alone, unless a process asks for more.
DTYPES = ("float64", "float32") if IS_TENSORFLOW else ("float32",)
#: Keras before 3.15 lacks LiteRT, `None` in data, inputs as outputs, L1 in float64, and
#: functions as constraints.
keras_3_15 = pytest.mark.skipif(
    [int(part) for part in keras.__version__.split(".")[:2]] < [3, 15],
    reason="Keras 3.15 or later",
)


def as_numpy(tensor):
    """A copy on the host; half precision becomes float32, which NumPy computes with."""
    array = np.array(ops.convert_to_numpy(tensor))
    return array.astype("float32") if "float16" in array.dtype.name else array


def values(variables):
    """Copies of variables as arrays."""
    return [as_numpy(variable) for variable in variables]


def normal(*shape, seed=0, dtype="float32"):
    """Values of a standard normal distribution: `normal(4, 8, 8, 3)` are small images."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def relative_error(received, expected):
    """The largest difference in units of the largest entry, which must not be zero."""
    received = as_numpy(received).astype("float64")
    expected = as_numpy(expected).astype("float64")
    assert received.shape == expected.shape, (received.shape, expected.shape)
    largest = np.max(np.abs(expected))
    assert largest > 0
    return np.max(np.abs(received - expected)) / largest


def assert_close(received, expected, tolerance=1e-5, what=""):
    """Compares relative to the largest entry."""
    error = relative_error(received, expected)
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.1e} {what}"


def assert_equal(received, expected):
    """Compares tensors bit by bit."""
    np.testing.assert_array_equal(as_numpy(received), as_numpy(expected))


def assert_all_equal(received, expected):
    """Compares lists of tensors or variables bit by bit."""
    for one, other in zip(received, expected, strict=True):
        assert_equal(one, other)


def randomize(weights, scale=0.3, seed=6, positive=False):
    """Moves all weights of a layer, a model or a list: ones and zeros hide mistakes.

    Moving variances stay positive, and all weights if asked: a ReLU that is zero everywhere
    would hide them too. Returns what it was given.
    """
    rng = np.random.default_rng(seed)
    for variable in getattr(weights, "variables", weights):
        if "float" not in variable.dtype:  # The state of a seed generator.
            continue
        moved = as_numpy(variable) + scale * rng.normal(size=variable.shape)
        if positive or variable.path.endswith("moving_variance"):
            moved = 0.1 + np.abs(moved)
        variable.assign(moved)
    return weights


def gradients(function, inputs, variables=()):
    """Gradients of a scalar function of tensors with respect to these and to variables.

    Runs on either backend, without changing any variable.
    """
    count = len(inputs)

    def scalar(at):
        mapping = list(zip(variables, at[count:], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return function(*at[:count]), None

    at = [ops.convert_to_tensor(each) for each in (*inputs, *variables)]
    found = lambda at: gradients_of(scalar, at)[0]  # noqa: E731
    # JAX takes longer to compile each operation.
    return found(at) if IS_TENSORFLOW else compiled(found, jit_compile=True)(at)


def second_derivatives(function, inputs, variables):
    """Gradients of the sum of the squares of all gradients of a scalar function."""

    def squared_slope(*at):
        return sum(ops.sum(ops.square(v)) for v in gradients(function, at, variables))

    return gradients(squared_slope, inputs, variables)


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model without a graph, `build` or `compute_output_shape`."""

    def __init__(self, body=None, unused=None, **kwargs):
        super().__init__(**kwargs)
        self.body, self.unused = body or keras.layers.Dense(5), unused

    def call(self, inputs):
        return self.body(inputs)


def stacked(shape, *layers, **options):
    """A Sequential model of layers for inputs of a shape."""
    return keras.Sequential([keras.Input(shape), *layers], **options)


class Batches(keras.utils.PyDataset):
    """A data set of these batches, which nobody looks at before the step."""

    def __init__(self, *batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def reloaded(model, folder):
    """The model from its `.keras` file."""
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def run_litert(path, inputs):
    """The outputs of a LiteRT file, which may leave sizes unknown."""
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(str(path))
    (given,), (outputs,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], inputs.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], inputs)
    interpreter.invoke()
    return interpreter.get_tensor(outputs["index"])


def refused(message):
    """A context in which a call must fail with this message."""
    return pytest.raises(ValueError, match=message)


def refusing(*cases):
    """A test of calls that must fail: `(call, message)`, or a `pytest.param` of these."""

    @pytest.mark.parametrize(("use", "message"), cases)
    def test(use, message):
        with refused(message):
            use()

    return test


def run_python(*arguments, timeout=280, **environment):
    """Runs a Python process, which must succeed, and returns what it printed.

    `run_python("-c", script, folder, KERAS_BACKEND="jax")` takes a second or more for the
    imports alone: let many checks share one process.
    """
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
