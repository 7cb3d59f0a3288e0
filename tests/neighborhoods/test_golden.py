"""The authors' inner loops, iFiLM and training steps, through the public layers."""

import keras
import numpy as np
import pytest
from golden_backbones import authors_variables, film_variables, supershallownet
from golden_files import FOLDER, Golden, recipe_weights
from helpers import DTYPES, IS_TENSORFLOW, as_numpy, gradients
from keras import ops

import nsl_keras

LOSS = keras.losses.SparseCategoricalCrossentropy
float64_only = pytest.mark.skipif(not IS_TENSORFLOW, reason="float64 needs TensorFlow")
#: The files; those that JAX compares with, of each metric and form of the learning rate;
#: and those of the tape and of float32.
FILES = [path.stem.removeprefix("mn_inner_") for path in FOLDER.glob("mn_inner_*.npz")]
ON_JAX = ("cos_diag_3step", "cos_dropout_2step", "dot_scalar_3step", "euclid_scalar_1step")
SOME = ("cos_diag_1step", "cos_dropout_2step", "dot_scalar_1step")


def build(meta, weights, backbone=None, shape=None, dtype="float64", **options):
    """Our model with the authors' weights, and its variables by their names."""
    features, classes = weights["w1"].shape
    kind = keras.layers.Dense if meta.get("dot") else nsl_keras.layers.CosineDense
    # The authors have both forms of the rate at once, and use one.
    form, rate = (
        ("scalar", "lr_raw") if meta.get("scalar", True) else ("diagonal", "lr_diag_raw")
    )
    model = nsl_keras.MetaNeighborhoodModel(
        backbone,
        kind(classes, dtype=dtype),
        nsl_keras.layers.NeighborDictionary(
            len(weights["k"]),
            metric="euclidean" if meta.get("metric") == "euclid" else "cosine",
            # The authors' alpha enters as its absolute value, the inverse temperature.
            temperature=1 / abs(float(weights["alpha_raw"])),
            value_scale=float(weights.get("gamma", 10.0)),
            fixed_values=meta.get("fix_v", False),
            dropout=0.0,
            dtype=dtype,
        ),
        learning_rate_form=form,
        dtype=dtype,
        **options,
    )
    model.build((None, *(shape or (features,))))
    head = model.neighborhood
    variables = {
        "w1": head.head.kernel,
        "k": head.dictionary.keys,
        "v_raw": getattr(head.dictionary, "raw_values", None),
        "tau": getattr(head.head, "learned_scale", None),
        "b1": getattr(head.head, "bias", None),
        rate: head.learning_rate.weights[0],
    }
    if isinstance(backbone, keras.layers.Dense):
        variables |= {"W": backbone.kernel, "b": backbone.bias}
    elif backbone is not None:
        variables |= authors_variables(model.backbone)
    variables = {name: each for name, each in variables.items() if each is not None}
    names = [name for name in variables if "moving" not in name]
    assert len(model.trainable_variables) == len(names)
    for name in names:
        value = weights[name].T if name.endswith("film.k") else weights[name]
        variables[name].assign(np.reshape(value, variables[name].shape))
    return model, variables


def weights_of(golden):
    return {key[2:]: golden[key] for key in golden.arrays if key.startswith("w.")}


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
        pytest.param(name, dtype, loop, marks=[pytest.mark.jax] * (name in ON_JAX))
        for names, dtype, loop in (
            (FILES, DTYPES[0], "dual"),
            (SOME, DTYPES[0], "tape"),
            (SOME, "float32", "dual"),
        )
        for name in sorted(names)
    ],
)
def test_inner_loop(name, dtype, inner_loop):
    golden = Golden(f"mn_inner_{name}")
    z = ops.convert_to_tensor(golden["in.z"], dtype=dtype)
    kept = kept_mask(golden)
    steps = golden.meta["steps"]
    # Every step of the dual form; the last of the tape, which is slow.
    for step in range(1 if inner_loop == "dual" else steps, steps + 1):
        options = {"dtype": dtype, "inner_loop": inner_loop, "inner_steps": step}
        model, variables = build(golden.meta, weights_of(golden), **options)
        layer = model.neighborhood
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
        lambda z: meta_loss(golden, layer(z, kept=kept)), [z], list(variables.values())
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


def steps(golden, model, count):
    """Trains one step on each batch with the authors' AdamW, and checks the loss."""
    meta = golden.meta
    optimizer = keras.optimizers.AdamW(
        learning_rate=meta["lr"],
        # The authors subtract wd * w a step, Keras learning_rate * weight_decay * w.
        weight_decay=np.float64(meta["wd"] / meta["lr"]),
        # Keras would make float32 numbers of Python's floats.
        beta_1=np.float64(0.9),
        beta_2=np.float64(0.999),
        epsilon=np.float64(1e-8),
        clipvalue=10.0,
    )
    optimizer.exclude_from_weight_decay(var_list=model.decay_exempt_variables)
    model.compile(optimizer, LOSS(from_logits=True), run_eagerly=True, metrics=["accuracy"])
    for step in range(count):
        x, y = golden["in.x"][step].astype("float64"), golden["in.labels"][step]
        loss = model.fit(x, y, batch_size=len(x), verbose=0).history["loss"][0]
        golden.check(f"out64.meta_loss_step{step}", np.array(loss), "float64")
        yield step


@float64_only
@pytest.mark.parametrize("name", ["mn_adamw_steps", "mn_adamw_steps_clipped"])
def test_training_steps(name, float64):
    golden = Golden(name)
    weights = weights_of(golden)
    size, features = weights["W"].shape
    backbone = keras.layers.Dense(features)
    model, variables = build(golden.meta, weights, backbone, (size,))

    x = golden["in.x"][0].astype("float64")
    names = [name for name in variables if f"grad64.meta_loss.{name}" in golden]
    found = gradients(
        lambda x: LOSS(from_logits=True)(golden["in.labels"][0], model(x)),
        [ops.convert_to_tensor(x)],
        [variables[name] for name in names],
    )[1:]
    for name, gradient in zip(names, found, strict=True):
        golden.check(f"grad64.meta_loss.{name}", gradient, "float64")

    for step in steps(golden, model, len(golden["in.x"])):
        for name in golden.meta["updated"]:
            golden.check(f"after64_{step + 1}.{name}", variables[name], "float64")


@float64_only
@pytest.mark.parametrize("film", ["", "_film"])
def test_training_and_validation(film, float64):
    golden = Golden(f"mn_pipeline_supershallow{film}")
    meta, shape = golden.meta, golden["in.x"].shape[2:]
    backbone = supershallownet(shape)
    if film:
        size = meta["film_dict_size"]
        backbone = nsl_keras.convert.add_film(backbone, dictionary_size=size)
    model, variables = build(meta, recipe_weights(meta), backbone, shape)
    *_, images = golden["in.x"].astype("float64")
    assert list(steps(golden, model, 3)) == [0, 1, 2]
    for name, variable in variables.items():
        value, expected = as_numpy(variable), golden[f"after64.{name}"]
        if "moving" in name:  # Keras's are others: validation needs the authors'.
            variable.assign(expected)
            continue
        if name.endswith("film.k"):
            value = value.T
        if name == "conv1.W":
            value = value[..., :6, :6]
        golden.check(f"after64.{name}", value.reshape(expected.shape), "float64")
    labels, options = golden["in.labels"][-1], {"verbose": 0, "return_dict": True}
    found = model.evaluate(images, labels, batch_size=meta["B"], **options)
    for key in ("loss", "accuracy"):
        golden.check(f"out64.val_{key}", np.array(found[key]), "float64")
