"""The authors' neural similarity layers, reproduced through the public ones."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, Golden, gradients
from keras import ops

import nsl_keras

pytestmark = pytest.mark.jax

DTYPE = DTYPES[0]
MOMENTUM = float(np.float32(0.999))
STATISTICS = {"moving_mean": "moving_mean", "moving_variance": "moving_var"}


def block(golden, predictor=None):
    """The authors' unit: neural similarity convolution, batch norm, ReLU."""
    unconstrained = "uns" in golden.meta["kind"]
    layer = nsl_keras.layers.NeuralSimilarityConv2D(
        *(golden["w.W"].shape[-1], 3),
        padding="same",
        use_bias=False,
        similarity="unconstrained" if unconstrained else "diagonal",
        predictor=predictor,
        dtype=DTYPE,
    )
    normalization = keras.layers.BatchNormalization(
        momentum=MOMENTUM, epsilon=1e-3, dtype=DTYPE
    )
    model = keras.Sequential([layer, normalization, keras.layers.ReLU(dtype=DTYPE)])
    model.build(golden["in.x"].shape)
    return model, layer, normalization


def assign(golden, variables, normalizations):
    """Sets the authors' weights, and adds those of the batch norms to the variables."""
    for name, variable in variables.items():
        variable.assign(golden[f"w.{name}"])
    for prefix, layer in normalizations.items():
        for ours, theirs in STATISTICS.items():
            getattr(layer, ours).assign(golden[f"w.{prefix}.{theirs}"])
        for name in ("gamma", "beta"):
            variables[f"{prefix}.{name}"] = getattr(layer, name)
            variables[f"{prefix}.{name}"].assign(golden[f"w.{prefix}.{name}"])


def check_outputs_and_gradients(golden, model, variables, normalizations):
    layer, x = model.layers[0], ops.convert_to_tensor(golden["in.x"], dtype=DTYPE)
    pre_bn_key = "pre_bn" if "out64.pre_bn" in golden else "pre_bn_train"
    # Batch norms update in the scope, and leave the layers as they are.
    with keras.StatelessScope():
        golden.check(f"out64.{pre_bn_key}", layer(x, training=True), DTYPE)
    golden.check("out64.out_infer", model(x, training=False), DTYPE)
    for output, function in (
        ("pre_bn", lambda x: layer(x, training=True)),
        ("out_train", lambda x: model(x, training=True)),
    ):
        cotangent = golden[f"ct.{output}"]
        scalar = lambda x: ops.sum(function(x) * ops.cast(cotangent, DTYPE))  # noqa: E731
        names = [name for name in variables if f"grad64.{output}.{name}" in golden]
        found = gradients(scalar, [x], [variables[name] for name in names])
        for name, gradient in zip(["x", *names], found, strict=True):
            golden.check(f"grad64.{output}.{name}", gradient, DTYPE)
        if "m2.W" in variables and "m2.W" not in names:
            (gradient,) = gradients(scalar, [x], [variables["m2.W"]])[1:]
            norm = ops.norm(ops.reshape(gradient, (-1,)))
            golden.check(f"grad64.{output}.m2.W_norm", norm, DTYPE)
            center = f"grad64.{output}.m2.W_centre_tap"
            rows = golden[center].shape[0]
            golden.check(center, gradient[1, 1, :rows], DTYPE)
    # The only training pass that changes the layers.
    golden.check("out64.out_train", model(x, training=True), DTYPE)
    for prefix, normalization in normalizations.items():
        for ours, theirs in STATISTICS.items():
            key = f"out64.{prefix}.{theirs}_after_one_train_step"
            golden.check(key, getattr(normalization, ours), DTYPE)


@pytest.mark.parametrize(
    "name",
    ["nsl_static_dns_layer", "nsl_static_dns_layer_initmask", "nsl_static_uns_layer"],
)
def test_static_layer(name):
    golden = Golden(name)
    model, layer, normalization = block(golden)
    variables = {"W": layer.kernel, "M": layer.bilinear_form.similarity_parameters}
    normalizations = {"bn": normalization}
    assign(golden, variables, normalizations)
    check_outputs_and_gradients(golden, model, variables, normalizations)


@pytest.mark.parametrize(
    ("name", "kind", "similarity"),
    [
        ("nsl_dynamic_dns_layer", "sphere", "diagonal"),
        ("nsl_fspherenet_layer", "full_sphere", "diagonal"),
        ("nsl_dynamic_uns_layer", "sphere", "unconstrained"),
    ],
)
def test_dynamic_layer(name, kind, similarity):
    golden = Golden(name)
    predictor = nsl_keras.predictors.SimilarityPredictor(
        kind, start="published", batch_normalization={"momentum": MOMENTUM}
    )
    model, layer, normalization = block(golden, predictor)
    network = layer.bilinear_form.network
    hidden, output = network.get_layer("hidden"), network.get_layer("output")
    variables = {"W": layer.kernel, "m1.W": hidden.kernel, "m2.W": output.kernel}
    normalizations = {"bn": normalization}
    if similarity == "diagonal":
        normalizations["m1.bn"] = network.get_layer("hidden_normalization")
        normalizations["m2.bn"] = network.get_layer("output_normalization")
    assign(golden, variables, normalizations)
    x = ops.convert_to_tensor(golden["in.x"], dtype=DTYPE)
    identity = ops.ones((9,)) if similarity == "diagonal" else ops.eye(9)
    for mode, training in (("infer", False), ("train", True)):
        with keras.StatelessScope():
            prediction = network(x, training=training)
            shape = (*prediction.shape[:-1], *identity.shape)
            matrix = ops.reshape(prediction, shape) + ops.cast(identity, DTYPE)
            golden.check(f"out64.pre_bn_{mode}", layer(x, training=training), DTYPE)
        expected = golden[f"out64.mask_{mode}"].shape
        golden.check(f"out64.mask_{mode}", ops.reshape(matrix, expected), DTYPE)
    check_outputs_and_gradients(golden, model, variables, normalizations)
