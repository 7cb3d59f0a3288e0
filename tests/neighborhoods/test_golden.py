"""The authors' inner loops and iFiLM, through the public layers."""

import keras
import numpy as np
import pytest
from golden_backbones import film_variables
from golden_files import Golden
from helpers import DTYPES, as_numpy, gradients
from keras import ops

import nsl_keras

#: The files, and whether JAX compares with them: with each metric and form of the rate.
FILES = {
    "cos_scalar_1step": False,
    "cos_scalar_3step": False,
    "cos_diag_1step": False,
    "cos_diag_3step": True,
    "cos_fixv_1step": False,
    "cos_dropout_2step": True,
    "cos_negative_lr": False,
    "dot_scalar_1step": False,
    "dot_scalar_3step": True,
    "euclid_scalar_1step": True,
}
#: What the tape computes, and what is compared in float32 too.
SOME = ("cos_diag_1step", "cos_dropout_2step", "dot_scalar_1step")


def load_head(golden, dtype, inner_loop, steps):
    """The public head with the file's weights, and its variables."""
    meta, (features, classes) = golden.meta, golden["w.w1"].shape
    kind = keras.layers.Dense if meta["dot"] else nsl_keras.layers.CosineDense
    layer = nsl_keras.layers.MetaNeighborhoodHead(
        kind(classes, dtype=dtype),
        nsl_keras.layers.NeighborDictionary(
            golden["w.k"].shape[0],
            metric="euclidean" if meta.get("metric") == "euclid" else "cosine",
            # The authors' alpha enters as its absolute value, the inverse temperature.
            temperature=1 / abs(float(np.float64(golden["w.alpha_raw"]))),
            value_scale=float(golden["w.gamma"]) if "w.gamma" in golden else 10.0,
            fixed_values=meta.get("fix_v", False),
            dtype=dtype,
        ),
        inner_steps=steps,
        learning_rate_form="scalar" if meta.get("scalar", True) else "diagonal",
        inner_loop=inner_loop,
        dtype=dtype,
    )
    layer.build((None, features))
    # Our variables by the authors' names.
    rate = "lr_diag_raw" if layer.learning_rate_form == "diagonal" else "lr_raw"
    variables = {
        "w1": layer.head.kernel,
        "k": layer.dictionary.keys,
        "v_raw": getattr(layer.dictionary, "raw_values", None),
        "tau": getattr(layer.head, "learned_scale", None),
        "b1": getattr(layer.head, "bias", None),
        rate: layer.learning_rate.weights[0],
    }
    variables = {name: v for name, v in variables.items() if v is not None}
    for name, variable in variables.items():
        variable.assign(np.reshape(golden[f"w.{name}"], variable.shape))
    return layer, variables


def kept_mask(golden):
    if "in.kept" not in golden:
        return None
    kept = np.zeros((golden["in.z"].shape[0], golden["w.k"].shape[0]), bool)
    np.put_along_axis(kept, golden["in.kept"], True, axis=1)
    return ops.convert_to_tensor(kept)


def meta_loss(golden, logits):
    labels = ops.cast(golden["in.y_onehot"], logits.dtype)
    return ops.mean(keras.losses.categorical_crossentropy(labels, logits, from_logits=True))


@pytest.mark.parametrize(
    ("name", "dtype", "inner_loop"),
    [
        pytest.param(name, dtype, loop, marks=[pytest.mark.jax] * FILES[name])
        for names, dtype, loop in (
            (FILES, DTYPES[0], "dual"),
            (SOME, DTYPES[0], "tape"),
            (SOME, "float32", "dual"),
        )
        for name in names
    ],
)
def test_inner_loop(name, dtype, inner_loop):
    golden = Golden(f"mn_inner_{name}")
    z = ops.convert_to_tensor(golden["in.z"], dtype=dtype)
    kept = kept_mask(golden)
    steps = golden.meta["steps"]
    # Every step of the dual form; the last of the tape, which is slow.
    for step in range(1 if inner_loop == "dual" else steps, steps + 1):
        layer, variables = load_head(golden, dtype, inner_loop, step)
        assert layer.active_inner_loop == inner_loop
        logits = layer(z, kept=kept)
        golden.check(f"out64.logits_step{step}", logits, dtype)
        loss = meta_loss(golden, logits)
        golden.check(f"out64.meta_loss_step{step}", loss, dtype)
        weights = layer.adapted_weights(z, kept)
        golden.check(f"out64.w1_step{step}", weights[0], dtype)
        if "b1" in variables:
            golden.check(f"out64.b1_step{step}", weights[1], dtype)

    golden.check("out64.logits_before", layer(z, adapt=False), dtype)
    attention = layer.dictionary.attention(z, kept)
    if kept is not None:
        attention = np.take_along_axis(as_numpy(attention), golden["in.kept"], axis=1)
    golden.check("out64.attention", attention, dtype)
    golden.check("out64.v_soft", layer.dictionary.values, dtype)
    if "out64.dict_logits_before" in golden:
        logits = layer.head(ops.convert_to_tensor(layer.dictionary.keys))
        golden.check("out64.dict_logits_before", logits, dtype)

    found = gradients(
        lambda z: meta_loss(golden, layer(z, kept=kept)),
        [z],
        list(variables.values()),
    )
    for name, gradient in zip(["z", *variables], found, strict=True):
        key = f"grad64.meta_loss.{name}"
        golden.check(key, np.reshape(as_numpy(gradient), golden[key].shape), dtype)


@pytest.mark.jax
@pytest.mark.parametrize("dtype", DTYPES)
def test_film(dtype):
    golden = Golden("mn_ifilm")
    layer = nsl_keras.layers.InstanceFiLM(10, dtype=dtype)
    layer.build(golden["in.x"].shape)
    variables = {
        key.removeprefix("film."): variable
        for key, variable in film_variables("film", layer).items()
    }
    for name, variable in variables.items():
        variable.assign(golden[f"w.{name}"].T if name == "k" else golden[f"w.{name}"])
    x = ops.convert_to_tensor(golden["in.x"], dtype=dtype)
    golden.check("out64.y", layer(x), dtype)
    cotangent = ops.cast(golden["ct.y"], dtype)
    found = gradients(
        lambda x: ops.sum(layer(x) * cotangent), [x], list(variables.values())
    )
    for name, gradient in zip(["x", *variables], found, strict=True):
        if name == "k":
            gradient = ops.transpose(gradient)
        golden.check(f"grad64.y.{name}", gradient, dtype)
