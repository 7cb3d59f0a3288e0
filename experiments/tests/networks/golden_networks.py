"""The authors' networks against ours: all numbers of a file, filled from a recipe."""

import keras
import numpy as np
from golden_backbones import AUTHORS_DECAY, TOLERANCES, count, unit_and_role
from golden_files import gradients, recipe_weights
from helpers import as_numpy
from keras import ops

from nsl_keras.layers import InstanceFiLM


def with_films(model, follows):
    """A clone with an iFiLM after the layers that `follows` chooses, of any kind."""

    def call(layer, *args, **kwargs):
        outputs = layer(*args, **kwargs)
        if not follows(layer):
            return outputs
        return InstanceFiLM(name=f"{layer.name}_film")(outputs)

    return keras.models.clone_model(model, call_function=call)


def authors_units(model, rename=lambda name: name):
    """Our convolutions' and iFiLMs' outputs by the authors' names of units."""
    units = {}
    for layer in model.layers:
        name, role = unit_and_role(layer)
        if role == "convolution":
            units[rename(name)] = layer.output
        elif role == "film" or hasattr(layer, "film"):
            units[f"{rename(name)}.film"] = layer.output
    return units


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
        output = as_numpy(output).astype("float64")
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
        norm = np.linalg.norm(as_numpy(gradient).astype("float64"))
        golden.check(f"gradnorm64.{name}", norm, dtype, **TOLERANCES)


def authors_statistics(layer, scope, batch):
    """What the authors' batch norm keeps after a first pass, from what Keras's keeps.

    Theirs has the mean of the batch, whatever stood there before, and averages the
    unbiased variance; Keras averages the mean and the biased variance.
    """

    def old_and_seen(variable):
        old = as_numpy(variable.value).astype("float64")
        new = scope.get_current_value(variable)
        new = as_numpy(new).astype("float64")
        return old, (new - layer.momentum * old) / (1 - layer.momentum)

    _, mean = old_and_seen(layer.moving_mean)
    old, variance = old_and_seen(layer.moving_variance)
    count = batch * int(np.prod(layer.input.shape[1:-1]))
    unbiased = variance * count / (count - 1)
    return mean, AUTHORS_DECAY * old + (1 - AUTHORS_DECAY) * unbiased
