"""`adapt`: support sets, names of classes, and what cannot be adapted."""

import keras
import numpy as np
import pytest
from few_shot_episodes import convolutional, episodes, identity
from helpers import Batches, Subclassed, normal, refused, stacked

from nsl_keras import convert, export, few_shot

(SUPPORT,), (LABELS,), _ = episodes(1, shape=(6, 6, 1))[0]
NAMES = ("lynx", "elk", "owl")


def learner(learner=few_shot.NearestCentroid, **options):
    return learner(convolutional(), **options)


def logits_of(model, images):
    """An adapted model's logits, as they are before its temperature."""
    return model.temperature * model.predict(images, verbose=0)


def test_names_are_labels_or_number_them(eager):
    """Labels of a data set too; `adapt` takes any number of classes."""
    made, named = learner(ways=7), np.array(NAMES)[LABELS]
    photos = Batches((SUPPORT[:4], LABELS[:4]), (SUPPORT[4:], LABELS[4:]))
    photos.class_names = NAMES
    models = made.adapt(photos), made.adapt(list(SUPPORT), np.array([3, 5, 8])[LABELS])
    assert [model.class_names for model in models] == [NAMES, ("3", "5", "8")]
    found = (model.predict(SUPPORT, verbose=0) for model in models)
    np.testing.assert_array_equal(*found)
    assert made.adapt(SUPPORT, named[:, None]).class_names == ("elk", "lynx", "owl")
    assert made.adapt(SUPPORT, named, NAMES).class_names == NAMES


def dense(outputs=3):
    """A classifier of support images."""
    return stacked((6, 6, 1), keras.layers.Flatten(), keras.layers.Dense(outputs))


def half_precision():
    """It rounds no inputs and no features."""
    keras.config.set_dtype_policy("bfloat16")
    layers = [keras.Input((4,), dtype="float32"), keras.layers.Dense(3, dtype="float32")]
    return few_shot.ProtoNet(keras.Sequential(layers), 3), 2020 + normal(6, 4), (1e-5, 1e-5)


def subclassed():
    return few_shot.NearestCentroid(Subclassed(), 3), SUPPORT, (1e-7, 1e-6)


def short_features():
    """Of a network with weights near zero."""
    backbone = stacked((6,), keras.layers.Rescaling(1e-9))
    return few_shot.NearestCentroid(backbone, 3), normal(6, 6), (1e-4, 1e-5)


def without_features():
    """All features of a support example are zero."""
    support = np.eye(6, dtype="float32") * (np.arange(6) < 5)
    return few_shot.NeighborhoodLearner(identity(), 3), support, (1e-4, 1e-5)


def with_lora():
    network = dense()
    network.layers[-1].enable_lora(2)
    network.layers[-1].lora_kernel_b.assign(np.ones((2, 3)))
    maml = few_shot.MAML(network, inner_steps=1, inner_learning_rate=0.1)
    return maml, SUPPORT, (1e-4, 1e-5)


MAKERS = [half_precision, subclassed, short_features, without_features, with_lora]


@pytest.mark.parametrize("make", MAKERS)
def test_logits_are_the_learners(make, eager):
    made, support, tolerances = make()
    episode = [each[None] for each in (support, LABELS, support)]
    (expected,) = made.predict(episode, verbose=0)
    found = logits_of(made.adapt(support, LABELS), support)
    np.testing.assert_allclose(found, expected, *tolerances)
    assert np.ptp(found) > 1e-3


@pytest.mark.parametrize(
    "x, y, names, message",
    [
        (SUPPORT, LABELS + 1, NAMES, r"that count them from 0.*y=\[1, 2, 3\]"),
        (SUPPORT, LABELS, (*NAMES, "bee"), r"an example of each class.*missing: \[3\]"),
        (SUPPORT, LABELS, ("elk", "elk", "owl"), r"two or more classes.*y=\[0, 1, 2\]"),
        (SUPPORT, np.array(NAMES)[LABELS], ("elk", "owl"), r"y=\['elk', 'lynx'"),
        (SUPPORT, np.zeros(6, int), None, r"two or more classes.*y=\[0\]"),
        (SUPPORT, LABELS[:-1], None, r"must be 6, one label .*len\(y\)=5"),
        (SUPPORT, None, None, "`y` must be given, unless"),
        (SUPPORT, np.eye(3)[LABELS], None, r"`y` must be class numbers or names"),
        ("photos", None, None, "image_dataset_from_directory"),
        ([f"{name}.jpg" for name in LABELS], LABELS, None, "as the network takes them"),
        ([SUPPORT[0], SUPPORT[1][:2]], [0, 1], None, "must have the same shape"),
        (SUPPORT[:, :5], LABELS, None, r"of shape \(None, 6, 6, 1\).*x=\(6, 5, 6, 1\)"),
        (SUPPORT[:0], LABELS[:0], None, "labels of two or more classes"),
        (iter(zip(SUPPORT, LABELS, strict=True)), None, None, "without a batch axis"),
        (SUPPORT * np.nan, LABELS, None, "`x` must be finite"),
    ],
)
def test_wrong_support_sets(x, y, names, message):
    with refused(message):
        learner().adapt(x, y, names)


def test_what_cannot_be_adapted():
    made = learner(few_shot.ProtoNet, batch_normalization="transductive")
    with refused('`batch_normalization` must be "support" or'):
        made.adapt(SUPPORT, LABELS)
    network = convolutional()
    twice = network.layers[1]
    shared = keras.Sequential([*network.layers, keras.layers.Conv2D(4, 1), twice])
    shared.build((None, 6, 6, 1))
    made = few_shot.ProtoNet(shared, batch_normalization="support")
    with refused(r"called once in a model.*Received.*several calls"):
        made.adapt(SUPPORT, LABELS)
    for made in (few_shot.MAML(dense(4)), few_shot.Finetuner(dense(4), ways=4)):
        with refused(r"`y` must be labels of 4 classes.*Received.*, 2\]"):
            made.adapt(SUPPORT, LABELS)


#: Makers of learners.
FOLDED = {
    "cosine": lambda: learner(),
    "proto": lambda: learner(few_shot.ProtoNet, batch_normalization="support"),
    "finetuner": lambda: few_shot.Finetuner(dense(), steps=2),
    "neighborhood": lambda: learner(few_shot.NeighborhoodLearner),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded_models_keep_names_and_temperature(name, eager):
    model = FOLDED[name]().adapt(SUPPORT, LABELS, NAMES)
    folded = convert.fold(model)
    expected = model.predict(SUPPORT, verbose=0)
    np.testing.assert_allclose(folded.predict(SUPPORT, verbose=0), expected, atol=1e-4)
    assert type(folded) is type(model)
    assert folded.class_names == model.class_names == NAMES
    assert folded.temperature == model.temperature != 1


def test_adapted_models_inside_a_model_are_converted():
    adapted = few_shot.Finetuner(dense(), 3, steps=2).adapt(SUPPORT, LABELS)
    outer = keras.Sequential([keras.Input((6, 6, 1)), adapted])
    model = convert.add_similarity(outer, layers=lambda layer: True, train_classifier=True)
    assert {each.name for each in model.trainable_variables} > {"similarity", "kernel"}


@pytest.mark.jax
@pytest.mark.parametrize("kind", [few_shot.NearestCentroid, few_shot.NeighborhoodLearner])
def test_names_probabilities_and_another_temperature(kind):
    """After a model has predicted."""
    model = learner(kind).adapt(SUPPORT, LABELS, NAMES)
    found, logits = model.classify(SUPPORT, batch_size=4), logits_of(model, SUPPORT)
    shares = keras.ops.softmax(logits / model.temperature)
    np.testing.assert_allclose(found["probabilities"], shares, rtol=1e-4)
    wanted = np.array(NAMES)[found["probabilities"].argmax(axis=1)]
    assert found["class"].tolist() == wanted.tolist() != [NAMES[0]] * len(SUPPORT)
    model.calibrate(0.5)
    np.testing.assert_allclose(logits_of(model, SUPPORT), logits, rtol=1e-4, atol=1e-5)
    with refused("`temperature` must be"):
        model.calibrate(0)


def test_the_entries_of_a_neighborhood_are_the_support_images(eager):
    model = learner(few_shot.NeighborhoodLearner).adapt(SUPPORT, LABELS)
    nearest = model.neighbors(SUPPORT, k=1).indices
    np.testing.assert_array_equal(nearest, np.arange(len(SUPPORT))[:, None])


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda net: few_shot.Finetuner(net, 3), lambda last: last.enable_lora(1)),
        (few_shot.MAML, lambda last: last.quantize("int8")),
    ],
)
def test_variables_that_change_after_construction(make, change):
    network = dense()
    made = make(network)
    change(network.layers[-1])
    with refused(r"`model` must be .* keeps its variables.*dense\w*/"):
        made.adapt(SUPPORT, LABELS)


def test_what_is_no_learner_and_no_model(tmp_path):
    for make, name in ((few_shot.NearestCentroid, "backbone"), (few_shot.MAML, "model")):
        with refused(f"`{name}` must be a Keras model"):
            make("MobileNet")
    finetuner = few_shot.Finetuner(dense(), 3)
    with refused("pass what its `adapt` returns"):
        export.save_model(finetuner, tmp_path / "1")


def test_names_fit_the_logits():
    for names in ("elk", ["elk", "elk"]):
        with refused("`class_names` must be a sequence of different names"):
            few_shot.ClassLogits(names)
    with refused("`class_names` must be 2 names"):
        few_shot.ClassLogits(NAMES)(np.zeros((1, 2)))
    for numbers in ([7], [7, 7], np.array([7, 8, 8])):
        with refused("`labels` must be None, or a number for each name"):
            few_shot.ClassLogits(["elk", "owl"], labels=numbers)
    assert few_shot.ClassLogits(["elk", "owl"], labels=np.array([7, 8])).labels == [7, 8]


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="A signature of TensorFlow")
def test_any_model_that_ends_in_names_serves_them(tmp_path):
    import tensorflow as tf

    model = stacked((4,), few_shot.ClassLogits(["a", "b", "c", "d"]))
    export.save_model(model, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["classify"]
    found = served(inputs=tf.eye(4))["class"].numpy()
    assert found.tolist() == [b"a", b"b", b"c", b"d"]
