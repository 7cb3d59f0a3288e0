"""The authors' backbones against ours: whole networks, filled from a recipe."""

import functools

import keras
import numpy as np
from golden_files import gradients, recipe_weights
from keras import ops

#: Their rate, one minus the decay of 0.9, is a float32 in the float64 arrays too.
AUTHORS_DECAY = 1 - float(np.float32(0.1))
TOLERANCES = {"tolerance32": 1e-4, "tolerance64": 1e-8}
#: The batch norm of the networks of Meta-Neighborhoods.
KERAS_NORMALIZATION = functools.partial(keras.layers.BatchNormalization, momentum=0.9)


def normalization_variables(name, layer):
    return {
        f"{name}.gamma": layer.gamma,
        f"{name}.beta": layer.beta,
        f"{name}.moving_mean": layer.moving_mean,
        f"{name}.moving_variance": layer.moving_variance,
    }


def film_variables(name, layer):
    return {
        f"{name}.gamma": layer.scales,
        f"{name}.beta": layer.shifts,
        f"{name}.k": layer.keys,
        f"{name}.temp": layer.learned_sharpness,
    }


def supershallownet(input_shape):
    """The authors' smallest network, of public layers: the package has no use for it."""

    def unit(outputs, name):
        outputs = keras.layers.Conv2D(
            64, 3, padding="same", use_bias=False, name=f"{name}_convolution"
        )(outputs)
        layer = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_normalization")
        return layer(outputs)

    inputs = keras.Input(input_shape)
    outputs = keras.layers.ReLU()(unit(inputs, "conv0"))
    outputs = unit(keras.layers.MaxPooling2D(3, strides=2)(outputs), "conv1")
    return keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(outputs))


def unit_and_role(layer):
    """`stage_0_block_1_layer_2` and `convolution`, of a layer named after both.

    An iFiLM is named after the layer that it follows, `{unit}_{role}_film`.
    """
    unit, _, role = layer.name.rpartition("_")
    return (unit.rpartition("_")[0], role) if role == "film" else (unit, role)


def authors_variables(model, rename=lambda name: name):
    """Our variables by the authors' names; `rename` makes their unit's name of ours."""
    variables = {}
    for layer in model.layers:
        name, role = unit_and_role(layer)
        if role == "convolution":
            variables[f"{rename(name)}.W"] = layer.kernel
        elif role == "normalization":
            variables |= normalization_variables(f"{rename(name)}.bn", layer)
        elif role == "film":
            variables |= film_variables(f"{rename(name)}.film", layer)
    return variables


def authors_units(model, rename=lambda name: name):
    """Our convolutions' and iFiLMs' outputs by the authors' names of units."""
    suffixes = {"convolution": "", "film": ".film"}
    units = {}
    for layer in model.layers:
        name, role = unit_and_role(layer)
        if role in suffixes:
            units[rename(name) + suffixes[role]] = layer.output
    return units


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def count(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def build_in(dtype, build):
    """Calls `build` with all of Keras in a dtype."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    return build()


def check_backbone(golden, model, variables, dtype, units=None, unused=0):
    """All that the file of a network holds.

    Args:
        golden: The `Golden` file of the network.
        model: Our network.
        variables: Our variables by the authors' names; where a shape differs, ours is
            the transpose of theirs.
        dtype: Dtype of the network.
        units: Outputs in our network by the names of the authors' units, of which the
            file has shapes, means and root mean squares.
        unused: Number of parameters that the authors create and nothing uses.
    """
    weights = {
        name: value
        for name, value in recipe_weights(golden.meta).items()
        if name in variables
    }
    assert set(variables) == set(weights)
    assert len(model.weights) == len(variables)
    assert golden.meta["trainable_params"] - unused == count(model)
    for name, value in weights.items():
        shape = tuple(variables[name].shape)
        variables[name].assign(value if shape == value.shape else value.T)

    images = ops.convert_to_tensor(golden["in.x"], dtype=dtype)
    features = model(images, training=False)
    assert keras.backend.standardize_dtype(features.dtype) == dtype
    golden.check("out64.features_infer", features, dtype, **TOLERANCES)
    if units is not None:
        _check_units(golden, model, units, images, dtype)
    if "ct.features" in golden:
        _check_training(golden, model, variables, images, dtype)


def _check_units(golden, model, units, images, dtype):
    recorded = [key for key in golden.arrays if key.startswith("act64.infer.")]
    assert len(recorded) == len(golden.meta["activation_shapes"]) > 0
    assert {key.removeprefix("act64.infer.") for key in recorded} >= set(units)
    outputs = keras.Model(model.input, units)(images, training=False)
    for name, output in outputs.items():
        assert list(output.shape) == golden.meta["activation_shapes"][name], name
        output = np.asarray(ops.convert_to_numpy(output), "float64")
        statistics = [np.mean(output), np.sqrt(np.mean(output**2))]
        golden.check(f"act64.infer.{name}", statistics, dtype, **TOLERANCES)


def _check_training(golden, model, variables, images, dtype):
    """Features in training mode, moving statistics, and the norm of every gradient."""
    # The moving statistics stay as they are: the gradients are taken at the same point.
    with keras.StatelessScope() as scope:
        features = model(images, training=True)
    golden.check("out64.features_train", features, dtype, **TOLERANCES)
    suffix = "_after_one_train_step"
    changed = [key for key in golden.arrays if key.endswith(f"moving_mean{suffix}")]
    changed = [key for key in changed if key.startswith("out64.")]
    assert changed
    for key in changed:
        name = key.removeprefix("out64.").removesuffix(f".moving_mean{suffix}")
        layer = next(
            layer
            for layer in model.layers
            if getattr(layer, "moving_mean", None) is variables[f"{name}.moving_mean"]
        )
        mean, variance = authors_statistics(layer, scope, len(images))
        golden.check(key, mean, dtype, **TOLERANCES)
        golden.check(f"out64.{name}.moving_variance{suffix}", variance, dtype, **TOLERANCES)

    cotangent = ops.cast(golden["ct.features"], dtype)
    names = [name for name in variables if f"gradnorm64.{name}" in golden]
    assert len(names) == len(model.trainable_variables)
    found = gradients(
        lambda images: ops.sum(model(images, training=True) * cotangent),
        [images],
        [variables[name] for name in names],
    )
    for name, gradient in zip(["x", *names], found, strict=True):
        norm = np.linalg.norm(np.asarray(ops.convert_to_numpy(gradient), "float64"))
        golden.check(f"gradnorm64.{name}", norm, dtype, **TOLERANCES)


def authors_statistics(layer, scope, batch):
    """What the authors' batch norm keeps after a first pass, from what Keras's keeps.

    Theirs has the mean of the batch, whatever stood there before, and averages the
    unbiased variance; Keras averages the mean and the biased variance.
    """

    def old_and_seen(variable):
        old = np.asarray(ops.convert_to_numpy(variable.value), "float64")
        new = scope.get_current_value(variable)
        new = np.asarray(ops.convert_to_numpy(new), "float64")
        return old, (new - layer.momentum * old) / (1 - layer.momentum)

    _, mean = old_and_seen(layer.moving_mean)
    old, variance = old_and_seen(layer.moving_variance)
    count = batch * int(np.prod(layer.input.shape[1:-1]))
    unbiased = variance * count / (count - 1)
    return mean, AUTHORS_DECAY * old + (1 - AUTHORS_DECAY) * unbiased
