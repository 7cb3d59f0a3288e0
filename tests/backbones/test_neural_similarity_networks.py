"""CNN-4, CNN-9, CNN-10 and the ResNets: layout, parameters, arguments."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras import backbones
from nsl_keras.layers import NeuralSimilarityConv2D
from nsl_keras.predictors import SharedSimilarityPredictor


def count(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


STATIC_DNS = {"similarity": "diagonal"}
STATIC_UNS = {"similarity": "unconstrained"}
DYNAMIC_DNS = {"similarity": "diagonal", "predictor": "sphere"}
DYNAMIC_UNS = {"similarity": "unconstrained", "predictor": "sphere"}
FULL_SPHERE = {"similarity": "diagonal", "predictor": "full_sphere"}


# The authors' own counts, except those of CNN++, which is ours.
@pytest.mark.parametrize(
    ("options", "ten", "hundred"),
    [
        ({}, 511_200, 695_520),
        (STATIC_DNS, 511_281, 695_601),
        (STATIC_UNS, 511_929, 696_249),
        (DYNAMIC_DNS, 890_946, 1_075_266),
        (DYNAMIC_UNS, 2_014_560, 2_198_880),
        (FULL_SPHERE, 890_946, 1_075_266),
        ({"plus": True}, 2_054_525, 2_371_325),
    ],
    ids=str,
)
def test_parameters_of_the_authors_cnn9(options, ten, hundred):
    assert count(backbones.cnn9(**options)) == ten
    assert count(backbones.cnn9(classes=100, **options)) == hundred


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, 1_008_800),
        (STATIC_DNS, 1_008_800 + 9 * 9),
        (DYNAMIC_UNS, 2_478_752),
        ({"plus": True}, 2_551_746),
    ],
    ids=str,
)
def test_parameters_of_the_papers_cnn9(options, parameters):
    model = backbones.cnn9(variant="paper", **options)
    assert count(model) == parameters
    depth = 12 if "plus" in options else 9
    names = [layer.name for layer in model.layers if layer.name.endswith("_convolution")]
    assert len(names) == depth
    assert not any(name.startswith("root") for name in names)
    assert model.get_layer("fully_connected").units == 256


@pytest.mark.parametrize(
    ("options", "parameters", "millions"),
    [
        ({}, 8_901_568, 8.90),
        ({**DYNAMIC_DNS, "predictor_filters": 32}, 9_257_410, 9.26),
        (DYNAMIC_DNS, 9_613_090, 9.61),
        ({"plus": True}, 9_706_844, 9.71),
    ],
    ids=str,
)
def test_parameters_of_cnn10(options, parameters, millions):
    model = backbones.cnn10(**options)
    assert count(model) == parameters
    assert round(parameters / 1e6, 2) == millions
    assert model.output_shape == (None, 1000)
    if options.get("predictor_filters") == 32:
        # The 9.25 million of Appendix A are those in kernels.
        kernels = [v for v in model.trainable_variables if v.name == "kernel"]
        assert sum(int(np.prod(v.shape)) for v in kernels) == 9_252_832


@pytest.mark.parametrize(
    ("options", "parameters"),
    [({}, 28_768), (STATIC_UNS, 28_768 + 4 * 81), (DYNAMIC_DNS, 107_112)],
    ids=str,
)
def test_parameters_of_cnn4(options, parameters):
    features = backbones.cnn4(classes=None, **options)
    assert count(features) == parameters
    assert features.output_shape == (None, 5 * 5 * 32)
    model = backbones.cnn4(**options)
    assert count(model) == parameters + 801 * 5
    wider = backbones.cnn4(classes=None, plus=True)
    assert count(wider) == 110_935
    assert len(layers_of(wider, keras.layers.Conv2D)) == 5
    assert wider.output_shape == (None, 5 * 5 * 55)


@pytest.mark.parametrize(
    ("build", "parameters"),
    [(backbones.resnet18, 11_689_512), (backbones.resnet50, 25_557_032)],
    ids=["resnet18", "resnet50"],
)
def test_parameters_of_resnets(build, parameters):
    model = build()
    assert count(model) == parameters
    assert model.output_shape == (None, 1000)
    # The same 17 of both networks: 16 of 3x3 and one of 7x7.
    assert count(build(similarity="diagonal")) == parameters + 16 * 9 + 49
    static = build(similarity="unconstrained", root_similarity=False)
    assert count(static) == parameters + 16 * 81
    found = layers_of(static, NeuralSimilarityConv2D)
    assert [layer.kernel_size for layer in found] == [(3, 3)] * 16
    plain = layers_of(static, keras.layers.Conv2D)
    assert {layer.kernel_size for layer in plain} == {(1, 1), (7, 7)}


def test_resnet50_is_that_of_keras():
    reference = keras.applications.ResNet50(weights=None, classifier_activation=None)
    model = backbones.resnet50(batch_normalization_epsilon=1.001e-5)
    rng = np.random.default_rng(0)
    pairs = {"root": "conv1", "classifier": "predictions"}
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            for layer in range(4):
                role = f"layer_{layer}" if layer else "shortcut"
                theirs = f"conv{stage + 2}_block{block + 1}_{layer}"
                pairs[f"stage_{stage}_block_{block}_{role}"] = theirs
    copied = 0
    for layer in model.layers:
        name, _, role = layer.name.rpartition("_")
        suffix = {"convolution": "_conv", "normalization": "_bn"}.get(role, "")
        name = name if suffix else layer.name
        if not layer.weights:
            continue
        twin = reference.get_layer(pairs[name] + suffix)
        # Theirs have a bias, zero at the start, in front of batch norm.
        for ours, other in zip(layer.weights, twin.weights, strict=False):
            value = ops.convert_to_numpy(other)
            if role == "normalization":
                value = rng.uniform(0.5, 1.0, value.shape).astype("float32")
                other.assign(value)
            ours.assign(value)
            copied += 1
    assert copied == len(model.weights)
    images = rng.normal(size=(1, 224, 224, 3)).astype("float32")
    expected = ops.convert_to_numpy(reference(images))
    found = ops.convert_to_numpy(model(images))
    error = np.max(np.abs(found - expected)) / np.max(np.abs(expected))
    assert error < 1e-4


SMALL = {
    "cnn4": (backbones.cnn4, {"filters": 4}),
    "cnn9": (backbones.cnn9, {"filters": (4, 5, 6)}),
    "cnn9_paper": (backbones.cnn9, {"filters": (4, 5, 6), "variant": "paper"}),
    "cnn10": (backbones.cnn10, {"filters": (4, 5, 6), "classes": 7}),
    "resnet18": (backbones.resnet18, {"filters": (2, 3, 4, 5), "classes": 7}),
    "resnet50": (backbones.resnet50, {"filters": (2, 3, 4, 5), "classes": 7}),
}
# One pixel is left before the dense layers.
SIZES = {
    "cnn4": 16,
    "cnn9": 8,
    "cnn9_paper": 8,
    "cnn10": 32,
    "resnet18": 32,
    "resnet50": 32,
}
FEATURES = {
    "cnn4": 4,
    "cnn9": 6,
    "cnn9_paper": 256,
    "cnn10": 512,
    "resnet18": 5,
    "resnet50": 20,
}
SIMILAR_LAYERS = {
    "cnn4": 4,
    "cnn9": 9,
    "cnn9_paper": 9,
    "cnn10": 9,
    "resnet18": 17,
    "resnet50": 17,
}


@pytest.fixture(params=SMALL)
def small(request):
    """Builds one of the networks, small; `small.name` says which."""

    def make(**options):
        build, defaults = SMALL[request.param]
        size = SIZES[request.param]
        return build(**{"input_shape": (size, size, 3), **defaults, **options})

    make.name = request.param
    return make


def images_for(model):
    shape = (2, *model.input_shape[1:])
    return np.random.default_rng(2).random(shape).astype("float32")


def run(model, images=None):
    return ops.convert_to_numpy(model(images_for(model) if images is None else images))


@pytest.mark.parametrize(
    ("small", "similarity"),
    list(zip(SMALL, 3 * ("diagonal", "unconstrained"), strict=True)),
    indirect=["small"],
)
def test_static_similarity_starts_as_the_plain_network(small, similarity):
    plain, model = small(), small(similarity=similarity)
    assert not layers_of(plain, NeuralSimilarityConv2D)
    found = layers_of(model, NeuralSimilarityConv2D)
    assert len(found) == SIMILAR_LAYERS[small.name]
    for layer, ours in zip(plain.layers, model.layers, strict=True):
        if isinstance(ours, NeuralSimilarityConv2D):
            ours.kernel.assign(layer.kernel)
        else:
            ours.set_weights(layer.get_weights())
    expected = run(plain)
    assert np.max(np.abs(expected)) > 1e-3
    np.testing.assert_allclose(run(model), expected, atol=1e-5)


def test_predictors_and_batch_norms_take_the_networks_options(small):
    model = small(
        predictor="sphere",
        predictor_filters=3,
        batch_normalization_momentum=0.7,
        batch_normalization_epsilon=0.01,
        synchronized=True,
        kernel_regularizer="l2",
    )
    found = layers_of(model, NeuralSimilarityConv2D)
    assert len({id(layer.predictor) for layer in found}) == SIMILAR_LAYERS[small.name]
    normalizations = layers_of(model, keras.layers.BatchNormalization)
    for layer in found:
        assert layer.predictor.hidden_filters == 3
        normalizations.append(layer.predictor.hidden_normalization)
        normalizations.append(layer.predictor.output_normalization)
    for layer in normalizations:
        assert layer.momentum == 0.7
        assert layer.epsilon == 0.01
        assert layer.synchronized
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    assert len(model.losses) == len(kernels) > 3 * len(found)
    assert np.all(np.isfinite(run(model)))


def test_similarity_options(small):
    start = np.diag([1.0, 0, 0, 0, 1, 0, 0, 0, 1]).astype("float32")

    def first_taps(shape, dtype=None):
        # The authors' start where the kernel is theirs, the identity at 7x7.
        matrix = start if shape == (9, 9) else np.eye(shape[0])
        return ops.convert_to_tensor(matrix, dtype)

    model = small(
        similarity="diagonal",
        similarity_initializer=first_taps,
        similarity_regularizer=keras.regularizers.L1(0.1),
    )
    found = layers_of(model, NeuralSimilarityConv2D)
    assert len(model.losses) == len(found)
    parameters = ops.convert_to_numpy(found[-1].similarity_parameters)
    np.testing.assert_array_equal(parameters, np.diag(start))


def test_one_predictor_for_all(small):
    shared = SharedSimilarityPredictor(3, adapted_filters=2, hidden_filters=3)
    options = {"root_similarity": False} if small.name.startswith("resnet") else {}
    model = small(predictor=shared, **options)
    found = layers_of(model, NeuralSimilarityConv2D)
    assert {id(layer.predictor) for layer in found} == {id(shared)}
    assert np.all(np.isfinite(run(model)))


def test_learned_shapes(small):
    plain, model = small(similarity="diagonal"), small(**STATIC_DNS, learn_shape=True)
    found = layers_of(model, NeuralSimilarityConv2D)
    assert all(layer.learn_shape for layer in found)
    taps = sum(layer.taps for layer in found)
    assert count(model) == count(plain) + taps
    assert np.all(np.isfinite(run(model)))


def test_features(small):
    model = small(classes=None)
    assert run(model).shape == (2, FEATURES[small.name])
    assert not any(layer.name.startswith("classifier") for layer in model.layers)


def test_config_round_trip(small):
    model = small(**STATIC_DNS, name="mine")
    assert model.name == "mine"
    again = keras.Model.from_config(model.get_config())
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(run(again), run(model))


@pytest.mark.parametrize("size", [17, 64])
def test_resnets_take_any_size(size):
    model = backbones.resnet18((None, None, 3), 3, filters=(2, 3, 4, 5))
    images = np.zeros((2, size, size, 3), "float32")
    assert run(model, images).shape == (2, 3)


@pytest.mark.parametrize(
    ("small", "options"),
    [
        *((name, STATIC_UNS) for name in ("cnn4", "cnn9_paper", "resnet50")),
        *((name, DYNAMIC_DNS) for name in ("cnn9", "cnn10", "resnet18")),
    ],
    indirect=["small"],
    ids=str,
)
def test_channels_first_computes_the_same(small, options):
    last = small(**options)
    rng = np.random.default_rng(1)
    weights = [0.3 * np.abs(rng.normal(size=v.shape)) for v in last.variables]
    last.set_weights(weights)
    images = images_for(last)
    keras.config.set_image_data_format("channels_first")
    try:
        first = small(input_shape=(3, *images.shape[1:3]), **options)
        first.set_weights(weights)
        received = run(first, np.moveaxis(images, -1, 1))
    finally:
        keras.config.set_image_data_format("channels_last")
    expected = run(last, images)
    error = np.max(np.abs(received - expected)) / np.max(np.abs(expected))
    assert error < 1e-4


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (backbones.cnn9, {"variant": "x"}, r"`variant` must be one of 'code', 'paper'"),
        (backbones.cnn9, {"input_shape": (7, 32, 3)}, r"`input_shape` must be .*8x8"),
        (backbones.cnn9, {"input_shape": (None, 32, 3)}, r"`input_shape` must be .*None"),
        (backbones.cnn10, {"input_shape": (31, 32, 3)}, r"`input_shape` must .*32x32"),
        (backbones.cnn4, {"input_shape": (15, 32, 3)}, r"`input_shape` must .*16x16"),
        (backbones.cnn4, {"filters": (1, 2)}, r"`filters` must be a positive integer"),
        (backbones.cnn9, {"filters": 3}, r"`filters` must be 3 .*filters=3"),
        (backbones.cnn10, {"filters": (1, 2)}, r"`filters` must be .*3 of them"),
        (backbones.resnet18, {"filters": 3}, r"`filters` must be 4 .*filters=3"),
        (backbones.resnet50, {"filters": (1, 2, 3, 0)}, r"`filters` must be .*4 of them"),
        (backbones.cnn9, {"similarity": "diag"}, r"`similarity` must be one of"),
        (backbones.cnn9, {"predictor": "mlp"}, r"must be .*'sphere'.*'mlp'"),
        (
            backbones.cnn9,
            {"learn_shape": True},
            r"`learn_shape` needs a `similarity` or a `predictor`",
        ),
        (
            backbones.resnet18,
            {"similarity_regularizer": "l1"},
            r"`similarity_regularizer` needs a `similarity`.*'l1'",
        ),
        (
            backbones.cnn10,
            {"similarity_initializer": "zeros"},
            r"`similarity_initializer` needs a `similarity`",
        ),
        (
            backbones.cnn9,
            {"similarity": "diagonal", "predictor_filters": 8},
            r"`predictor_filters` is the width of predictors given by name.*=8",
        ),
        (backbones.cnn9, {"batch_normalization_momentum": 1.0}, r"_momentum` must be"),
        (backbones.cnn9, {"batch_normalization_epsilon": 0.0}, r"_epsilon` must be"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_errors(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
