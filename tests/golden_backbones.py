"""The authors' backbones against ours: whole networks, filled from a recipe."""

import keras
import numpy as np
from golden_files import gradients, recipe_weights
from keras import ops


def normalization_variables(name, layer):
    return {
        f"{name}.bn.gamma": layer.gamma,
        f"{name}.bn.beta": layer.beta,
        f"{name}.bn.moving_mean": layer.moving_mean,
        f"{name}.bn.moving_variance": layer.moving_variance,
    }


def build_in(dtype, build):
    """Calls `build` with all of Keras in a dtype."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    return build()


def check_backbone(golden, model, variables, dtype):
    """Features in both modes, and the norm of every gradient.

    Args:
        golden: The `Golden` file of the network.
        model: Our network.
        variables: Our variables by the authors' names; where a shape differs, ours is
            the transpose of theirs.
        dtype: Dtype of the network.
    """
    weights = recipe_weights(golden.meta)
    assert set(variables) == set(weights)
    assert len(model.variables) == len(variables)
    assert golden.meta["trainable_params"] == sum(
        int(np.prod(variable.shape)) for variable in model.trainable_variables
    )
    for name, value in weights.items():
        shape = tuple(variables[name].shape)
        variables[name].assign(value if shape == value.shape else value.T)

    images = ops.convert_to_tensor(golden["in.x"], dtype=dtype)
    tolerances = {"tolerance32": 1e-4, "tolerance64": 1e-8}
    features = model(images, training=False)
    assert keras.backend.standardize_dtype(features.dtype) == dtype
    golden.check("out64.features_infer", features, dtype, **tolerances)
    # The moving statistics stay as they are: the gradients are taken at the same point.
    with keras.StatelessScope():
        features = model(images, training=True)
    golden.check("out64.features_train", features, dtype, **tolerances)
    cotangent = ops.cast(golden["ct.features"], dtype)
    names = [name for name in weights if f"gradnorm64.{name}" in golden]
    assert len(names) == len(model.trainable_variables)
    found = gradients(
        lambda images: ops.sum(model(images, training=True) * cotangent),
        [images],
        [variables[name] for name in names],
    )
    for name, gradient in zip(["x", *names], found, strict=True):
        norm = np.linalg.norm(np.asarray(ops.convert_to_numpy(gradient), "float64"))
        golden.check(f"gradnorm64.{name}", norm, dtype, **tolerances)
