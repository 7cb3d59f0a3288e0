"""The authors' inner loops, iFiLM and training steps, through the public layers."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, Golden, gradients
from keras import ops

import nsl_keras

pytestmark = pytest.mark.jax

INNER_LOOPS = (
    "mn_inner_cos_scalar_1step",
    "mn_inner_cos_scalar_3step",
    "mn_inner_cos_diag_1step",
    "mn_inner_cos_diag_3step",
    "mn_inner_cos_fixv_1step",
    "mn_inner_cos_dropout_2step",
    "mn_inner_cos_negative_lr",
    "mn_inner_dot_scalar_1step",
    "mn_inner_dot_scalar_3step",
    "mn_inner_euclid_scalar_1step",
)
#: In the second dtype a loop of each inner loss and metric.
SOME = (
    "mn_inner_cos_dropout_2step",
    "mn_inner_dot_scalar_1step",
    "mn_inner_euclid_scalar_1step",
)


def load_head(golden, dtype, inner_loop, steps):
    """The public head with the fixture's weights."""
    meta = golden.meta
    features, classes = golden["w.w1"].shape
    inner = (
        keras.layers.Dense(classes, dtype=dtype)
        if meta["dot"]
        else nsl_keras.layers.CosineDense(classes, dtype=dtype)
    )
    layer = nsl_keras.layers.MetaNeighborhoodHead(
        inner,
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
    return layer, assign_weights(golden, layer)


def assign_weights(golden, layer):
    """Copies the fixture's weights; returns our variables by the authors' names."""
    variables = {
        "w1": layer.head.kernel,
        "k": layer.dictionary.keys,
        "v_raw": getattr(layer.dictionary, "raw_values", None),
        "tau": getattr(layer.head, "learned_scale", None),
        "b1": getattr(layer.head, "bias", None),
    }
    if layer.learning_rate_form == "diagonal":
        variables["lr_diag_raw"] = layer.rate.raw_rates[0]
    else:
        variables["lr_raw"] = layer.rate.raw_rates[0]
    variables = {name: v for name, v in variables.items() if v is not None}
    for name, variable in variables.items():
        variable.assign(np.reshape(golden[f"w.{name}"], variable.shape))
    return variables


def kept_mask(golden):
    if "in.kept" not in golden:
        return None
    kept = np.zeros((golden["in.z"].shape[0], golden["w.k"].shape[0]), bool)
    np.put_along_axis(kept, golden["in.kept"], True, axis=1)
    return ops.convert_to_tensor(kept)


def meta_loss(golden, logits):
    labels = ops.cast(golden["in.y_onehot"], logits.dtype)
    losses = ops.logsumexp(logits, axis=-1) - ops.sum(labels * logits, axis=-1)
    return ops.mean(losses)


@pytest.mark.parametrize(
    ("name", "dtype", "inner_loop"),
    [
        pytest.param(
            *(name, dtype, inner_loop),
            marks=pytest.mark.long if inner_loop == "tape" and "3step" in name else (),
        )
        for name in INNER_LOOPS
        for dtype in DTYPES
        for inner_loop in ("dual", "tape")
        if dtype == DTYPES[0] or name in SOME
    ],
)
def test_inner_loop(name, dtype, inner_loop):
    golden = Golden(name)
    z = ops.convert_to_tensor(golden["in.z"], dtype=dtype)
    kept = kept_mask(golden)
    steps = golden.meta["steps"]
    # Every step of the dual form; the last of the tape, which is slow.
    for step in range(1 if inner_loop == "dual" else steps, steps + 1):
        layer, variables = load_head(golden, dtype, inner_loop, step)
        assert layer.active_inner_loop == inner_loop
        logits = layer.adapted_logits(z, kept)
        golden.check(f"out64.logits_step{step}", logits, dtype)
        loss = meta_loss(golden, logits)
        golden.check(f"out64.meta_loss_step{step}", loss, dtype)
        weights = layer.adapted_weights(z, kept)
        golden.check(f"out64.w1_step{step}", weights[0], dtype)
        if "b1" in variables:
            golden.check(f"out64.b1_step{step}", weights[1], dtype)

    golden.check("out64.logits_before", layer(z, adapt=False), dtype)
    attention = layer.dictionary.attention(z, kept)
    expected = golden["out64.attention"]
    if kept is not None and expected.shape != tuple(attention.shape):
        attention = np.take_along_axis(
            ops.convert_to_numpy(attention), golden["in.kept"], axis=1
        )
    golden.check("out64.attention", attention, dtype)
    golden.check("out64.v_soft", layer.dictionary.values, dtype)
    if "out64.dict_logits_before" in golden:
        dictionary_logits = layer.head(ops.convert_to_tensor(layer.dictionary.keys))
        golden.check("out64.dict_logits_before", dictionary_logits, dtype)

    names = list(variables)
    found = gradients(
        lambda z: meta_loss(golden, layer.adapted_logits(z, kept)),
        [z],
        [variables[name] for name in names],
    )
    for name, gradient in zip(["z", *names], found, strict=True):
        key = f"grad64.meta_loss.{name}"
        if name == "tau" and golden.meta["dot"]:
            continue
        gradient = np.reshape(ops.convert_to_numpy(gradient), golden[key].shape)
        golden.check(key, gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_film(dtype):
    golden = Golden("mn_ifilm")
    layer = nsl_keras.layers.InstanceFiLM(10, dtype=dtype)
    layer.build(golden["in.x"].shape)
    variables = {
        "gamma": (layer.scales, golden["w.gamma"]),
        "beta": (layer.shifts, golden["w.beta"]),
        "k": (layer.keys, golden["w.k"].T),
        "temp": (layer.learned_sharpness, golden["w.temp"]),
    }
    for variable, value in variables.values():
        variable.assign(value)
    x = ops.convert_to_tensor(golden["in.x"], dtype=dtype)
    golden.check("out64.y", layer(x), dtype)
    cotangent = ops.cast(golden["ct.y"], dtype)
    found = gradients(
        lambda x: ops.sum(layer(x) * cotangent),
        [x],
        [variable for variable, _ in variables.values()],
    )
    for name, gradient in zip(["x", *variables], found, strict=True):
        if name == "k":
            gradient = ops.transpose(gradient)
        golden.check(f"grad64.y.{name}", gradient, dtype)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="float64 needs the TensorFlow backend",
)
@pytest.mark.parametrize(
    ("name", "inner_loop"),
    [("mn_adamw_steps", "tape"), ("mn_adamw_steps_clipped", "dual")],
)
def test_training_steps(name, inner_loop):
    """Three steps of `fit` with the authors' AdamW: losses, gradients, weights."""
    keras.config.set_floatx("float64")  # Keras takes losses and metrics in floatx.
    golden = Golden(name)
    meta = golden.meta
    features, classes = golden["w.w1"].shape
    model = nsl_keras.MetaNeighborhoodModel(
        keras.layers.Dense(features, dtype="float64"),
        nsl_keras.layers.CosineDense(classes, dtype="float64"),
        nsl_keras.layers.NeighborDictionary(
            golden["w.k"].shape[0],
            temperature=1 / abs(float(np.float64(golden["w.alpha_raw"]))),
            value_scale=float(golden["w.gamma"]),
            dropout=0.0,
            dtype="float64",
        ),
        inner_loop=inner_loop,
        dtype="float64",
    )
    model.build((None, golden["w.W"].shape[0]))
    variables = assign_weights(golden, model.neighborhood)
    variables |= {"W": model.backbone.kernel, "b": model.backbone.bias}
    for name in ("W", "b"):
        variables[name].assign(golden[f"w.{name}"])

    x = ops.convert_to_tensor(golden["in.x"][0], dtype="float64")
    names = [name for name in variables if f"grad64.meta_loss.{name}" in golden]
    labels = ops.cast(golden["in.y_onehot"][0], "float64")
    found = gradients(
        lambda x: ops.mean(
            keras.losses.categorical_crossentropy(labels, model(x), from_logits=True)
        ),
        [x],
        [variables[name] for name in names],
    )[1:]
    for name, gradient in zip(names, found, strict=True):
        golden.check(f"grad64.meta_loss.{name}", gradient, "float64")

    optimizer = keras.optimizers.AdamW(
        learning_rate=meta["lr"],
        # The authors subtract wd * w a step, Keras learning_rate * weight_decay * w.
        weight_decay=meta["wd"] / meta["lr"],
        epsilon=1e-8,
        clipvalue=10.0,
    )
    optimizer.exclude_from_weight_decay(var_list=model.decay_exempt_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    model.compile(optimizer=optimizer, loss=loss)
    updated = [variables[name] for name in meta["updated"]]
    for step, (x, y) in enumerate(zip(golden["in.x"], golden["in.labels"], strict=True)):
        x = x.astype("float64")
        if step > 0:
            # The exact loss of this step needs the authors' weights: Keras keeps Adam's
            # betas in float32, and its weights differ from theirs by up to 2e-5.
            exact = [golden[f"after64_{step}.{name}"] for name in meta["updated"]]
            ours = [np.array(variable.value) for variable in updated]
        else:
            exact = ours = [np.array(variable.value) for variable in updated]
        assign_all(updated, exact)
        loss = model.compute_loss(x, y, model(x))
        golden.check(f"out64.meta_loss_step{step}", loss, "float64")
        assign_all(updated, ours)
        history = model.fit(x, y, batch_size=len(x), verbose=0)
        np.testing.assert_allclose(history.history["loss"][0], loss, rtol=1e-4)
        for name in meta["updated"]:
            key = f"after64_{step + 1}.{name}"
            golden.check(key, variables[name], "float64", tolerance64=2e-5)


def assign_all(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(np.reshape(value, variable.shape))
