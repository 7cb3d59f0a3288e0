"""Plain models with neural similarities added, and folded into plain models again."""

import collections
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras import (
    MetaNeighborhoodModel,
    backbones,
    layers,
    predictors,
    rewiring,
    similarities,
)
from nsl_keras.convert import add_film, add_similarity, fold, summary
from nsl_keras.similarity import conversion
from nsl_keras.similarity.comparison import NeuralSimilarity

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
RNG = np.random.default_rng(4)
IMAGES = RNG.normal(size=(4, 8, 9, 3)).astype("float32")


def as_numpy(tensor):
    return np.asarray(ops.convert_to_numpy(tensor)).astype("float32")


def difference(model, other, inputs):
    """Largest difference of the outputs, relative to their largest entry."""
    return deviation(model(inputs), other(inputs))


def deviation(expected, received):
    expected, received = keras.tree.flatten(expected), keras.tree.flatten(received)
    assert len(expected) == len(received)
    worst = 0.0
    for one, two in zip(map(as_numpy, expected), map(as_numpy, received), strict=True):
        assert one.shape == two.shape
        assert np.all(np.isfinite(one)) and np.all(np.isfinite(two))
        assert np.max(np.abs(one)) > 0
        worst = max(worst, np.max(np.abs(one - two)) / np.max(np.abs(one)))
    return worst


def randomize(variables, scale=0.3, seed=6):
    rng = np.random.default_rng(seed)
    for variable in variables:
        noise = scale * rng.normal(size=variable.shape)
        if variable.path.endswith("moving_variance"):
            noise = np.abs(noise)
        variable.assign(as_numpy(variable.value) + noise)


def similarity_layers(model):
    return [each for each in rewiring.layers(model) if isinstance(each, NeuralSimilarity)]


def classes_of(model):
    return {type(layer) for layer in rewiring.layers(model)}


def graph_of(model):
    return [type(op).__name__ for op in model.operations]


def convolutional():
    """A small network of several kinds of convolutions, with random weights."""
    model = stack(
        keras.layers.Conv2D(6, 3, padding="same", strides=2, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.ReLU(),
        keras.layers.DepthwiseConv2D((3, 2), padding="same", name="depthwise"),
        keras.layers.Conv2D(5, 1, activation="relu", name="pointwise"),
        keras.layers.Conv2D(4, 2, use_bias=False, name="second"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, name="classes"),
        name="small",
    )
    randomize(model.weights)
    return model


def stack(*parts, name=None):
    return keras.Sequential([keras.Input((8, 9, 3)), *parts], name=name)


@pytest.fixture(scope="module")
def plain():
    """A model to convert. Nothing may change its weights."""
    return convolutional()


# The published networks.


def set_statistics(model, images):
    """Sets batch norms to the statistics of the images."""
    norms = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    for layer in norms:
        layer.momentum = 0.0
    model(images, training=True)


def operations_of(model):
    """Counts the operations of the traced model, by type."""
    import tensorflow as tf

    spec = tf.TensorSpec((None, *model.input_shape[1:]), tf.float32)
    traced = tf.function(lambda x: model(x, training=False)).get_concrete_function(spec)
    return collections.Counter(op.type for op in traced.graph.get_operations())


def number_to_train(model):
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@pytest.mark.long
@pytest.mark.skipif(not IS_TENSORFLOW, reason="too slow without a graph mode")
@pytest.mark.parametrize(
    ("name", "eligible", "entries"),
    [
        ("ResNet50", 17, 193),
        ("MobileNetV2", 18, 162),
        ("DenseNet121", 59, 571),
        ("EfficientNetB0", 17, 297),
    ],
)
def test_published_networks(name, eligible, entries):
    make = getattr(keras.applications, name)
    source = make(weights=None, include_top=False, input_shape=(32, 32, 3), pooling="avg")
    images = (50 + 20 * RNG.normal(size=(4, 32, 32, 3))).astype("float32")
    set_statistics(source, images)
    model = add_similarity(source)
    assert len(similarity_layers(model)) == eligible
    assert number_to_train(model) == entries
    if name == "ResNet50":
        assert number_to_train(add_similarity(source, "unconstrained")) == 3697
    expected = source(images)
    assert deviation(expected, model(images)) <= 1e-5
    # The check sees a single perturbed M, in the middle of the network.
    perturbed = similarity_layers(model)[eligible // 2].comparison.similarity_parameters
    before = as_numpy(perturbed.value)
    perturbed.assign(before + 0.3 * RNG.normal(size=before.shape))
    assert deviation(expected, model(images)) > 1e-3
    perturbed.assign(before)

    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse", run_eagerly=True)
    model.fit(images, np.zeros(expected.shape), verbose=0)
    trained = model(images)
    assert deviation(expected, trained) > 1e-3
    folded = fold(model)
    assert deviation(trained, folded(images)) <= 1e-5
    assert classes_of(folded) == classes_of(source)
    assert graph_of(folded) == graph_of(source)
    assert [layer.name for layer in folded.layers] == [
        layer.name for layer in source.layers
    ]
    assert operations_of(folded) == operations_of(source)


# At the start.


@pytest.mark.parametrize(
    "similarity", ["diagonal", "unconstrained", "positive_semidefinite", "sparse"]
)
def test_static_models_start_where_the_plain_model_is(similarity, plain):
    model = add_similarity(plain, similarity, learn_shape=True)
    assert converted(model) == ["first", "depthwise", "second"]
    assert difference(plain, model, IMAGES) <= 1e-6
    randomize(model.trainable_variables)
    assert difference(plain, model, IMAGES) > 1e-2
    assert difference(model, fold(model), IMAGES) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "similarity"),
    [("sphere", "diagonal"), ("full_sphere", "unconstrained"), ("cnn", "symmetric")],
)
def test_dynamic_models_start_where_the_plain_model_is(kind, similarity, plain):
    model = add_similarity(plain, similarity, predictor=kind)
    assert len(converted(model)) == 3
    assert difference(plain, model, IMAGES) <= 1e-5
    randomize(model.trainable_variables, scale=0.02)
    assert difference(plain, model, IMAGES) > 1e-3


def test_each_layer_makes_a_network_of_the_recipe(plain):
    recipe = predictors.SimilarityPredictor(width=5)
    model = add_similarity(plain, predictor=recipe)
    made = [layer.comparison.network for layer in similarity_layers(model)]
    assert [each.get_layer("hidden").filters for each in made] == [5, 5, 5]
    half = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, dtype="mixed_bfloat16")]
    )
    network = add_similarity(half, predictor=recipe).layers[-1].comparison.network
    assert network.layers[0].dtype_policy.name == "mixed_bfloat16"


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("predictor", [None, "sphere"])
def test_sequences_and_volumes(rank, predictor):
    convolution = {1: keras.layers.Conv1D, 3: keras.layers.Conv3D}[rank]
    padding = "causal" if rank == 1 else "same"
    plain = keras.Sequential(
        [keras.Input((*[6] * rank, 2)), convolution(3, 3, padding=padding)]
    )
    inputs = RNG.normal(size=(2, *[6] * rank, 2)).astype("float32")
    model = add_similarity(plain, predictor=predictor)
    assert difference(plain, model, inputs) <= 1e-5
    if predictor is None:
        randomize(model.trainable_variables)
        folded = fold(model)
        assert difference(model, folded, inputs) <= 1e-5
        assert classes_of(folded) == {convolution}


def test_the_start_in_half_precision():
    inputs = keras.Input((8, 9, 3), dtype="float32")
    x = keras.layers.Conv2D(4, 3, dtype="mixed_bfloat16", name="half")(inputs)
    source = keras.Model(inputs, keras.layers.Conv2D(4, 3, dtype="float32", name="full")(x))
    model = add_similarity(source, "unconstrained")
    assert model.get_layer("half").dtype_policy.name == "mixed_bfloat16"
    assert model.get_layer("half").comparison.similarity_parameters.dtype == "float32"
    assert model.get_layer("full").dtype_policy.name == "float32"
    assert difference(source, model, IMAGES) == 0
    randomize(model.trainable_variables)
    assert difference(model, fold(model), IMAGES) == 0


def test_arguments_of_the_convolutions_are_kept():
    images = keras.Input((3, 8, 9))
    options = {
        "strides": (1, 2),
        "padding": "same",
        "data_format": "channels_first",
        "activation": "tanh",
        "kernel_regularizer": keras.regularizers.L2(0.1),
        "bias_constraint": "non_neg",
        "name": "convolution",
    }
    plain = keras.Model(images, keras.layers.Conv2D(16, 3, **options)(images))
    layer = add_similarity(plain, freeze_backbone=False).get_layer("convolution")
    config, expected = layer.get_config(), plain.layers[1].get_config()
    assert {name: config[name] for name in expected} == expected


# What is converted.


def converted(model):
    return [layer.name for layer in similarity_layers(model)]


def test_layers_by_name_and_by_predicate(plain):
    assert converted(add_similarity(plain, layers=["second", "pointwise"])) == [
        "pointwise",
        "second",
    ]
    by_predicate = add_similarity(plain, layers=lambda layer: layer.name == "depthwise")
    assert converted(by_predicate) == ["depthwise"]


def test_layers_that_are_left_alone():
    class Own(keras.layers.Conv2D):
        pass

    plain = stack(
        Own(4, 3, name="own"),
        keras.layers.Conv2DTranspose(4, 3, name="transposed"),
        keras.layers.Conv2D(4, 3, name="plain"),
    )
    model = add_similarity(plain)
    assert converted(model) == ["plain"]
    assert type(model.get_layer("own")) is Own
    assert difference(plain, model, IMAGES) == 0
    with pytest.raises(
        ValueError, match=r"`layers` must name.*: 'plain'\. Received: 'own'"
    ):
        add_similarity(plain, layers=["own"])
    with pytest.raises(ValueError, match=r"'nowhere', 'own'"):
        add_similarity(plain, layers=["own", "plain", "nowhere"])


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same", "strides": 2, "depth_multiplier": 2, "activation": "relu"},
        {"dilation_rate": 2, "use_bias": False},
    ],
    ids=["strides", "dilation"],
)
def test_the_depthwise_part_of_separable_convolutions(options):
    plain = stack(
        keras.layers.SeparableConv2D(4, 3, name="separable", **options),
        keras.layers.Conv2D(2, 1, name="separable_depthwise"),
    )
    for weight in plain.weights:
        weight.assign(RNG.normal(size=weight.shape))
    model = add_similarity(plain, "unconstrained")
    assert converted(model) == ["separable_depthwise_1"]
    assert difference(plain, model, IMAGES) <= 1e-6
    assert [weight.shape for weight in model.trainable_variables] == [(9, 9)]
    model.trainable_variables[0].assign_add(RNG.normal(size=(9, 9)))
    assert difference(plain, model, IMAGES) > 1e-2
    folded = fold(model)
    assert [type(layer).__name__ for layer in folded.layers] == [
        "DepthwiseConv2D",
        "Conv2D",
        "Conv2D",
    ]
    assert difference(model, folded, IMAGES) <= 1e-5
    chosen = add_similarity(plain, layers=["separable"], freeze_backbone=False)
    assert len(chosen.trainable_variables) == 1 + len(plain.trainable_variables)


def test_what_is_trained_after_folding():
    plain = stack(
        keras.layers.Conv2D(4, 3, name="with_taps"),
        keras.layers.Conv2D(4, 1, name="without"),
    )
    folded = fold(add_similarity(plain))
    assert [layer.trainable for layer in folded.layers] == [True, False]
    folded.trainable = False
    folded.trainable = True
    assert len(folded.trainable_variables) == 4


def with_neighbors(backbone):
    model = MetaNeighborhoodModel(backbone, layers.CosineDense(3), 5, name="neighbors")
    model.build((None, *IMAGES.shape[1:]))
    model.dictionary.keys.assign(RNG.normal(size=model.dictionary.keys.shape))
    return model


def test_backbones_of_models_with_neighbors(tmp_path):
    model = with_neighbors(
        stack(
            keras.layers.Conv2D(4, 3, name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
        )
    )
    added = add_similarity(model)
    assert type(added) is MetaNeighborhoodModel and added.name == "neighbors"
    assert difference(model, added, IMAGES) == 0
    assert converted(added.backbone) == ["first"]
    # Head, dictionary and rate go on being trained, of the backbone `M` alone.
    assert [v.name for v in added.backbone.trainable_variables] == ["similarity"]
    assert len(added.trainable_variables) == 1 + len(model.neighborhood.trainable_variables)
    unbuilt = MetaNeighborhoodModel(model.backbone, layers.CosineDense(3), 5)
    with pytest.raises(ValueError, match="built"):
        summary(unbuilt)
    told = summary(added)
    assert told.name == "neighbors"
    # Attention, finetuning and cosines of 5 entries, 4 features and 3 classes.
    assert told.multiply_adds == told.layers[0].multiply_adds + 5 * 4 + 5 * 12 + 12
    assert told.parameters == added.count_params()
    added.backbone.get_layer("first").comparison.similarity_parameters.assign(
        RNG.normal(size=9)
    )
    folded = fold(added)
    assert type(folded.backbone.get_layer("first")) is keras.layers.Conv2D
    assert difference(added, folded, IMAGES) <= 1e-5
    folded.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert difference(folded, loaded, IMAGES) <= 1e-6
    with_film = add_film(model)
    assert difference(model, with_film, IMAGES) == 0
    assert any(isinstance(each, layers.InstanceFiLM) for each in with_film.backbone.layers)


def test_backbones_that_are_no_graph():
    model = MetaNeighborhoodModel(None, layers.CosineDense(3), 5)
    for convert in (add_similarity, add_film, fold, summary):
        with pytest.raises(ValueError, match=r"`model` must have a backbone that.*None"):
            convert(model)
    unbuilt = MetaNeighborhoodModel(stack(keras.layers.Flatten()), layers.CosineDense(3))
    with pytest.raises(ValueError, match="`with_backbone` needs a built layer or model"):
        fold(unbuilt)


def test_progress_over_layers(capsys):
    inner = stack(keras.layers.Conv2D(4, 3), keras.layers.Flatten())
    inputs = keras.Input(IMAGES.shape[1:])
    model = keras.Model(inputs, keras.ops.relu(keras.layers.Dense(3)(inner(inputs))))
    add_similarity(model, verbose=1)
    shown = capsys.readouterr().out
    assert "4/4" in shown and shown.endswith("\n")


def test_errors_of_the_layers_come_through(plain):
    """Keras would put a `TypeError` with a whole config around them."""
    for arguments, message in (
        ({"learn_shape": "yes"}, "`learn_shape` must be True or False"),
        ({"shape_threshold": 1.0}, "`shape_threshold` must be"),
        ({"similarity": "sparse", "predictor": "sphere"}, "`similarity` .* takes no pred"),
        (
            {"predictor": "sphere", "similarity_regularizer": "l1"},
            "must be left out with a",
        ),
        ({"similarity_regularizer": "foo"}, "foo"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            add_similarity(plain, layers=["first"], **arguments)
        assert caught.value.__cause__ is None


def test_layers_by_any_collection_of_names(plain):
    expected = converted(add_similarity(plain, layers=["second"]))
    for names in ({"second": 1}.keys(), {"second"}, ("second",)):
        assert converted(add_similarity(plain, layers=names)) == expected


def test_layers_of_other_forms(plain):
    for wrong in ("first", 3, [plain.layers[0]]):
        with pytest.raises(ValueError, match="`layers` must be None, a list of names"):
            add_similarity(plain, layers=wrong)
    with pytest.raises(ValueError, match=r"at least one.*'first', 'depthwise', 'second'"):
        add_similarity(plain, layers=lambda layer: False)
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="must hold a convolution of more than one tap"):
        add_similarity(dense)


def test_grouped_convolutions():
    plain = stack(
        keras.layers.Conv2D(4, 3, name="one_group"),
        keras.layers.Conv2D(4, 3, groups=2, name="two_groups"),
    )
    static = add_similarity(plain, "unconstrained")
    assert converted(static) == ["one_group", "two_groups"]
    assert difference(plain, static, IMAGES) <= 1e-6
    dynamic = add_similarity(plain, predictor="sphere")
    assert converted(dynamic) == ["one_group"]
    with pytest.raises(ValueError, match=r"grouped convolutions take no predictor: 'two_g"):
        add_similarity(plain, predictor="sphere", layers=["two_groups"])


def test_depthwise_convolutions_and_a_full_matrix():
    plain = stack(
        keras.layers.DepthwiseConv2D(3, name="by_channel"),
        keras.layers.SeparableConv2D(4, 3, name="separable"),
        keras.layers.Conv2D(4, 3, name="all_channels"),
    )
    assert converted(add_similarity(plain, "full")) == ["all_channels"]
    message = (
        r"no matrix over channels: 'by_channel', 'separable'\).*Received: 'by_channel'"
    )
    with pytest.raises(ValueError, match=message):
        add_similarity(plain, "full", layers=["by_channel"])


def test_layers_with_low_rank_updates():
    plain = stack(keras.layers.Conv2D(4, 3, name="low_rank"))
    plain.layers[-1].enable_lora(2)
    with pytest.raises(ValueError, match=r"layers without LoRA .*layer 'low_rank'"):
        add_similarity(plain)


def nested():
    """Two inputs, a shared convolution, a nested model called twice, frames."""
    left, right = keras.Input((8, 9, 3), name="left"), keras.Input((8, 9, 3), name="right")
    inner_input = keras.Input((None, None, 4))
    inner = keras.Model(
        inner_input, keras.layers.Conv2D(4, 3, name="inside")(inner_input), name="inner"
    )
    shared = keras.layers.Conv2D(4, 3, padding="same", name="shared")
    one, two = inner(shared(left)), inner(shared(right))
    frames = ops.stack([one, two], axis=1)
    frames = keras.layers.TimeDistributed(
        keras.Sequential(
            [keras.Input((6, 7, 4)), keras.layers.Conv2D(2, 2, name="frame")],
            name="encoder",
        ),
        name="frames",
    )(frames)
    model = keras.Model({"left": left, "right": right}, [one + two, frames])
    randomize(model.weights)
    return model


@pytest.mark.parametrize("predictor", [None, "sphere"])
def test_nested_and_shared_layers(predictor, tmp_path):
    plain = nested()
    inputs = {"left": IMAGES, "right": 2 * IMAGES}
    model = add_similarity(plain, "unconstrained", predictor)
    assert sorted(converted(model)) == ["frame", "inside", "shared"]
    assert difference(plain, model, inputs) <= 1e-5
    assert len(model.operations) == len(plain.operations)
    randomize(model.trainable_variables, scale=0.1)
    assert difference(plain, model, inputs) > 1e-2
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert difference(model, again, inputs) == 0
    if predictor is None:
        folded = fold(again)
        assert difference(model, folded, inputs) <= 1e-5
        assert graph_of(folded) == graph_of(plain)
        assert classes_of(folded) == classes_of(plain)


def test_a_shared_predictor_serves_all_layers(plain):
    shared = predictors.SharedSimilarityPredictor("cnn", adapted_filters=4)
    model = add_similarity(plain, predictor=shared, layers=["first"])
    assert difference(plain, model, IMAGES) <= 1e-5
    with pytest.raises(ValueError, match=r"as many taps as the first, 9;.*'sec"):
        add_similarity(plain, predictor=shared)
    two = stack(keras.layers.Conv2D(4, 3), keras.layers.Conv2D(4, 3))
    model = add_similarity(two, predictor=shared)
    assert model.layers[0].predictor is model.layers[1].predictor is shared


def test_predictors_of_ones_own(plain):
    def predictor(layer):
        return "cnn" if layer.name == "depthwise" else pooled

    pooled = predictors.SimilarityPredictor(pooled=True, start="published")
    with pytest.warns(UserWarning, match="do not start at zero"):
        model = add_similarity(plain, predictor=predictor, layers=["first", "depthwise"])
    assert model.get_layer("first").predictor == pooled
    assert model.get_layer("depthwise").predictor.kind == "cnn"


@keras.saving.register_keras_serializable("tests")
def tanh_at_the_end(parts):
    end = keras.layers.Conv2D(9, 3, padding="same", activation="tanh")
    return [*parts.hidden("input"), end]


class Counting(keras.layers.Conv2D):
    """A predictor with a state, which also changes in inference."""

    def build(self, input_shape):
        super().build(input_shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign(self.calls + 1)
        return super().call(inputs)


def foreign(kernel_initializer, kind=keras.layers.Conv2D):
    options = {"strides": 2, "kernel_initializer": kernel_initializer}
    return lambda layer: kind(9, 3, padding="same", **options)


@pytest.mark.parametrize(
    "predictor",
    [predictors.SimilarityPredictor(tanh_at_the_end), foreign("he_normal", Counting)],
    ids=["kind", "foreign"],
)
def test_predictors_that_end_in_anything_are_warned_about(predictor, plain):
    with pytest.warns(UserWarning, match=r"do not start at zero.*outputs.*change"):
        model = add_similarity(plain, predictor=predictor, layers=["first"])
    for weight in model.get_layer("first").comparison.network.non_trainable_variables:
        assert float(weight) == 0
    assert difference(plain, model, IMAGES) > 1e-3


@pytest.mark.parametrize(
    ("shape", "layer", "predictor"),
    [
        ((8, 9, 3), keras.layers.Conv2D(4, 3, strides=2, padding="same"), foreign("zeros")),
        ((None, None, 3), keras.layers.Conv2D(4, 3, strides=2), "sphere"),
        (
            (None, 9, 3),
            keras.layers.Conv2D(4, (3, 2), dilation_rate=3),
            predictors.SimilarityPredictor(kind="cnn", pooled=True),
        ),
        (
            (3, None, 9),
            keras.layers.Conv2D(4, 3, data_format="channels_first", padding="same"),
            predictors.SharedSimilarityPredictor(),
        ),
        ((None, 3), keras.layers.Conv1D(4, 3, padding="causal"), "full_sphere"),
        ((9, 9, 3), keras.layers.SeparableConv2D(4, 3, dtype="mixed_bfloat16"), "cnn"),
    ],
    ids=["foreign", "unknown", "pooled", "shared", "causal", "separable"],
)
def test_predictors_that_start_at_zero_are_not_warned_about(shape, layer, predictor):
    source = keras.Sequential([keras.Input(shape), layer])
    model = add_similarity(source, predictor=predictor)  # A warning would be an error.
    images = RNG.normal(size=[2, *(size or 11 for size in shape)]).astype("float32")
    assert difference(source, model, images) <= 1e-2


@pytest.mark.parametrize(
    "arguments",
    [
        {"predictor": predictors.SimilarityPredictor(start="published")},
        {"similarity": similarities.Sparse(6)},
    ],
    ids=["start", "nonzeros"],
)
def test_warnings_name_the_line_of_the_caller(arguments, plain):
    with pytest.warns(UserWarning, match="outputs of the model change") as warned:
        add_similarity(plain, layers=["first"], **arguments)
    ours = [each for each in warned if "outputs of the model" in str(each.message)]
    assert [each.filename for each in ours] == [__file__]


def test_predictors_that_this_machine_cannot_run():
    """TensorFlow on a CPU has no channels-first convolution in half precision."""
    options = {"data_format": "channels_first", "dtype": "mixed_float16"}
    layer = keras.layers.Conv1D(4, 3, **options)
    model = add_similarity(keras.Sequential([keras.Input((3, 9)), layer]), predictor="cnn")
    assert model.output_shape == (None, 4, 7)


@pytest.mark.parametrize("wrong", ["tree", 3, keras.layers.Dense(3)])
def test_wrong_predictors(wrong, plain):
    with pytest.raises(ValueError, match="`predictor` must be"):
        add_similarity(plain, predictor=wrong)


def test_costly_predictors_are_named(plain, monkeypatch):
    said = []
    monkeypatch.setattr(conversion.logging, "warning", said.append)
    add_similarity(plain)
    add_similarity(
        keras.Sequential([keras.Input((9, 9, 40)), keras.layers.Conv2D(40, 3)]),
        predictor="sphere",
    )
    assert not said
    model = add_similarity(plain, predictor="sphere", layers=["depthwise"])
    (message,) = said
    assert message == summary(model).costly_predictors
    assert "'depthwise' (" in message


def test_few_nonzeros_are_warned_about(plain):
    similarity = similarities.Sparse(6)
    with pytest.warns(UserWarning, match=r"nonzeros=6.*outputs.*change.*'first'\.$"):
        model = add_similarity(plain, similarity)
    assert difference(plain, model, IMAGES) > 1e-2
    assert (
        difference(plain, add_similarity(plain, similarity, layers=["second"]), IMAGES) == 0
    )


def test_the_source_stays_as_it_is(plain):
    before = plain.get_weights()
    model = add_similarity(plain)
    assert not {id(v) for v in plain.variables} & {id(v) for v in model.variables}
    randomize(model.weights)
    for old, new in zip(before, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert all(layer.trainable for layer in plain.layers)
    assert not similarity_layers(plain)
    folded = fold(model)
    randomize(folded.weights)
    assert difference(folded, model, IMAGES) > 1e-2
    assert not {id(v) for v in folded.variables} & {id(v) for v in model.variables}


# What is trained.


def trainable_names(model):
    return sorted(variable.name for variable in model.trainable_variables)


def test_a_frozen_backbone(tmp_path):
    plain = nested()
    model = add_similarity(plain)
    assert trainable_names(model) == ["similarity"] * 3
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert trainable_names(again) == ["similarity"] * 3
    # Keras on TensorFlow passes over a value that is set already.
    again.trainable = False
    again.trainable = True
    assert len(again.trainable_variables) == len(plain.trainable_variables) + 3


def test_training_changes_the_predictors_alone(plain):
    model = add_similarity(plain, predictor="sphere")
    # One predictor's scale is zero at first: its other weights wait for the first step.
    before = [as_numpy(v.value) for v in model.trainable_variables]
    model.compile(optimizer="adam", loss="mse", run_eagerly=True)
    model.fit(IMAGES, np.zeros((4, 3)), epochs=3, verbose=0)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        new = as_numpy(variable.value)
        assert np.all(np.isfinite(new)) and np.any(new != old), variable.path
    for name in ("norm", "classes", "pointwise"):
        old, new = plain.get_layer(name).get_weights(), model.get_layer(name).get_weights()
        for one, two in zip(old, new, strict=True):
            np.testing.assert_array_equal(one, two)
    first, trained = plain.get_layer("first"), model.get_layer("first")
    np.testing.assert_array_equal(as_numpy(first.kernel), as_numpy(trained.kernel))


def test_a_backbone_that_is_not_frozen():
    plain = convolutional()
    plain.get_layer("first").trainable = False
    model = add_similarity(plain, freeze_backbone=False)
    # The kernel stays frozen; its similarity is there to be trained.
    assert trainable_names(model) == sorted(trainable_names(plain) + ["similarity"] * 3)
    assert not model.get_layer("first").kernel.trainable
    assert model.get_layer("second").kernel.trainable


def test_a_frozen_nested_model():
    images = keras.Input((8, 9, 3))
    base = convolutional()
    base.trainable = False
    plain = keras.Model(images, keras.layers.Dense(2, name="head")(base(images)))
    model = add_similarity(plain, freeze_backbone=False)
    assert trainable_names(model) == ["bias", "kernel"] + ["similarity"] * 3


def test_a_frozen_network_with_layers_that_hold_others():
    images = keras.Input((6, 4))
    x = keras.layers.Conv1D(4, 3, name="convolution")(images)
    attention = keras.layers.MultiHeadAttention(2, 2, name="attention")
    plain = keras.Model(images, attention(x, x))
    plain.trainable = False
    assert trainable_names(add_similarity(plain)) == ["similarity"]
    plain.trainable = True
    folded = fold(add_similarity(plain))
    assert trainable_names(folded) == ["bias", "kernel"]
    # What is trained in a frozen layer is frozen with the backbone too.
    attention.trainable = False
    attention.query_dense.trainable = True
    assert trainable_names(add_similarity(plain)) == ["similarity"]


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Conv2D(4, 3, activation=keras.layers.PReLU(shared_axes=[1, 2])),
        keras.layers.SeparableConv2D(
            4, 3, activation=keras.layers.PReLU(shared_axes=[1, 2])
        ),
    ],
    ids=["plain", "separable"],
)
def test_activations_with_weights(layer, tmp_path):
    plain = stack(type(layer).from_config(layer.get_config()))
    assert difference(plain, add_similarity(plain), IMAGES) <= 1e-6  # Not built yet.
    randomize(plain.weights)
    assert plain.weights[-1].name == "alpha"
    model = add_similarity(plain)
    assert difference(plain, model, IMAGES) <= 1e-6
    assert trainable_names(model) == ["similarity"]
    folded = fold(model)
    assert difference(plain, folded, IMAGES) <= 1e-6
    in_one_layer = isinstance(layer, keras.layers.Conv2D)
    assert ("alpha" in trainable_names(folded)) == in_one_layer
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert difference(model, loaded, IMAGES) <= 1e-6
    assert trainable_names(loaded) == ["similarity"]
    trained = add_similarity(plain, freeze_backbone=False)
    assert "alpha" in trainable_names(trained)
    # Copies: training one leaves the other.
    for weight in plain.weights:
        weight.assign(np.zeros(weight.shape))
    assert difference(model, folded, IMAGES) <= 1e-6


def test_activations_with_weights_in_cells():
    cell = layers.NeuralSimilaritySimpleRNNCell(4, activation=keras.layers.PReLU())
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.RNN(cell)])
    sequences = RNG.normal(size=(2, 5, 3)).astype("float32")
    model(sequences)
    cell.activation.alpha.assign(np.full(4, 0.5))
    plain = keras.layers.RNN(cell.fold())
    np.testing.assert_allclose(plain(sequences), model(sequences), atol=1e-6)


def test_activations_with_weights_after_a_shift():
    activation = keras.layers.PReLU(shared_axes=[1, 2])
    model = stack(
        layers.NeuralSimilarityConv2D(
            4, 3, similarity=similarities.Sparse(1), activation=activation
        )
    )
    model(IMAGES)
    randomize(model.weights)
    folded = fold(model)
    assert folded.layers[-1].kernel_size == (1, 1)
    assert difference(model, folded, IMAGES) <= 1e-6


def test_the_kernel_is_frozen_and_freed_with_its_activation():
    layer = layers.NeuralSimilarityConv2D(
        4, 3, activation=keras.layers.PReLU(), kernel_trainable=False
    )
    layer(IMAGES)
    assert [each.name for each in layer.trainable_variables] == ["similarity"]
    layer.kernel_trainable = True
    names = sorted(each.name for each in layer.trainable_variables)
    assert names == ["alpha", "bias", "kernel", "similarity"]


def test_regularizers_reach_the_similarities(plain):
    model = add_similarity(
        plain,
        similarity_regularizer=keras.regularizers.L1(0.5),
        similarity_constraint="non_neg",
    )
    assert sum(float(loss) for loss in model.losses) == pytest.approx(0.5 * (9 + 6 + 4))


# Models that cannot be converted.


class Block(keras.Model):
    def __init__(self, layer):
        super().__init__(name="block")
        self.inside = [layer]

    def call(self, inputs):
        return self.inside[0](inputs)

    def get_config(self):
        return {"layer": keras.saving.serialize_keras_object(self.inside[0])}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["layer"]))


def test_subclassed_models():
    block = Block(keras.layers.Conv2D(3, 3, name="hidden"))
    block(IMAGES)
    for function in (add_similarity, fold):
        with pytest.raises(ValueError, match="functional or Sequential"):
            function(block)
    model = stack(keras.layers.Conv2D(3, 3), block)
    with pytest.raises(
        ValueError, match=r"subclassed model 'block'.*'Block', with 'hidden'"
    ):
        add_similarity(model)
    dense = Block(keras.layers.Dense(3))
    model = stack(keras.layers.Conv2D(3, 3), dense)
    assert difference(model, add_similarity(model), IMAGES) == 0


def test_models_with_similarities_already(plain):
    model = add_similarity(plain)
    with pytest.raises(
        ValueError, match=r"no neural similarities yet.*'first', 'depthwise'"
    ):
        add_similarity(model)
    assert len(similarity_layers(add_similarity(fold(model)))) == 3


def test_unbuilt_models():
    with pytest.raises(ValueError, match="must be built"):
        add_similarity(keras.Sequential([keras.layers.Conv2D(3, 3)]))


# Folding.


@pytest.mark.long
def test_fold_keeps_names_and_needs_keras_alone(tmp_path, plain):
    model = add_similarity(plain, "unconstrained")
    randomize(model.trainable_variables)
    folded = fold(model)
    assert folded.name == "small"
    assert [layer.name for layer in folded.layers] == [layer.name for layer in model.layers]
    folded.save(tmp_path / "folded.keras")
    np.savez(tmp_path / "numbers.npz", images=IMAGES, outputs=as_numpy(model(IMAGES)))
    program = (
        "import sys, keras, numpy as np\n"
        "model = keras.saving.load_model('folded.keras')\n"
        "numbers = np.load('numbers.npz')\n"
        "outputs = np.asarray(model(numbers['images']))\n"
        "assert np.allclose(outputs, numbers['outputs'], atol=1e-5)\n"
        "assert 'nsl_keras' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)


def test_fold_of_a_plain_model_is_a_copy(plain):
    assert difference(plain, fold(plain), IMAGES) == 0


def test_fold_of_dense_and_dynamic_layers():
    model = stack(
        layers.NeuralSimilarityConv2D(4, 3, name="static"),
        layers.NeuralSimilarityDense(6, similarity="unconstrained", name="dense"),
        layers.NeuralSimilarityConv2D(4, 3, predictor="sphere", name="dynamic"),
        layers.NeuralSimilarityDense(6, predictor="sphere", name="dynamic_dense"),
    )
    with pytest.raises(
        ValueError, match=r"static.*Received: 'dynamic', 'dynamic_dense' with a predictor"
    ):
        fold(model)
    static = stack(*model.layers[:2])
    randomize(static.weights)
    folded = fold(static)
    assert classes_of(folded) == {keras.layers.Conv2D, keras.layers.Dense}
    assert difference(static, folded, IMAGES) <= 1e-5


def test_fold_of_other_layers_of_the_package():
    class Own(layers.NeuralSimilarityConv2D):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs, training=training)

    model = stack(
        layers.NeuralSimilarityConv2D(4, 3),
        layers.SphereConv2D(4, 3, name="sphere"),
        Own(4, 3, name="own"),
        Block(layers.CosineDense(3)),
        layers.SphereDense(2, name="classes"),
    )
    expected = (
        r"those with a static similarity.*Received: 'sphere' \(SphereConv2D\), "
        r"'own' \(Own\), 'block' \(Block\), 'classes' \(SphereDense\)$"
    )
    with pytest.raises(ValueError, match=expected):
        fold(model)


def test_fold_of_batch_norms():
    model = stack(
        layers.NeuralSimilarityConv2D(4, 3, similarity="unconstrained"),
        layers.BatchNormalization(name="norm"),
        keras.layers.ReLU(),
    )
    randomize(model.trainable_variables)
    model(IMAGES, training=True)
    folded = fold(model)
    assert type(folded.get_layer("norm")) is keras.layers.BatchNormalization
    assert difference(model, folded, IMAGES) <= 1e-5
    backbone = backbones.convnet4((8, 9, 3), 4)
    assert not any(
        "nsl_keras" in each.__module__ for each in map(type, fold(backbone).layers)
    )


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_fold_of_cosine_classifiers(dtype):
    keras.config.set_dtype_policy(dtype)
    model = stack(
        layers.NeuralSimilarityConv2D(4, 3, similarity="unconstrained"),
        layers.CosineDense(5, name="everywhere"),
        keras.layers.GlobalAveragePooling2D(),
        layers.CosineDense(3, scale=7.0, name="classes"),
    )
    randomize(model.weights)
    folded = fold(model)
    assert [layer.name for layer in folded.layers] == [layer.name for layer in model.layers]
    assert not any(each.__module__.startswith("nsl_keras") for each in classes_of(folded))
    images = np.concatenate([IMAGES, np.zeros_like(IMAGES[:1])])
    assert model(images).dtype == folded(images).dtype
    assert difference(model, folded, images) <= (1e-5 if dtype == "float32" else 0.02)
    # A copy: training one leaves the other.
    before = as_numpy(folded(images))
    model.get_layer("classes").learned_scale.assign(1.0)
    np.testing.assert_array_equal(as_numpy(folded(images)), before)
    with pytest.raises(ValueError, match="`fold` needs a built layer"):
        layers.CosineDense(3).fold()


def test_fold_of_cosine_classifiers_on_several_shapes():
    layer = layers.CosineDense(3, activity_regularizer="l2", name="shared")
    short, long = keras.Input((5, 4)), keras.Input((7, 4))
    model = keras.Model([short, long], [layer(short), layer(long)])
    inputs = [RNG.normal(size=(2, n, 4)).astype("float32") for n in (5, 7)]
    folded = fold(model)
    assert difference(model, folded, inputs) <= 1e-6
    assert len(folded.losses) == len(model.losses) == 2
    vectors = keras.Input((4,))
    model = keras.Model([short, vectors], [layer(short), layer(vectors)])
    with pytest.raises(ValueError, match=r"inputs of one rank.*'shared'.*ranks \[2, 3\]"):
        fold(model)


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("nonzeros", [1, None])
def test_fold_of_convolutions_of_integers(depthwise, nonzeros):
    similarity = similarities.Sparse(nonzeros)
    layer = (
        layers.NeuralSimilarityDepthwiseConv2D(3, similarity=similarity, name="first")
        if depthwise
        else layers.NeuralSimilarityConv2D(4, 3, similarity=similarity, name="first")
    )
    model = keras.Sequential([keras.Input((8, 9, 3), dtype="uint8"), layer])
    images = RNG.integers(0, 256, (2, 8, 9, 3)).astype("uint8")
    folded = fold(model)
    assert folded.layers[0].name == "first_cast"
    assert difference(model, folded, images) <= 1e-6


def test_fold_of_a_side_without_similarities():
    two_ways = keras.layers.Bidirectional(
        keras.layers.RNN(layers.NeuralSimilarityGRUCell(6)),
        backward_layer=keras.layers.GRU(6, go_backwards=True),
    )
    model = keras.Sequential([keras.Input((3, 4)), two_ways])
    randomize(model.weights)
    folded = fold(model)
    assert type(folded.layers[0].backward_layer) is keras.layers.GRU
    sequences = RNG.normal(size=(2, 3, 4)).astype("float32")
    assert difference(model, folded, sequences) <= 1e-5


def test_fold_of_recurrent_cells(tmp_path):
    two_ways = keras.layers.Bidirectional(
        keras.layers.RNN(
            layers.NeuralSimilarityGRUCell(3, similarity="unconstrained"),
            return_sequences=True,
        ),
        merge_mode="sum",
        name="both",
    )
    stack = [
        layers.NeuralSimilaritySimpleRNNCell(4),
        keras.layers.GRUCell(4),
        layers.NeuralSimilarityLSTMCell(5, similarity="symmetric"),
    ]
    model = keras.Sequential(
        [keras.Input((3, 4)), two_ways, keras.layers.RNN(stack, name="stacked")]
    )
    randomize(model.weights)
    sequences = RNG.normal(size=(2, 3, 4)).astype("float32")
    folded = fold(model)
    assert difference(model, folded, sequences) <= 1e-5
    assert [layer.name for layer in folded.layers] == ["both", "stacked"]
    parts = [each for layer in folded.layers for each in rewiring.sublayers(layer)]
    assert len(parts) >= 8
    assert not any(type(each).__module__.startswith("nsl_keras") for each in parts)
    folded.save(tmp_path / "folded.keras")
    again = keras.saving.load_model(tmp_path / "folded.keras")
    assert difference(folded, again, sequences) == 0
    cell = layers.NeuralSimilarityGRUCell(3, predictor="sphere")
    dynamic = keras.Sequential(
        [keras.Input((3, 4)), keras.layers.RNN(cell, name="dynamic")]
    )
    with pytest.raises(ValueError, match="'dynamic' with a predictor"):
        fold(dynamic)


# One non-zero entry: a shift and one tap.

SHIFTS = [
    {"padding": "valid"},
    {"padding": "valid", "strides": 2},
    {"padding": "valid", "dilation_rate": 2},
    {"padding": "same"},
    {"padding": "same", "strides": 2},
    {"padding": "same", "strides": 3},
    {"padding": "same", "dilation_rate": 3},
]
LAYERS = {
    1: layers.NeuralSimilarityConv1D,
    2: layers.NeuralSimilarityConv2D,
    3: layers.NeuralSimilarityConv3D,
}


def shift_model(rank, kernel_size, sizes, tap, layer=None, **options):
    """One layer whose M has one entry, that reads the input under `tap`."""
    layer = layer or LAYERS[rank](
        4, kernel_size[:rank], similarity=similarities.Sparse(1), name="shifted", **options
    )
    inputs = keras.Input((*sizes, 2))
    model = keras.Model(inputs, layer(inputs))
    randomize(model.weights)
    taps = int(np.prod(layer.kernel_size))
    parameters = np.zeros((taps, taps))
    parameters[taps // 2, np.ravel_multi_index(tap[:rank], layer.kernel_size)] = 1.5
    layer.comparison.similarity_parameters.assign(parameters)
    return model


@pytest.mark.parametrize(
    ("rank", "kernel_size", "options"),
    [
        *((2, (4, 3), options) for options in SHIFTS),
        *((rank, (4, 2, 3), options) for rank in (1, 3) for options in SHIFTS[2::2]),
    ],
    ids=str,
)
def test_shifts_of_known_sizes(rank, kernel_size, options):
    inputs = RNG.normal(size=(2, 9, 8, 7, 2)[: rank + 1] + (2,)).astype("float32")
    for tap in ((0,) * rank, tuple(size - 1 for size in kernel_size)):
        model = shift_model(rank, kernel_size, inputs.shape[1:-1], tap, **options)
        folded = fold(model)
        assert folded.get_layer("shifted").kernel_size == (1,) * rank
        assert difference(model, folded, inputs) <= 1e-6


@pytest.mark.parametrize("options", SHIFTS, ids=str)
def test_shifts_of_unknown_sizes(options):
    for tap in ((0, 2), (3, 0)):
        model = shift_model(2, (4, 3), (None, None), tap, **options)
        folded = fold(model)
        exact = not ("strides" in options and options["padding"] == "same")
        assert (folded.get_layer("shifted").kernel_size == (1, 1)) == exact
        for sizes in ((12, 13), (13, 11), (10, 10)):
            inputs = RNG.normal(size=(2, *sizes, 2)).astype("float32")
            assert difference(model, folded, inputs) <= 1e-6


@pytest.mark.parametrize("strides", [1, 2])
def test_causal_shifts(strides):
    inputs = RNG.normal(size=(2, 9, 2)).astype("float32")
    for tap in ((0,), (2,)):
        model = shift_model(1, (3,), (None,), tap, padding="causal", strides=strides)
        folded = fold(model)
        assert folded.get_layer("shifted").kernel_size == (1,)
        assert difference(model, folded, inputs) <= 1e-6


def test_small_images_are_shifted_out_of_sight():
    inputs = RNG.normal(size=(2, 2, 2, 2)).astype("float32")
    options = {"padding": "same", "dilation_rate": 3, "bias_initializer": "ones"}
    model = shift_model(2, (3, 3), (None, None), (2, 0), **options)
    assert difference(model, fold(model), inputs) <= 1e-6


def test_names_of_shifts_are_unused_ones():
    shifted = shift_model(2, (3, 3), (8, 9), (0, 0), padding="same")
    outputs = keras.layers.ReLU(name="shifted_padding")(shifted.outputs[0])
    model = keras.Model(shifted.inputs, outputs)
    names = [layer.name for layer in fold(model).layers]
    assert "shifted_padding_1" in names
    assert len(set(names)) == len(names)


def test_a_centre_tap_is_nothing_but_a_one_tap_convolution():
    model = shift_model(2, (3, 3), (8, 8), (1, 1), padding="same")
    folded = fold(model)
    assert graph_of(folded) == ["InputLayer", "Conv2D"]
    assert folded.count_params() == 4 * 2 + 4
    corner = fold(shift_model(2, (3, 3), (8, 8), (0, 2), padding="same"))
    assert graph_of(corner) == ["InputLayer", "ZeroPadding2D", "Cropping2D", "Conv2D"]


def test_shifts_of_depthwise_and_grouped_convolutions():
    inputs = RNG.normal(size=(2, 8, 8, 2)).astype("float32")
    for layer in (
        layers.NeuralSimilarityDepthwiseConv2D(
            3,
            strides=2,
            padding="same",
            depth_multiplier=2,
            similarity=similarities.Sparse(1),
            name="shifted",
        ),
        layers.NeuralSimilarityConv2D(
            4,
            3,
            groups=2,
            similarity=similarities.Sparse(1),
            learn_shape=True,
            name="shifted",
        ),
    ):
        model = shift_model(2, (3, 3), (8, 8), (0, 1), layer=layer)
        folded = fold(model)
        assert type(folded.get_layer("shifted")) is layer.plain
        assert folded.get_layer("shifted").kernel_size == (1, 1)
        assert difference(model, folded, inputs) <= 1e-6


@pytest.mark.skipif(IS_TENSORFLOW, reason="TensorFlow on a CPU has no channels-first 1D")
def test_channels_first_sequences_that_would_be_cropped_stay_convolutions():
    layer = layers.NeuralSimilarityConv1D(
        4, 3, similarity=similarities.Sparse(1), data_format="channels_first", name="c"
    )
    inputs = keras.Input((2, 9))
    model = keras.Model(inputs, layer(inputs))
    folded = fold(model)
    assert folded.get_layer("c").kernel_size == (3,)


def test_a_shared_layer_on_two_sizes_stays_a_convolution():
    layer = layers.NeuralSimilarityConv2D(
        4, 3, strides=2, padding="same", similarity=similarities.Sparse(1), name="shared"
    )
    small, large = keras.Input((8, 8, 2)), keras.Input((9, 9, 2))
    model = keras.Model([small, large], [layer(small), layer(large)])
    randomize(model.weights)
    inputs = [RNG.normal(size=(2, n, n, 2)).astype("float32") for n in (8, 9)]
    folded = fold(model)
    assert folded.get_layer("shared").kernel_size == (3, 3)
    assert difference(model, folded, inputs) <= 1e-6


def test_shifts_inside_nested_models():
    image = keras.Input((8, 8, 2))
    layer = layers.NeuralSimilarityConv2D(
        4, 3, similarity=similarities.Sparse(1), name="inside"
    )
    nested_model = keras.Sequential([keras.Input((8, 8, 2)), layer], name="nested")
    frames = keras.Input((3, 8, 8, 2))
    model = keras.Model(
        [image, frames],
        [nested_model(image), keras.layers.TimeDistributed(layer, name="each")(frames)],
    )
    randomize(model.weights)
    folded = fold(model)
    inputs = [
        RNG.normal(size=shape).astype("float32")
        for shape in ((2, 8, 8, 2), (2, 3, 8, 8, 2))
    ]
    assert folded.get_layer("nested").layers[-1].kernel_size == (1, 1)
    assert difference(model, folded, inputs) <= 1e-6


def test_shifts_inside_nested_models_of_unknown_sizes():
    """The nested model may be taken out and called on images of another size."""
    layer = layers.NeuralSimilarityConv2D(
        4, 3, strides=2, padding="same", similarity=similarities.Sparse(1), name="inside"
    )
    nested_model = keras.Sequential([keras.Input((None, None, 2)), layer], name="nested")
    image = keras.Input((8, 8, 2))
    model = keras.Model(image, nested_model(image))
    randomize(model.weights)
    inside = fold(model).get_layer("nested")
    for size in (8, 9):
        images = RNG.normal(size=(2, size, size, 2)).astype("float32")
        assert difference(nested_model, inside, images) <= 1e-6
