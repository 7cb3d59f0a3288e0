"""Rows of the tables: recipes are the authors', and all can be built."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from examples.image_classification import methods

EXPERIMENTS = methods.EXPERIMENTS
DICTIONARY = {"num_neighbors": 12, "temperature": 0.2, "dropout": 0.5}


@pytest.fixture
def narrow(monkeypatch):
    """A network of few filters."""
    convnet4 = functools.partial(nsl_keras.backbones.convnet4, filters=(4, 4, 4, 6))
    monkeypatch.setitem(methods.BACKBONES, "convnet4", convnet4)


def tiny_model(name, num_neighbors=12):
    keras.utils.set_random_seed(3)
    method = methods.METHODS[name]
    dictionary = {**DICTIONARY, "num_neighbors": num_neighbors}
    model = methods.build(method, "convnet4", (8, 8, 3), 4, dictionary, 0)
    recipe = methods.published("cifar10", method.optimizer).scaled(6)
    methods.compile_model(model, dataclasses.replace(recipe, batch_size=8), False)
    return model


def test_published_recipes():
    cifar = methods.published("cifar100")
    rate = cifar.rates()
    rates = [float(rate(step)) for step in (0, 120_000, 120_001)]
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 1e-4], rtol=1e-5)
    assert (cifar.steps, cifar.batch_size) == (160_000, 128)
    assert cifar.augmentation == "pad_crop_flip"
    assert methods.published("mnist").augmentation == "pad_crop"
    assert methods.published("cinic10").rate_drops == (160_000,)
    sgd = methods.published("cifar10", "nesterov")
    assert (sgd.steps, sgd.learning_rate) == (120_000, 0.1)
    entries = methods.published_num_neighbors
    assert (entries("cifar10"), entries("cifar100")) == (5_000, 10_000)


@pytest.mark.parametrize("name", ["plain", "neighborhoods_film"])
def test_decay_spares_classifier_and_dictionary(name, narrow):
    """With gradients of zero a step of rate 1e-3 takes 7.5e-5 of the rest."""
    model = tiny_model(name)
    assert model.optimizer.clipvalue == 10
    before = [ops.convert_to_numpy(variable) for variable in model.trainable_variables]
    zeros = [ops.zeros_like(variable) for variable in model.trainable_variables]
    model.optimizer.apply(zeros, model.trainable_variables)
    spared = {"kernel": 1, "scale": 1}
    if name == "neighborhoods_film":
        spared |= {"keys": 1, "value_logits": 1, "inner_learning_rate_0": 1}
    for variable, old in zip(model.trainable_variables, before, strict=True):
        new = ops.convert_to_numpy(variable)
        if np.array_equal(new, old) and np.any(old):
            spared[variable.name] -= 1
        else:
            np.testing.assert_allclose(new, (1 - 7.5e-5) * old, rtol=1e-6)
    assert set(spared.values()) == {0}, spared


def test_sgd_is_that_of_the_authors():
    model = tiny_model("plain_sgd")
    assert model.optimizer.nesterov
    assert model.optimizer.momentum == 0.9
    expected = sum(
        1e-4 * np.sum(ops.convert_to_numpy(variable).astype("float64") ** 2)
        for variable in model.layers[0].trainable_variables
        if variable.name == "kernel"
    )
    np.testing.assert_allclose(float(sum(model.losses)), expected, rtol=1e-5)


def parameters(model):
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@pytest.mark.long
def test_every_method_can_be_built(narrow):
    made = {name: tiny_model(name) for name in methods.METHODS}
    images = np.ones((2, 8, 8, 3), "float32")
    assert {tuple(model(images).shape) for model in made.values()} == {(2, 4)}
    head = made["neighborhoods"]
    assert head.num_neighbors == 12
    assert made["neighborhoods_size_2"].num_neighbors == 24
    peaked = made["neighborhoods_peak_4"].dictionary
    np.testing.assert_allclose(peaked.temperature, head.dictionary.temperature / 4)
    assert made["neighborhoods_3_diagonal"].inner_steps == 3
    assert made["neighborhoods_3_diagonal"].learning_rate_form == "diagonal"
    for experiment in EXPERIMENTS.values():
        assert set(experiment.names) <= set(made)


def test_the_extra_layer_has_as_many_parameters_as_the_dictionary():
    counts = {
        name: parameters(tiny_model(name, 5000))
        for name in ("plain", "plain_extra", "neighborhoods")
    }
    extra = counts["plain_extra"] - counts["plain"]
    np.testing.assert_allclose(extra, counts["neighborhoods"] - counts["plain"], rtol=1e-3)


#: One of each kind of network, for what they have in common.
SHALLOW = ("convnet4", "resnet29", "densenet40")


@pytest.mark.long
@pytest.mark.parametrize("backbone", methods.BACKBONES)
def test_backbones(backbone):
    expected = {"convnet4": 520_056, "resnet29": 838_160, "resnet56": 1_655_120}
    expected |= {"densenet76": 484_140, "densenet40": 174_792}
    names = ("plain", "plain_dot") if backbone in SHALLOW else ("plain",)
    for name in names:
        method = methods.METHODS[name]
        model = methods.build(method, backbone, (32, 32, 3), 10, DICTIONARY, 0)
        features, head = model.layers
        assert parameters(features) == expected[backbone]
        assert isinstance(head, keras.layers.Dense) == method.dot_product
        relus = [x for x in features.layers[-2:] if isinstance(x, keras.layers.ReLU)]
        assert bool(relus) == (method.dot_product and backbone != "convnet4")


def test_coarse_classes_cover_all():
    for dataset, groups in methods.COARSE_CLASSES.items():
        count = 100 if dataset == "cifar100" else 10
        assert sorted(fine for group in groups for fine in group) == list(range(count))


def test_published_figures_are_whole():
    table_1, table_3 = EXPERIMENTS["table_1"].published, EXPERIMENTS["A.5"].published
    assert len(table_1) == 17
    assert len(table_3) == 14
    for where, figures in table_3.items():
        for name in ("plain", "neighborhoods"):
            assert figures[name] == table_1[where][name], where
