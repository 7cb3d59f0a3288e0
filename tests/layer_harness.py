"""`check_layer` and `check_compiled`: what every layer of the package must be able to do.

The first: config and `.keras` round trips, symbolic against eager shapes, weight counts,
mixed precision, both data formats. The second: a training step through XLA, unknown sizes,
and a SavedModel at several batch sizes. Under JAX, where nearly all time goes into XLA's
compilation, the checks leave out what TensorFlow shows as well: each layer is called and
traced, and trained once. `LayerCase` describes a layer; `layer_cases.CASES` lists them all.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """A layer and what to expect of it.

    Attributes:
        name: Name of the test case.
        make: Returns a fresh layer; takes keyword arguments for its constructor.
        input_shape: Shape of an input without the batch axis, channels last.
        trainable: Number of trainable weights (arrays, not entries).
        non_trainable: Number of non-trainable weights.
        data_formats: How the layer is told about channels-first data: keyword arguments
            for the constructor; `None` where it has no channels.
        unknown_sizes: Whether spatial sizes may be unknown.
        full_precision: Whether the layer stays in float32 under mixed precision.
    """

    name: str
    make: Callable[..., keras.layers.Layer]
    input_shape: tuple[int, ...]
    trainable: int
    non_trainable: int = 0
    data_formats: dict[str, Any] | None = None
    unknown_sizes: bool = False
    full_precision: bool = False

    def inputs(self, batch=3):
        rng = np.random.default_rng(7)
        return rng.normal(size=(batch, *self.input_shape)).astype("float32")

    def model(self, **options):
        """The layer in a functional model with an unknown batch size."""
        inputs = keras.Input(self.input_shape)
        return keras.Model(inputs, self.make(**options)(inputs))

    def perturbed_model(self):
        """The same with random weights: zeros and ones would hide mistakes."""
        model = self.model()
        perturb(model)
        return model


def perturb(model, scale=0.1):
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        noise = scale * rng.normal(size=variable.shape)
        variable.assign(ops.convert_to_numpy(variable.value) + noise.astype("float32"))


def as_numpy(tensor):
    return np.asarray(ops.convert_to_numpy(tensor)).astype("float32")


def check_layer(case, folder):
    """Runs the checks that need no compilation; `folder` is for files."""
    check_config(case)
    check_shapes_and_weights(case)
    check_mixed_precision(case)
    check_data_formats(case)
    check_keras_file(case, folder)
    check_frozen_copy(case)


def check_compiled(case, folder):
    """Runs the checks of compiled layers and exported ones; `folder` is for files."""
    check_jit_compile(case)
    check_unknown_sizes(case)
    check_saved_model(case, folder)


def check_config(case):
    layer = case.make()
    config = layer.get_config()
    json.dumps(config)  # Raises for anything that a file cannot hold.
    expected = without_identity(config)
    again = type(layer).from_config(config)
    assert without_identity(again.get_config()) == expected
    # A recurrent layer is Keras's own, and its cell is ours.
    ours = keras.saving.serialize_keras_object(getattr(layer, "cell", layer))
    assert ours["registered_name"].startswith("nsl_keras>")
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert without_identity(again.get_config()) == expected


def without_identity(config):
    """A config without Keras's own marks of objects that several layers share."""
    if not isinstance(config, dict):
        return config
    return {
        key: without_identity(value)
        for key, value in config.items()
        if key != "shared_object_id"
    }


def check_shapes_and_weights(case):
    layer = case.make()
    symbolic = layer(keras.Input(case.input_shape))
    eager = layer(case.inputs())
    assert symbolic.shape[0] is None
    assert tuple(symbolic.shape[1:]) == tuple(eager.shape[1:])
    assert keras.backend.standardize_dtype(eager.dtype) == symbolic.dtype == "float32"
    expected = layer.compute_output_shape((3, *case.input_shape))
    assert tuple(expected) == tuple(eager.shape)
    assert len(layer.trainable_weights) == case.trainable
    assert len(layer.non_trainable_weights) == case.non_trainable
    fresh = case.make()
    fresh.build((None, *case.input_shape))
    assert fresh.built
    assert [(v.name, v.shape) for v in fresh.weights] == [
        (v.name, v.shape) for v in layer.weights
    ]


def check_all_variables_learn(model, inputs):
    targets = np.random.default_rng(1).normal(size=(len(inputs), *model.output_shape[1:]))
    before = [as_numpy(v.value) for v in model.trainable_variables]
    history = model.fit(inputs, targets.astype("float32"), verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    for variable, old in zip(model.trainable_variables, before, strict=True):
        new = as_numpy(variable.value)
        assert np.all(np.isfinite(new)), variable.path
        assert np.any(new != old), f"{variable.path} got no gradient"


def check_mixed_precision(case):
    reference = case.perturbed_model()
    inputs = case.inputs()
    expected = as_numpy(reference(inputs))
    for policy, tolerance in (("mixed_float16", 0.02), ("mixed_bfloat16", 0.1)):
        keras.config.set_dtype_policy(policy)
        model = case.model()
        keras.config.set_dtype_policy("float32")
        compute_dtype = policy.removeprefix("mixed_")
        if case.full_precision:
            compute_dtype = "float32"
        # JAX has traced the layer here, and refuses operations on mixed types.
        assert model.outputs[0].dtype == compute_dtype
        assert all(v.dtype == "float32" for v in model.trainable_variables)
        if not IS_TENSORFLOW:
            continue
        model.set_weights(reference.get_weights())
        outputs = model(inputs)
        assert keras.backend.standardize_dtype(outputs.dtype) == compute_dtype
        error = np.max(np.abs(as_numpy(outputs) - expected))
        assert error <= tolerance * np.max(np.abs(expected)), (policy, error)


def check_jit_compile(case):
    """Training, compiled: what XLA can compile, TensorFlow's graphs can run."""
    model = case.perturbed_model()
    inputs = case.inputs()
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=True)
    if IS_TENSORFLOW:
        expected = as_numpy(model(inputs))
        predicted = model.predict(inputs, verbose=0)
        np.testing.assert_allclose(
            predicted, expected, rtol=1e-4, atol=1e-5 * np.max(np.abs(expected))
        )
    check_all_variables_learn(model, inputs)


def check_data_formats(case):
    if case.data_formats is None or not IS_TENSORFLOW:
        return
    last, first = case.make(), case.make(**case.data_formats)
    inputs = case.inputs()
    last.build(inputs.shape)
    perturb(last)
    first.build(np.moveaxis(inputs, -1, 1).shape)
    first.set_weights(last.get_weights())
    expected = as_numpy(last(inputs))
    received = as_numpy(first(np.moveaxis(inputs, -1, 1)))
    shape = first.compute_output_shape(np.moveaxis(inputs, -1, 1).shape)
    assert tuple(shape) == received.shape
    np.testing.assert_allclose(
        np.moveaxis(received, 1, -1),
        expected,
        rtol=1e-4,
        atol=1e-5 * np.max(np.abs(expected)),
    )


def check_unknown_sizes(case):
    if not case.unknown_sizes:
        return
    layer = case.make()
    unknown = keras.Input((*(None for _ in case.input_shape[:-1]), case.input_shape[-1]))
    model = keras.Model(unknown, layer(unknown))
    inputs = case.inputs()
    # Odd and even sizes split the padding of a strided "same" convolution differently.
    # JAX computes with known sizes alone: there the symbolic call is what can go wrong.
    for size in (case.input_shape[0] + more for more in range(1 + IS_TENSORFLOW)):
        sizes = (size + axis for axis in range(len(case.input_shape) - 1))
        resized = np.resize(inputs, (3, *sizes, case.input_shape[-1]))
        expected = as_numpy(layer(resized))
        np.testing.assert_allclose(
            model.predict(resized, verbose=0) if IS_TENSORFLOW else model(resized),
            expected,
            rtol=1e-4,
            atol=1e-5 * np.max(np.abs(expected)),
        )


def check_keras_file(case, folder):
    model = case.perturbed_model()
    inputs = case.inputs()
    path = folder / f"{case.name}.keras"
    model.save(path)
    again = keras.saving.load_model(path)
    np.testing.assert_array_equal(as_numpy(again(inputs)), as_numpy(model(inputs)))


def check_frozen_copy(case):
    """A frozen layer stays frozen in a copy, with all that it made in `build`."""
    model = case.model()
    layer = model.layers[-1]
    layer.trainable = False
    copy = type(layer).from_config(layer.get_config())
    copy(keras.Input(case.input_shape))
    assert [variable.path for variable in copy.trainable_variables] == []
    assert [variable.path for variable in copy.variables if variable.trainable] == []
    copy.trainable = True
    assert len(copy.trainable_variables) == case.trainable


def save_for_another_process(case, folder):
    """Writes a `.keras` file, and beside it an input with its outputs."""
    model = case.perturbed_model()
    inputs = case.inputs()
    model.save(folder / f"{case.name}.keras")
    np.savez(folder / f"{case.name}.npz", inputs=inputs, outputs=as_numpy(model(inputs)))


def check_saved_model(case, folder):
    if not IS_TENSORFLOW:
        return
    import tensorflow as tf

    model = case.perturbed_model()
    path = folder / f"{case.name}_saved_model"
    model.export(str(path), verbose=False)
    served = tf.saved_model.load(str(path))
    for batch in (1, 5, 64):
        inputs = case.inputs(batch)
        expected = as_numpy(model(inputs, training=False))
        np.testing.assert_allclose(
            served.serve(inputs),
            expected,
            rtol=1e-4,
            atol=1e-5 * np.max(np.abs(expected)),
        )
