"""Neural similarities in plain models: the same outputs before training."""

import functools

import keras
import pytest
from helpers import normal, randomize, reloaded
from keras import ops
from layer_harness import (
    IMAGES,
    check_conversion,
    converted,
    difference,
    stack,
    trainable_names,
)

from nsl_keras import MetaNeighborhoodModel, layers, predictors, similarities
from nsl_keras.convert import add_film, add_similarity, convert_batch_norms, fold, summary


def convolutional():
    """A small network of several kinds of convolutions."""
    return stack(
        keras.layers.Conv2D(6, 3, padding="same", strides=2, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.ReLU(),
        keras.layers.DepthwiseConv2D((3, 2), padding="same", name="depthwise"),
        keras.layers.Conv2D(5, 1, activation="relu", name="pointwise"),
        keras.layers.Conv2D(4, 2, use_bias=False, name="second"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, name="classes"),
    )


@pytest.fixture(scope="module")
def plain():
    """A model to convert. Nothing may change its weights."""
    return convolutional()


ALL = ["first", "depthwise", "second"]
UNCONSTRAINED = {"similarity": "unconstrained"}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (ALL, {}),
        (ALL, {"similarity": similarities.Unconstrained(learn_shape=True)}),
        (["first", "second"], {"similarity": "full"}),
        (["pointwise", "second"], {"layers": ("second", "pointwise")}),
        (ALL, {"predictor": "sphere"}),
    ],
)
def test_a_network_of_several_kinds_of_layers(names, options, plain):
    model = check_conversion(plain, IMAGES, names, **options)
    assert all("bilinear_form" in each.path for each in model.trainable_variables)
    if "predictor" not in options:
        assert {*trainable_names(model)} <= {"similarity", "shape"}
    trained = len(model.trainable_variables)
    for layer in model.layers:
        layer.trainable = layer.kernel_trainable = True
    assert len(model.trainable_variables) == trained + len(plain.trainable_variables)


prelu = keras.layers.PReLU(shared_axes=[1, 2])
decoder = functools.partial(keras.layers.Conv2DTranspose, 4, 4, 2, output_padding=1)


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (keras.layers.Conv2D(6, 3, groups=3), UNCONSTRAINED),
        (decoder(), {"similarity": similarities.Unconstrained(shared_by="filter")}),
        (
            keras.layers.SeparableConv2D(4, 3, 2, "same", None, 1, 2, activation=prelu),
            UNCONSTRAINED,
        ),
        (keras.layers.Conv2D(4, 3, dtype="mixed_bfloat16"), {"tolerance": 0.02}),
        (
            keras.layers.TimeDistributed(
                keras.layers.Conv1D(4, 3, padding="causal", name="inside")
            ),
            {},
        ),
        (keras.layers.Conv3D(3, 3, padding="same"), {"predictor": "sphere"}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_one_layer(layer, options):
    shape = {1: (6, 2), 3: (6, 6, 6, 2)}.get(getattr(layer, "rank", 2), IMAGES.shape[1:])
    inputs = normal(2, *shape)
    plain = stack(layer, shape=shape)
    plain(inputs)
    randomize(plain.weights)  # Those of an activation too.
    name = getattr(layer, "layer", layer).name
    check_conversion(plain, inputs, [name], **options)


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
    encoder = keras.Sequential(
        [keras.Input((6, 7, 4)), keras.layers.Conv2D(2, 2, name="frame")], name="encoder"
    )
    frames = keras.layers.TimeDistributed(encoder, name="frames")(frames)
    model = keras.Model(
        {"left": left, "right": right}, {"sum": one + two, "frames": frames}
    )
    randomize(model.weights)
    return model


def test_nested_and_shared_layers(tmp_path):
    inputs = {"left": IMAGES, "right": 2 * IMAGES}
    names = ["frame", "inside", "shared"]
    model = check_conversion(nested(), inputs, names, **UNCONSTRAINED)
    again = reloaded(model, tmp_path)
    assert difference(model, again, inputs) == 0
    assert trainable_names(again) == ["similarity"] * 3


def test_layers_that_are_left_alone(plain):
    class Own(keras.layers.Conv2D):
        pass

    model = stack(
        Own(4, 3, name="own"),
        keras.layers.Conv2D(4, 3, groups=2, name="groups"),
        keras.layers.Conv2D(4, 3, name="plain"),
    )
    new = add_similarity(model, predictor="sphere")
    assert converted(new) == ["plain"]
    assert type(new.get_layer("own")) is Own
    # Layers with a similarity are copied: so each can have its own predictor.
    first = add_similarity(plain, layers=["first"])
    both = add_similarity(first, predictor="cnn", layers=["second"])
    assert converted(both) == ["first", "second"]
    assert all("second" in each.path for each in both.trainable_variables)
    assert difference(plain, both, IMAGES) <= 1e-5
    assert both.get_layer("first").predictor is None


def test_a_shared_predictor_in_several_layers():
    shared = predictors.SharedSimilarityPredictor("cnn", adapted_filters=4)
    plain = stack(keras.layers.Conv2D(4, 3), keras.layers.Conv2D(4, 3))
    model = add_similarity(plain, predictor=shared)
    assert model.layers[0].predictor is model.layers[1].predictor
    assert difference(plain, model, IMAGES) <= 1e-5
    of_two_sizes = stack(keras.layers.Conv2D(4, 3), keras.layers.Conv2D(4, 2))
    with pytest.raises(ValueError, match="same kernel size"):
        add_similarity(of_two_sizes, predictor=shared)
    assert shared.shared_network is None  # Models have predictors of their own.


def error_of(**options):
    return lambda plain: add_similarity(plain, **options)


CHOOSE = r"`layers` must choose one or more layers of .* Conv1D.* suits, without one yet: "


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda plain: add_similarity(stack(keras.layers.Flatten())),
            rf"{CHOOSE}there are none\. Received: layers=None, and model",
        ),
        (error_of(layers="frst"), rf"{CHOOSE}.*depthwise', \S*first', .*layers='frst'"),
        (error_of(layers=["first", "norm"]), rf"{CHOOSE}.*\['first', 'norm'\]"),
        (error_of(layers=["depthwise"], similarity="full"), rf"{CHOOSE}\S*first', \S*sec"),
        (error_of(block_size=2, layers="first"), "`block_size` must be None: no chosen"),
        (error_of(inplace="no"), "`inplace` must be True or False"),
        (error_of(freeze_backbone="no"), "`freeze_backbone` must be True or False"),
    ],
)
def test_errors(call, message, plain):
    with pytest.raises(ValueError, match=message):
        call(plain)


def test_a_backbone_that_is_not_frozen():
    images = keras.Input((8, 9, 3))
    base = convolutional()
    base.get_layer("first").trainable = False
    model = add_similarity(base, freeze_backbone=False)
    # The kernel stays frozen; its similarity is trained.
    assert trainable_names(model) == sorted(trainable_names(base) + ["similarity"] * 3)
    assert not model.get_layer("first").kernel.trainable
    base.trainable = False
    plain = keras.Model(images, keras.layers.Dense(2, name="head")(base(images)))
    model = add_similarity(plain, freeze_backbone=False)
    assert trainable_names(model) == ["bias", "kernel"] + ["similarity"] * 3
    plain.trainable = False
    model = add_similarity(plain, freeze_backbone=False)
    assert trainable_names(model) == ["similarity"] * 3


def test_a_frozen_network_with_layers_that_hold_others():
    images = keras.Input((6, 4))
    x = keras.layers.Conv1D(4, 3, name="convolution")(images)
    attention = keras.layers.MultiHeadAttention(2, 2, name="attention")
    plain = keras.Model(images, attention(x, x))
    folded = fold(add_similarity(plain))
    assert trainable_names(folded) == ["bias", "kernel"]
    attention.trainable = False
    attention.query_dense.trainable = True
    assert trainable_names(add_similarity(plain)) == ["similarity"]


def test_backbones_of_models_with_neighbors():
    backbone = stack(
        keras.layers.Conv2D(4, 3, name="first"),
        keras.layers.BatchNormalization(),
        keras.layers.GlobalAveragePooling2D(),
    )
    model = MetaNeighborhoodModel(backbone, layers.CosineDense(3), 5, name="neighbors")
    model.build((None, *IMAGES.shape[1:]))
    model.dictionary.keys.assign(normal(*model.dictionary.keys.shape))
    added = add_similarity(model)
    assert type(added) is MetaNeighborhoodModel and added.name == "neighbors"
    with pytest.raises(ValueError, match="`train_classifier` must be False"):
        add_similarity(model, train_classifier=True)
    assert difference(model, added, IMAGES) == 0
    assert converted(added.backbone) == ["first"]
    # Head, dictionary and rate are trained, and only `M` of the backbone.
    assert trainable_names(added.backbone) == ["similarity"]
    assert len(added.trainable_variables) == 1 + len(model.neighborhood.trainable_variables)
    counted = summary(added)
    assert counted.folds
    first, head, dictionary = counted.layers
    assert first.similarity_parameters == counted.similarity_parameters == 9
    assert not head.folds and not dictionary.folds
    assert (head.kind, head.parameters) == ("CosineDense", added.head.count_params())
    assert dictionary.kind == "NeighborDictionary"
    assert dictionary.parameters == added.dictionary.count_params()
    assert (counted.name, counted.parameters) == ("neighbors", added.count_params())


PIXELS = keras.Input((2,))
CONVERSIONS = [add_similarity, add_film, convert_batch_norms, fold, summary]


class OwnCall(keras.Model):
    def call(self, inputs):
        return 2 * super().call(inputs)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_models_without_a_known_graph(convert):
    own = OwnCall(PIXELS, keras.layers.Dense(1)(keras.layers.Dense(1)(PIXELS)))
    unknown = [
        MetaNeighborhoodModel(None, layers.CosineDense(3), 5),
        keras.layers.Dense(1),
        keras.Sequential([keras.layers.Dense(1)]),
    ]
    if convert in (add_film, convert_batch_norms):
        unknown.append(own)
    else:
        convert(own)
    for model in unknown:
        with pytest.raises(ValueError, match=r"`model` must be a (built|functional or)"):
            convert(model)
