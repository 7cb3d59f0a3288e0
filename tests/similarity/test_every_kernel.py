"""`M` at any depth of any model: outputs, what trains, folds, task files."""

import helpers
import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_close, normal, randomize, refused, values

from nsl_keras import convert, layers, predictors, similarities

IDS = np.random.default_rng(0).integers(0, 30, size=(2, 7)).astype("int32")
TOKENS = {"token_ids": IDS, "padding_mask": np.ones((2, 7), "int32")}
SIZES = {"vocabulary_size": 30, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 16}


def bert():
    hub = pytest.importorskip("keras_hub")
    backbone = hub.models.BertBackbone(**SIZES, num_heads=2, max_sequence_length=10)
    model = hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None)
    return model, {**TOKENS, "segment_ids": np.zeros((2, 7), "int32")}


def gpt2():
    hub = pytest.importorskip("keras_hub")
    return hub.models.GPT2Backbone(**SIZES, num_heads=2, max_sequence_length=10), TOKENS


def gemma():
    hub = pytest.importorskip("keras_hub")
    heads = {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return hub.models.GemmaBackbone(**SIZES, **heads), TOKENS


def vit():
    hub = pytest.importorskip("keras_hub")
    sizes = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 8}
    model = hub.models.ViTBackbone(image_shape=(16, 16, 3), mlp_dim=16, **sizes)
    return model, normal(2, 16, 16, 3)


@keras.saving.register_keras_serializable("tests")
class Blocks(keras.Model):
    """A subclassed model with layers in a list, and a weight of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(8, "relu")
        self.blocks = [keras.layers.Dense(8) for _ in range(2)]
        self.dropout = keras.layers.Dropout(0.2)
        self.classifier = keras.layers.Dense(3)
        self.shift = self.add_weight(name="shift", shape=(8,))

    def call(self, inputs, training=None):
        outputs = self.first(inputs) + self.shift
        for block in self.blocks:
            outputs = outputs + block(outputs)
        return self.classifier(self.dropout(outputs, training=training))


def blocks():
    model, inputs = Blocks(), normal(2, 8)
    model(inputs)
    return model, inputs


def attention():
    inputs = keras.Input((6, 8))
    outputs = keras.layers.MultiHeadAttention(2, 4, dropout=0.1, name="attention")(
        inputs, inputs
    )
    outputs = keras.layers.Dense(3, name="classifier")(outputs)
    return keras.Model(inputs, outputs), normal(2, 6, 8)


#: On JAX, which takes longer to compile each operation, without KerasHub's.
SMALL = [pytest.param(each, marks=pytest.mark.jax) for each in (blocks, attention)]
MODELS = [bert, gpt2, gemma, vit, *SMALL]


def outputs_of(model, inputs):
    outputs = model(inputs)
    if isinstance(outputs, dict):
        outputs = outputs[max(outputs)]
    return as_numpy(outputs)


def forms(model):
    kinds = layers.NeuralSimilarityDense, layers.NeuralSimilarityEinsumDense
    parts = model._flatten_layers()
    return [part.bilinear_form for part in parts if isinstance(part, kinds)]


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS)
def test_a_model_with_layers_in_layers(make, tmp_path):
    model, inputs = make()
    plain = outputs_of(model, inputs)
    new, fresh = (
        convert.add_similarity(model, "orthogonal", block_size=4) for _ in range(2)
    )
    assert not forms(model) and len(forms(new)) >= 2
    assert_close(outputs_of(new, inputs), plain)
    assert {each.name for each in new.trainable_variables} == {"similarity"}
    with refused(r"`convert\.fold` .* or call `convert\.save_task`"):
        new.save(tmp_path / "model.keras")
    randomize(new.trainable_variables)
    trained = outputs_of(new, inputs)
    assert np.abs(trained - plain).max() > 1e-4
    convert.save_task(new, tmp_path / "task")
    assert_close(outputs_of(fresh, inputs), plain)
    convert.load_task(fresh, tmp_path / "task")
    assert_close(outputs_of(fresh, inputs), trained, 1e-6)
    folded = convert.fold(new)
    assert not forms(folded) and forms(new)
    assert_close(outputs_of(folded, inputs), trained)
    new.predict(inputs, verbose=0)
    assert convert.fold(new, inplace=True) is new and not forms(new)
    assert_close(outputs_of(new, inputs), trained)


@pytest.mark.jax
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("make", "inplace"), [(blocks, False), (attention, True)])
def test_training_moves_the_similarities_alone(make, inplace, tmp_path):
    model, inputs = make()
    targets = np.ones(model(inputs).shape)
    plain = model.predict(inputs, verbose=0)
    new = convert.add_similarity(model, inplace=inplace)
    assert (new is model) is inplace
    assert_close(new.predict(inputs, verbose=0), plain)
    fixed, seeds = values(new.non_trainable_weights), values(new.non_trainable_variables)
    new.compile(keras.optimizers.Adam(0.1), "mse")
    new.fit(inputs, targets, epochs=2, verbose=0)
    for one, other in zip(values(new.non_trainable_weights), fixed, strict=True):
        np.testing.assert_array_equal(one, other)
    after = values(new.non_trainable_variables)
    assert any(np.any(one != other) for one, other in zip(after, seeds, strict=True))
    trained = new.predict(inputs, verbose=0)
    assert np.abs(trained - plain).max() > 0.01
    new.save_weights(tmp_path / "model.weights.h5")
    folded = convert.fold(new, inplace=inplace)
    assert_close(folded.predict(inputs, verbose=0), trained)
    folded.save(tmp_path / "folded.keras")
    loaded = keras.saving.load_model(tmp_path / "folded.keras", compile=False)
    assert_close(loaded(inputs), trained)


APPLICATIONS = {
    "EfficientNetV2B0": {"layers": "project_conv$|expand_conv$"},
    "ConvNeXtTiny": {},
}


@pytest.mark.long
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications(name):
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(32, 32, 3), include_top=False, pooling="avg"
    )
    randomize(model, 0.1)  # A scale of ConvNeXt is near zero.
    inputs = normal(1, 32, 32, 3)
    plain, kinds = outputs_of(model, inputs), [type(each) for each in model.layers]
    options = {"block_size": 4, **APPLICATIONS[name]}
    new = convert.add_similarity(model, "orthogonal", inplace=True, **options)
    assert len(new.trainable_variables) > 30
    assert_close(outputs_of(new, inputs), plain)
    randomize(new.trainable_variables, 0.1)
    trained = outputs_of(new, inputs)
    assert np.abs(trained - plain).max() > 1e-4
    assert_close(outputs_of(convert.fold(new, inplace=True), inputs), trained)
    assert [type(each) for each in model.layers] == kinds


def test_layers_by_path_name_pattern_and_function():
    model, _ = attention()
    query = "attention/query"
    for chosen in (
        [query],
        ["query"],
        "attention.*query$",
        lambda each: each.path == query,
    ):
        new = convert.add_similarity(model, layers=chosen)
        assert [each.path for each in forms(new)] == [f"{query}/bilinear_form"]
    assert len(forms(convert.add_similarity(model))) == 4  # All but the last.


def test_unfreeze_reaches_every_layer():
    model, _ = attention()
    nested = keras.Sequential([keras.Input((6, 8)), convert.add_similarity(model)])
    nested.trainable = True  # Does nothing: the flag stands already.
    assert len(nested.trainable_variables) == 4
    convert.unfreeze(nested)
    assert len(nested.trainable_variables) == len(model.variables) - 1 + 4


def test_a_shared_predictor_is_refused_inside_layers():
    model, _ = blocks()
    predictor = keras.layers.Dense(8)
    with pytest.raises(ValueError, match="`predictor` must be None or a recipe"):
        convert.add_similarity(model, predictor=predictor, layers=lambda _: True)


def ends_in_a_model():
    """The classifier is not the last layer."""
    model, _ = attention()
    return keras.Sequential([keras.Input((6, 8)), model, keras.layers.Dropout(0.1)])


def ends_in_a_wrapper():
    inputs = keras.Input((4, 4))
    wrapper = keras.layers.TimeDistributed(keras.layers.Dense(3, name="classifier"))
    return keras.Model(inputs, wrapper(keras.layers.Dense(4, name="query")(inputs)))


@pytest.mark.parametrize(
    ("make", "chosen"),
    [
        (ends_in_a_model, None),
        (ends_in_a_model, ["query", "classifier"]),
        (ends_in_a_wrapper, ["query"]),
    ],
)
def test_the_classifier_stays_trainable_in_one_word(make, chosen):
    model = make()
    new = convert.add_similarity(model, layers=chosen, train_classifier=True)
    names = {each.name for each in new.trainable_variables}
    paths = [each.path for each in new.trainable_variables if each.name != "similarity"]
    assert names == {"similarity", "kernel", "bias"}
    assert [path.split("/")[-2] for path in paths] == ["classifier"] * 2


def test_the_classifier_of_a_model_without_a_known_end():
    own, _ = blocks()
    with refused("`model` must be functional or .*its classifier"):
        convert.add_similarity(own, train_classifier=True, inplace=True)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (5, {"predictor": predictors.SharedSimilarityPredictor("cnn")}, "same kernel size"),
        (1, {"similarity": similarities.Sparse(1), "block_size": 3}, "divisor of the 4"),
    ],
)
def test_an_error_leaves_the_model_as_it_was(size, options, message):
    keras.config.set_dtype_policy("mixed_bfloat16")
    parts = [keras.layers.Conv2D(4, 3), keras.layers.Conv2D(4, size)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *parts])
    parts[0].bias.trainable = False
    images = normal(2, 8, 8, 3)

    def state():
        attributes = [(type(each), {*vars(each)}) for each in model._flatten_layers()]
        return attributes, [each.trainable for each in model.variables]

    outputs, before = as_numpy(model(images)), state()
    with pytest.raises(ValueError, match=message):
        convert.add_similarity(model, layers=lambda _: True, inplace=True, **options)
    assert state() == before
    np.testing.assert_array_equal(as_numpy(model(images)), outputs)


def test_models_inside_forget_their_functions():
    inner, inputs = attention()
    outer = keras.Sequential([keras.Input((6, 8)), inner, keras.layers.Dense(2)])
    convert.add_similarity(outer, inplace=True)
    randomize(outer.trainable_variables)
    trained = inner.predict(inputs, verbose=0)
    convert.fold(outer, inplace=True)
    assert_close(inner.predict(inputs, verbose=0), trained)


@pytest.mark.long
@pytest.mark.skipif(not helpers.IS_TENSORFLOW, reason="Keras needs TensorFlow")
@pytest.mark.filterwarnings("ignore")  # Of tf2onnx.
def test_a_folded_transformer_runs_in_other_engines(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, inputs = attention()
    convert.add_similarity(model, "orthogonal", block_size=4, inplace=True)
    randomize(model.trainable_variables)
    expected = as_numpy(model(inputs))
    convert.fold(model, inplace=True)
    model.export(tmp_path / "model.tflite", format="litert", verbose=False)
    assert_close(helpers.run_litert(tmp_path / "model.tflite", inputs), expected)
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (received,) = session.run(None, {session.get_inputs()[0].name: inputs})
    assert_close(received, expected)


def test_a_frozen_layer_with_a_shared_predictor_is_copied():
    images = normal(2, 8, 8, 3)
    shared = predictors.SharedSimilarityPredictor("cnn", adapted_filters=4)
    parts = [layers.NeuralSimilarityConv2D(4, 3, predictor=shared) for _ in range(2)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *parts])
    parts[0].trainable = False
    randomize(model)
    copy = convert.add_similarity(
        keras.Sequential([model, keras.layers.Conv2D(2, 3)]), freeze_backbone=False
    )
    assert copy.layers[0].layers[0].trainable is False
    assert_close(copy.layers[0](images), model(images))


def test_unfreeze_leaves_what_lora_froze():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    convert.add_similarity(model, layers=lambda _: True, inplace=True)
    model.add(keras.layers.Dense(3))
    for layer in model.layers:
        layer.enable_lora(1)
    model.trainable = False
    convert.unfreeze(model)
    frozen = [each.path for each in model.variables if not each.trainable]
    assert [path.rpartition("/")[2] for path in frozen] == ["kernel", "kernel"]


@pytest.mark.filterwarnings("ignore:`build..` was called on layer 'blocks'")
def test_windows_that_do_not_overlap_are_left_to_dense_layers():
    """As the patches of a vision transformer; `layers` may name what contains layers."""
    inputs = keras.Input((8, 8, 3))
    patches = keras.layers.Conv2D(4, 4, 4, name="patches")(inputs)
    tokens = keras.layers.Reshape((4, 4))(patches)
    tokens = keras.layers.MultiHeadAttention(2, 2, name="attention")(tokens, tokens)
    model = keras.Model(inputs, keras.layers.Dense(3)(tokens))
    for options in ({}, {"layers": ["attention"]}):
        new = convert.add_similarity(model, inplace=True, **options)
        assert len(forms(new)) == len(new.trainable_variables) == 4
        convert.fold(model, inplace=True)
    assert convert.add_similarity(keras.Model(inputs, patches)).trainable_variables
    model = Blocks()
    model.unused = keras.layers.Conv2D(2, 3)  # Never built.
    model(normal(2, 8))
    convert.add_similarity(model, inplace=True)
    assert type(model.unused) is keras.layers.Conv2D
