"""Rows of the tables are the authors' recipes, and all of them can be built."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import nsl_keras
from experiments.common.multiply_adds import multiply_adds as counted
from experiments.few_shot import methods as few_shot_methods, training as few_shot_training
from experiments.image_classification import maxl, methods as image_methods, pictures
from experiments.neural_similarity import methods as similarity_methods
from experiments.tests.commands import tiny_images


def parameters(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


# Recipes.


def test_recipes_are_those_published():
    paper, code = (similarity_methods.RECIPES[name] for name in ("paper", "code"))
    assert (paper.steps, paper.rate_drops) == (64_000, (34_000, 54_000))
    assert (code.steps, code.rate_drops) == (42_500, (20_000, 30_000, 37_500))
    assert similarity_methods.RECIPES["attention"].make_optimizer().epsilon == 1e-8
    cifar = image_methods.published("cifar100")
    assert (cifar.steps, cifar.batch_size, cifar.rate_drops) == (160_000, 128, (120_000,))
    assert cifar.augmentation == "pad_crop_flip"
    assert image_methods.published("mnist").augmentation == "pad_crop"
    sgd = image_methods.published("cifar10", "nesterov")
    assert (sgd.steps, sgd.learning_rate) == (120_000, 0.1)
    assert image_methods.published_num_neighbors("cifar100") == 10_000
    # 200 epochs, where the other rows have 400.
    own = image_methods.published("cifar10", "maxl")
    rates = [float(own.rates()(step)) for step in range(10_000, 80_000, 20_000)]
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.025, 0.0125])
    optimizer = own.make_optimizer()
    assert (own.steps, optimizer.momentum, own.penalty) == (80_000, 0.9, 5e-4)


def test_a_dictionary_is_trained_by_sgd(narrow):
    model = neighborhood_model("neighborhoods_sgd")
    optimizer, before, velocity = model.optimizer, {}, 0
    for step in range(2):
        values = {each.path: each.numpy() for each in model.trainable_variables}
        gradients = [np.full(each.shape, 1.0 + step) for each in model.trainable_variables]
        optimizer.apply([keras.ops.cast(each, "float32") for each in gradients])
        velocity = 0.9 * velocity - 0.1 * (1 + step)
        for each in model.trainable_variables:
            moved = each.numpy() - values[each.path]
            by_sgd = "neighbor_dictionary" in each.path
            assert by_sgd == bool(np.allclose(moved, velocity, atol=1e-6)), each.path
            before[each.path] = by_sgd
    assert sum(before.values()) == 2  # Keys and values.
    assert int(optimizer.iterations) == 2
    own = {id(each) for each in optimizer.variables}
    assert len(own) == len(optimizer.variables)
    assert not own & {id(each) for each in model.variables}


def test_the_penalty_of_maxl_is_on_all_weights(narrow):
    model = neighborhood_model("maxl_sgd")
    weights = model.multi_task.trainable_variables
    squares = sum(float(np.sum(each.numpy() ** 2)) for each in weights)
    assert len({each.name for each in weights}) > 2
    np.testing.assert_allclose(float(sum(model.multi_task.losses)), 2.5e-4 * squares, 1e-4)


def neighborhood_model(name, num_neighbors=12):
    method = image_methods.METHODS[name]
    dictionary = {"num_neighbors": num_neighbors, "temperature": 0.2, "dropout": 0.5}
    model = image_methods.build(method, "convnet4", (8, 8, 3), 4, dictionary, 0)
    trained = image_methods.published("cifar10", method.optimizer).scaled(6)
    image_methods.compile_model(model, dataclasses.replace(trained, batch_size=8), False)
    return model


@pytest.fixture
def narrow(monkeypatch):
    convnet4 = functools.partial(nsl_keras.backbones.convnet4, filters=(4, 4, 4, 6))
    monkeypatch.setitem(image_methods.BACKBONES, "convnet4", convnet4)


def test_dictionaries_are_drawn_by_the_seeds_that_all_have():
    def run(method, seed, **found):
        return {"method": f"neighborhoods{method}", "seed": seed, **found}

    records = [
        *(run("", seed, test_accuracy=0.5 + seed / 10) for seed in (0, 1)),
        run("_size_2", 0, test_accuracy=0.6),
        run("_peak_4", 0, diverged="nan"),
    ]
    setting = {"dictionary": {"num_neighbors": 10, "temperature": 0.2}}
    titles = {name: each.title for name, each in image_methods.METHODS.items()}
    figure = pictures.by_dictionary(setting, records, titles)
    sizes, peaks = (axis.lines[0].get_xydata().tolist() for axis in figure.axes)
    assert (sizes, peaks) == ([[10, 50], [20, 60]], [[5, 50]])
    assert pictures.by_dictionary(setting, records[-1:], titles) is None


# Rows.


@functools.cache
def parameters_of(network, name):
    """Of a row's model, which several tables have."""
    own = {"spherenet": similarity_methods.SPHERENET_METHODS}
    own["mobile"] = similarity_methods.MOBILE_METHODS
    row = own.get(network, similarity_methods.METHODS)[name]
    size = 8 if network == "cnn9" else 32
    widths = {"cnn9": (16, 16, 32), "cnn10": (4, 5, 6), "spherenet": (32, 32, 10)}
    options = {"filters": widths[network]} if network in widths else {}
    if network.startswith("resnet"):
        options = {"filters": (2, 2, 4, 4)}
    model = similarity_methods.build(
        network, row, (size, size, 3), 10, momentum=0.9, **options
    )
    assert model.output_shape == (None, 10)
    return parameters(model)


@pytest.mark.parametrize("number", similarity_methods.TABLES)
def test_rows_of_neural_similarity_differ(number):
    table, found = similarity_methods.TABLES[number], {}
    for name, row in table.methods.items():
        # Predictors of different kinds and blocks have the same parameters.
        changes = getattr(row.convolution, "keywords", {}), row.options
        own = row.predictor_rate, row.predictor_penalty, row.warmup, row.predictor_warmup
        count = parameters_of(table.network, name)
        found[name] = (count, *map(str, changes), *own)
    assert len(set(found.values())) == len(found), found
    assert table.baseline in table.methods


@pytest.mark.parametrize(
    "name, share", [("blocks", 1), ("slow", 0.1), ("free", 1), ("predictor_warmup", 0.1)]
)
def test_predictors_have_a_rate_and_a_penalty_of_their_own(name, share, eager):
    row = similarity_methods.METHODS[f"dynamic_uns_{name}"]
    shape = (8, 8, 3)
    # The first of ten steps of a warm-up.
    trained = dataclasses.replace(similarity_methods.RECIPES["attention"], steps=100)
    backbone = similarity_methods.build("cnn9", row, shape, 10, 0.9, filters=(2, 2, 2))
    model = similarity_methods.trainable(backbone, trained, False, row)
    layer = next(each for each in backbone.layers if hasattr(each, "predicted_matrices"))
    kernels = layer.kernel, layer.bilinear_form.network.layers[-1].kernel
    before = [keras.ops.convert_to_numpy(each) for each in kernels]
    images = np.random.default_rng(0).random((4, *shape), "float32")
    model.train_on_batch(images, np.arange(4))
    plain, own = (
        np.abs(keras.ops.convert_to_numpy(each) - old).max()
        for each, old in zip(kernels, before, strict=True)
    )
    # Adam's first steps are as long as its rate.
    np.testing.assert_allclose(plain, trained.learning_rate, rtol=0.1)
    np.testing.assert_allclose(own, share * trained.learning_rate, rtol=0.1)
    penalized = [each.regularizer is not None for each in kernels]
    assert penalized == [True, name != "free"]


def test_the_warm_up_of_a_row():
    row = similarity_methods.METHODS["dynamic_uns_warmup"]
    trained = dataclasses.replace(similarity_methods.RECIPES["attention"], steps=1000)
    shape = (8, 8, 3)
    backbone = similarity_methods.build("cnn9", row, shape, 10, 0.9, filters=(2, 2, 2))
    model = similarity_methods.trainable(backbone, trained, False, row)
    optimizer, rates = model.optimizer, []
    for step in (0, 49, 99, 500):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    expected = trained.learning_rate * np.array([0.01, 0.5, 1, 1])
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_a_row_adds_a_tenth_of_what_predictors_return():
    generator = np.random.default_rng(0)
    images = generator.normal(size=(2, 8, 8, 3)).astype("float32")
    added = []
    for name in ("blocks", "tenth"):
        row = similarity_methods.METHODS[f"dynamic_uns_{name}"]
        layer = row.convolution(momentum=0.9)(4, 3)
        layer(images)
        values = np.random.default_rng(1)
        for each in layer.bilinear_form.network.weights:
            each.assign(values.normal(size=each.shape))
        predicted = layer.predicted_matrices(images)
        added.append(keras.ops.convert_to_numpy(predicted) - np.eye(9))
    assert np.abs(added[0]).max() > 1
    np.testing.assert_allclose(added[1], 0.1 * added[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bounded", "full_sphere", "cnn"])
def test_what_a_bounded_predictor_adds_is_within_one(name):
    row = similarity_methods.METHODS[f"dynamic_dns_{name}"]
    layer = row.convolution(momentum=0.9)(4, 3)
    generator = np.random.default_rng(0)
    images = generator.normal(size=(4, 8, 8, 3)).astype("float32")
    layer(images)
    for each in layer.variables:
        each.assign(generator.normal(scale=5, size=each.shape) ** 2)
    added = keras.ops.convert_to_numpy(layer.predicted_matrices(images)) - np.eye(9)
    # NSL Section 3.3.1: "bounded between -1 and 1".
    assert (np.abs(added).max() <= 1) == (name == "bounded")


def test_rows_of_meta_neighborhoods(narrow):
    made = {name: neighborhood_model(name) for name in image_methods.METHODS}
    images = np.ones((2, 8, 8, 3), "float32")
    assert {tuple(model(images).shape) for model in made.values()} == {(2, 4)}
    assert made["neighborhoods_3_diagonal"].neighborhood.inner_steps == 3
    assert made["neighborhoods_3_diagonal"].neighborhood.learning_rate_form == "diagonal"
    films = [
        (layer.film.residual, layer.film.learn_sharpness)
        for layer in made["neighborhoods_film_paper"].backbone.layers
        if hasattr(layer, "film")
    ]
    assert films and set(films) == {(False, False)}  # MN Eq. (4)
    assert made["neighborhoods_temperature"].dictionary.learn_temperature
    assert not made["neighborhoods_euclidean"].dictionary.metric.squared
    assert made["neighborhoods_no_dropout"].dictionary.dropout == 0
    keys = made["neighborhoods_keys"].dictionary.key_initializer
    assert keys.stddev**2 == pytest.approx(0.01)
    for experiment in image_methods.EXPERIMENTS.values():
        assert set(experiment.names) <= set(made)
    # The extra layer has as many parameters as the dictionary.
    plain, extra, ours = (
        parameters(neighborhood_model(name, 5000))
        for name in ("plain", "plain_extra", "neighborhoods")
    )
    np.testing.assert_allclose(extra - plain, ours - plain, rtol=1e-3)


def test_multiply_adds_of_meta_neighborhoods(narrow):
    def adaptation(name):
        model = neighborhood_model(name)
        features, classes = model.dictionary.keys.shape[1], model.head.units
        backbone, _ = counted(model.backbone)
        return image_methods.multiply_adds(model) - backbone, features, classes

    # Attention over 12 entries, their part of the adaptation, and the plain head.
    count, n, c = adaptation("neighborhoods")
    assert count == 12 * (n + n * c) + n * c
    count, n, c = adaptation("neighborhoods_3_diagonal")
    assert count == 12 * (n + 5 * n * c) + n * c


@pytest.mark.parametrize("name", few_shot_methods.METHODS)
def test_rows_of_few_shot_learning(name):
    row, shape = few_shot_methods.METHODS[name], (16, 16, 3)
    network = few_shot_methods.features("cnn4", row.network, shape)
    options = {"batch_normalization": row.batch_normalization}
    rate = few_shot_methods.inner_rate(name, "tiny")
    if rate is not None:
        options["inner_learning_rate"] = rate
    images = np.zeros((4, *shape), "uint8")
    task = few_shot_methods.Task("tiny", 2, images, options)
    assert row.learner(network, task).batch_normalization == row.batch_normalization


def test_cnn9_of_table_7_ends_in_256_features():
    shape, found = (16, 16, 3), {}
    for name in ("cnn9", "cnn9_paper"):
        network = few_shot_methods.features(name, "dynamic", shape)
        kinds = nsl_keras.layers.NeuralSimilarityConv2D, keras.layers.Conv2D
        counts = [sum(type(each) is k for each in network.layers) for k in kinds]
        found[name] = (network.output_shape[-1], *counts)
    # A 2x2 map of 128 filters, after a plain root; no root, and the layer of 256 units.
    assert found == {"cnn9": (512, 9, 1), "cnn9_paper": (256, 9, 0)}
    task = few_shot_methods.Task("tiny", 2, np.zeros(1), {"batch_normalization": "support"})
    maps = few_shot_methods.relation_net(network, task).backbone
    assert maps.output_shape == (None, 4, 4, 128)


def test_a_similarity_moves_alone_once_the_classifier_is_finetuned(eager):
    shape = (16, 16, 3)
    network = few_shot_methods.features("cnn4", "plain", shape)
    options = {"batch_normalization": "moving"}
    task = few_shot_methods.Task("tiny", 2, np.zeros((4, *shape), "uint8"), options)
    images = np.random.default_rng(0).random((4, *shape), "float32")

    def adapted(name):
        learner = few_shot_methods.METHODS[name].learner(network, task)
        found = learner.adapt(images, np.arange(4) % 2).get_weights()
        return {each.size: each for each in found if each.size in (9, 64)}

    head, after = adapted("head_0.05_20"), adapted("after_0.2_5")
    np.testing.assert_allclose(after[64], head[64], atol=1e-6)
    assert 9 not in head and np.abs(after[9] - 1).max() > 1e-4


# Choices of few-shot learning.

SETTING = few_shot_training.Setting(
    dataset="tiny",
    backbone="cnn4",
    ways=2,
    shots=2,
    queries=3,
    training_images=60,
    episodes_per_step=2,
    proto_ways=3,
    batch_size=10,
    test_episodes=4,
    rates=(1e-2, 1e-3, 1e-4),
    trial_share=0.5,
    validation_episodes=2,
)


class Trained(few_shot_training.Training):
    """At a rate of 1e-3 a learner knows the answers, at others it guesses."""

    def __init__(self, folder, **changes):
        setting = dataclasses.replace(SETTING, **changes)
        super().__init__(setting, tiny_images(), folder / "states")
        self.calls, self.brightest = [], []

    def run(self, method, rate, images, seed):
        self.calls.append((rate, images, seed))

        def learner(episode):
            self.brightest.append(episode.query_images.max())
            right = np.eye(2)[episode.query_labels]
            return right if rate == 1e-3 else np.zeros_like(right)

        return learner, {"seconds": 0.0, "training_images": images}


def test_trials_choose_on_validation_classes(tmp_path):
    run = Trained(tmp_path)
    records = few_shot_training.run_methods(run, ["proto_net"], [3], tmp_path)
    assert run.calls == [(1e-2, 30, 0), (1e-3, 30, 0), (1e-4, 30, 0), (1e-3, 60, 3)]
    # Validation classes are darker than 180, the test's are not.
    assert max(run.brightest[:3]) < 180 / 255 < max(run.brightest[3:])
    (record,) = records.runs
    assert (record["learning_rate"], record["accuracy"]) == (1e-3, 1.0)


def test_a_row_that_trains_longer_has_more_images(tmp_path, monkeypatch):
    run = few_shot_training.Training(SETTING, tiny_images(), tmp_path)

    def pretrained(method, rate, images, seed):
        return run._features("plain"), {"training_images": images}

    monkeypatch.setattr(run, "_pretrained", pretrained)
    made = [run.run(name, 1e-3, 60, seed=0)[1] for name in ("finetuning", "longer")]
    assert [each["training_images"] for each in made] == [60, 198]


def test_as_published_all_but_maml_train_on_validation_classes_too(tmp_path):
    run = Trained(tmp_path, published=True, rates=(1e-3,))
    for method, classes in (("maml", 6), ("meta_static_published", 6), ("proto_net", 9)):
        assert len(np.unique(run.trained_on(method).labels)) == classes


def test_meta_learned_similarities_end_in_steps_of_the_classifier():
    layers = [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)]
    network, random = keras.Sequential(layers), np.random.default_rng(0)
    x, y = random.normal(size=(6, 5)).astype("float32"), np.arange(6) % 3
    options = {"inner_steps": 2, "inner_learning_rate": 0.1}
    found = few_shot_methods.MetaStatic(network, **options).adapt(x, y)
    # The network without the division by its temperature.
    adapted = nsl_keras.few_shot.MAML(network, **options).adapt(x, y).layers[0]
    options["inner_steps"] = 20
    expected = nsl_keras.few_shot.MAML(adapted, "classifier", **options).adapt(x, y)
    found, expected = (
        each.layers[-1].temperature * each.predict(x) for each in (found, expected)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_generator_of_maxl_learns_through_a_step():
    """Its gradient against finite differences, second derivatives of the step included."""
    dense = functools.partial(keras.layers.Dense, dtype="float64")
    inputs = keras.Input((4,), dtype="float64")
    hidden = dense(5, "tanh")(inputs)
    generator = keras.Sequential([keras.Input((4,), dtype="float64"), dense(10)])
    network = keras.Model(inputs, [dense(2)(hidden), dense(10)(hidden)])
    model = maxl.Maxl(network, generator, lookahead_rate=0.5)
    images = np.random.default_rng(0).normal(size=(6, 4))
    labels = np.arange(6) % 2
    kernel = generator.layers[0].kernel
    with tf.GradientTape() as tape:
        loss = model.generator_loss(images, labels)
    gradient = tape.gradient(loss, kernel.value)
    start, numeric = kernel.numpy(), np.zeros(kernel.shape)
    for place in np.ndindex(*kernel.shape):
        values = []
        for step in (1e-5, -1e-5):
            moved = start.copy()
            moved[place] += step
            kernel.assign(moved)
            values.append(float(model.generator_loss(images, labels)))
        numeric[place] = (values[0] - values[1]) / 2e-5
    np.testing.assert_allclose(gradient, numeric, rtol=1e-7, atol=1e-10)
    assert np.abs(numeric).max() > 1e-4
