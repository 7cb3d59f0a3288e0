"""Our backbones by the names of the authors' variables."""

import functools

import keras
import numpy as np

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

    An iFiLM of its own is named after the layer that it follows, `{unit}_{role}_film`.
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
        if role == "film" or hasattr(layer, "film"):
            film = getattr(layer, "film", layer)
            variables |= film_variables(f"{rename(name)}.film", film)
    return variables


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def count(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def build_in(dtype, build):
    """Calls `build` with all of Keras in a dtype."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    return build()
