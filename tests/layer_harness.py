"""What every layer must be able to do, and every conversion of a model.

`check_layer`, without compilation: config and `.keras` round trips, symbolic against eager
shapes, weight counts, half precision, both data formats, frozen copies, gradients, folding.
`check_compiled`: a training step through XLA, a SavedModel at several batch sizes and
unknown sizes of images, bfloat16. On JAX nearly all time goes into compilation, so the
checks leave out what TensorFlow shows as well: each layer is traced, and trained once.
`check_conversion`: a model beside the one that `add_similarity` makes of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from finite_differences import check_gradients as check_layer_gradients
from helpers import (
    IS_TENSORFLOW,
    as_numpy,
    assert_close,
    assert_equal,
    normal,
    randomize,
    relative_error,
    values,
)

from nsl_keras import graphs, nesting
from nsl_keras.convert import add_similarity, fold
from nsl_keras.similarity.with_similarity import forms_in


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """A layer and what to expect of it.

    `make` takes keyword arguments for the constructor; `input_shape` has no batch axis, and
    its channels are last. `trainable` and `non_trainable` count weights (arrays, not
    entries). `channels_first` are the arguments that make the layer take channels first, if
    it can. Spatial sizes may have `unknown_sizes`, and a layer of `full_precision` stays in
    float32 under mixed precision.
    """

    name: str
    make: Callable[..., keras.layers.Layer]
    input_shape: tuple[int, ...]
    trainable: int
    non_trainable: int = 0
    channels_first: dict[str, Any] | None = None
    unknown_sizes: bool = False
    full_precision: bool = False

    def inputs(self, batch=3):
        return normal(batch, *self.input_shape, seed=7)

    def model(self, unknown_sizes=False):
        """The layer in a functional model with an unknown batch size."""
        *sizes, channels = self.input_shape
        inputs = keras.Input((*([None] * len(sizes) if unknown_sizes else sizes), channels))
        return keras.Model(inputs, self.make()(inputs))

    def perturbed_model(self, unknown_sizes=False):
        """The same with random weights: zeros and ones would hide mistakes."""
        model = self.model(unknown_sizes)
        randomize(model.trainable_variables, 0.1)
        return model


def check_layer(case, folder):
    """Runs the checks that need no compilation; `folder` is for files."""
    model, inputs = case.perturbed_model(), case.inputs()
    outputs = model(inputs)
    check_shapes_and_weights(case, model, outputs)
    check_half_precision(case, model, outputs, "float16", 0.02)
    if IS_TENSORFLOW:
        check_keras_file(model, inputs, outputs, folder / f"{case.name}.keras")
        check_data_formats(case, model, outputs)
        check_copies(case)
        check_gradients(case)
        check_fold(case, model, outputs)


def check_compiled(case, folder):
    """Runs the checks of compiled layers and exported ones; `folder` is for files."""
    model = case.perturbed_model(case.unknown_sizes)
    if IS_TENSORFLOW:
        check_half_precision(case, model, model(case.inputs()), "bfloat16", 0.1)
        check_saved_model(case, model, folder / case.name)
    check_training(case, model)  # Last: it changes the weights.


def without_identity(config):
    """A config without Keras's own marks of objects that several layers share."""
    if not isinstance(config, dict):
        return config
    return {
        key: without_identity(value)
        for key, value in config.items()
        if key != "shared_object_id"
    }


def check_shapes_and_weights(case, model, outputs):
    layer, symbolic = model.layers[-1], model.outputs[0]
    assert symbolic.shape[0] is None
    assert tuple(symbolic.shape[1:]) == tuple(outputs.shape[1:])
    assert keras.backend.standardize_dtype(outputs.dtype) == symbolic.dtype == "float32"
    expected = layer.compute_output_shape((3, *case.input_shape))
    assert tuple(expected) == tuple(outputs.shape)
    assert len(layer.trainable_weights) == case.trainable
    assert len(layer.non_trainable_weights) == case.non_trainable
    fresh = case.make()
    fresh.build((None, *case.input_shape))
    assert fresh.built
    names, of_layer = ([(v.name, v.shape) for v in each.weights] for each in (fresh, layer))
    assert names == of_layer


def check_keras_file(model, inputs, outputs, path):
    parts = [*nesting.sublayers(model.layers[-1])][:1]
    for part in parts:
        part.trainable = False
    model.save(path)
    again = keras.saving.load_model(path)
    assert_equal(again(inputs), outputs)
    for one, other in zip(model.variables, again.variables, strict=True):
        assert one.trainable == other.trainable
    for part in parts:
        part.trainable = True


def check_copies(case):
    """A copy has the same config; a frozen layer stays frozen, with all that it made."""
    layer = case.make()
    again = type(layer).from_config(layer.get_config())
    assert without_identity(again.get_config()) == without_identity(layer.get_config())
    layer.trainable = False
    copy = type(layer).from_config(layer.get_config())
    copy(keras.Input(case.input_shape))
    assert [variable.path for variable in copy.trainable_variables] == []
    assert [variable.path for variable in copy.variables if variable.trainable] == []
    copy.trainable = True
    assert len(copy.trainable_variables) == case.trainable


def check_half_precision(case, reference, expected, dtype, tolerance):
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    model = case.model()
    keras.config.set_dtype_policy("float32")
    # JAX has traced the layer here, and refuses operations on mixed types.
    dtype = "float32" if case.full_precision else dtype
    assert model.outputs[0].dtype == dtype
    assert all(variable.dtype == "float32" for variable in model.trainable_variables)
    if IS_TENSORFLOW:
        model.set_weights(reference.get_weights())
        outputs = model(case.inputs())
        assert keras.backend.standardize_dtype(outputs.dtype) == dtype
        assert_close(outputs, expected, tolerance, dtype)


def check_data_formats(case, model, outputs):
    if case.channels_first is None:
        return
    layer = case.make(**case.channels_first)
    inputs = np.moveaxis(case.inputs(), -1, 1)
    layer.build(inputs.shape)
    layer.set_weights(model.layers[-1].get_weights())
    received = as_numpy(layer(inputs))
    assert tuple(layer.compute_output_shape(inputs.shape)) == received.shape
    assert_close(np.moveaxis(received, 1, -1), outputs)


def check_gradients(case):
    """Against central differences, in training mode; heads are for float32 alone."""
    if case.full_precision:
        return
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    model = case.perturbed_model()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    inputs = keras.ops.convert_to_tensor(case.inputs(2), "float64")
    layer = model.layers[-1]
    # Outputs depend by jumps on a learned shape, and on a sparse similarity.
    shaped = any(each.name == "shape" for each in layer.variables)
    skip = ("similarity", "shape") if shaped else ()
    check_layer_gradients(layer, inputs, 1e-7, 1e-5, skip)


def check_fold(case, model, outputs):
    """The plain layer of a static similarity; it rounds the kernel once in bfloat16 too."""
    layer = model.layers[-1]
    if not hasattr(layer, "plain") or getattr(layer, "predictor", None) is not None:
        return
    half = case.make(dtype="mixed_bfloat16")
    half.build((None, *case.input_shape))
    half.set_weights(layer.get_weights())
    # A recurrent layer rounds its states too.
    of_half = 0.02 if isinstance(layer, keras.layers.RNN) else 1e-6
    expected = half(case.inputs())
    for each, wanted, tolerance in ((layer, outputs, 1e-6), (half, expected, of_half)):
        plain = each.fold()
        assert type(plain) is layer.plain
        assert_close(plain(case.inputs()), wanted, tolerance)


def check_training(case, model):
    """Training, compiled: what XLA can compile, TensorFlow's graphs can run."""
    inputs = case.inputs()
    jit_compile = all(layer.supports_jit for layer in model.layers)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    targets = normal(*model(inputs).shape, seed=1)
    before = values(model.trainable_variables)
    assert np.isfinite(model.fit(inputs, targets, verbose=0).history["loss"][0])
    for variable, old in zip(model.trainable_variables, before, strict=True):
        new = as_numpy(variable)
        assert np.all(np.isfinite(new)), variable.path
        assert np.any(new != old), f"{variable.path} got no gradient"


def check_saved_model(case, model, path):
    import tensorflow as tf

    model.export(str(path), verbose=False)
    served = tf.saved_model.load(str(path))
    *sizes, channels = case.input_shape
    for more, batch in enumerate((1, 5, 64)):
        inputs = case.inputs(batch)
        if case.unknown_sizes:
            # Odd and even sizes split the padding of strided "same" convolutions
            # differently.
            given = [sizes[0] + more + axis for axis in range(len(sizes))]
            inputs = np.resize(inputs, (batch, *given, channels))
        assert_close(served.serve(inputs), model(inputs, training=False))


# Conversions.

IMAGES = normal(4, 8, 9, 3, seed=4)


def difference(model, other, inputs):
    """Largest difference of the outputs, relative to their largest entry."""
    return deviation(model(inputs), other(inputs))


def deviation(expected, received):
    pairs = zip(keras.tree.flatten(expected), keras.tree.flatten(received), strict=True)
    return max(relative_error(two, one) for one, two in pairs)


def stack(*parts, shape=IMAGES.shape[1:]):
    """A Sequential model with random weights, but for those that layers have already."""
    model = keras.Sequential([keras.Input(shape), *parts], name="stack")
    randomize(model.weights)
    return model


def converted(model):
    """Names of the layers with a similarity."""
    return [layer.name for layer in graphs.layers(model) if forms_in(layer)]


def trainable_names(model):
    return sorted(variable.name for variable in model.trainable_variables)


def classes_of(model):
    return {type(layer) for layer in graphs.layers(model)}


def graph_of(model):
    operations = getattr(model, "operations", model.layers)  # Sequential models have none.
    return [type(each).__name__ for each in operations]


def assert_independent(model, other, inputs):
    """Training one model leaves the other's outputs as they are."""
    assert not {id(v) for v in model.variables} & {id(v) for v in other.variables}
    before = model(inputs)
    randomize(other.weights)
    assert deviation(before, model(inputs)) == 0
    assert difference(model, other, inputs) > 1e-3


def check_conversion(plain, inputs, names, tolerance=1e-5, **options):
    """Adds similarities, then folds them if they are static; checks each model.

    Returns:
        The model with randomized similarities.
    """
    model = add_similarity(plain, **options)
    assert model.name == plain.name
    assert sorted(converted(model)) == sorted(names)
    assert difference(plain, model, inputs) <= tolerance
    randomize(model.trainable_variables, 0.3 if options.get("predictor") is None else 0.1)
    assert difference(plain, model, inputs) > 1e-3
    if options.get("predictor") is None:
        folded = fold(model)
        assert difference(model, folded, inputs) <= tolerance
        assert classes_of(folded) == classes_of(plain)
        assert graph_of(folded) == graph_of(plain)
        paths = [[each.path for each in model.weights] for model in (folded, plain)]
        assert paths[0] == paths[1]
        assert_independent(model, folded, inputs)
    before = model.get_weights()
    assert_independent(plain, model, inputs)
    model.set_weights(before)
    return model
