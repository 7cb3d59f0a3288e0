"""Runs of a cell are paired, and what is measured changes nothing."""

import dataclasses
import functools
import types

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

import nsl_keras
from benchmarks.no_harm import training
from benchmarks.no_harm.data import Images
from benchmarks.no_harm.methods import COMPARED, METHODS
from benchmarks.no_harm.networks import BATCH_NORMS, NETWORKS
from examples.common.data import Split

SETTING = training.Setting(epochs=2, batch_size=4, compared_images=6)
#: `CosineDense` has no bias, and starts at weights of its own.
SAME_OUTPUTS = [
    name for name in COMPARED if name not in ("neighbors_cosine", "neighbors_film")
]


def cell(network="no_batch_norm"):
    generator = np.random.default_rng(0)
    images = generator.random((10, 8, 8, 1)).astype("float32")
    split = Split(images, np.arange(10) % 3)
    return training.Cell(SETTING, Images(split, split, 3), NETWORKS[network], seed=5)


def without_adaptation(model, images):
    if isinstance(model, nsl_keras.MetaNeighborhoodModel):
        return model(images, adapt=False)
    return model(images)


@pytest.mark.parametrize(
    "network",
    [
        "no_batch_norm",
        pytest.param("narrow_cnn", marks=pytest.mark.long),
        pytest.param("small_resnet", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", SAME_OUTPUTS)
def test_methods_start_as_the_plain_network(name, network):
    tried = cell(network)
    plain = tried._initial()
    images = tried.images.train.images
    expected = plain(images)
    model = METHODS[name].make(tried.make_network, plain)
    received = without_adaptation(model, images)
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)


def test_methods_see_the_same_images_in_the_same_order(monkeypatch):
    seen = []

    @functools.wraps(keras.Model.fit)
    def spy(self, x=None, y=None, **options):
        seen.append((x, y))
        return types.SimpleNamespace(history={"loss": [1.0]})

    monkeypatch.setattr(keras.Model, "fit", spy)
    tried = cell()
    for name in ("plain", "static_dns", "plain_longer", "converted_neighbors"):
        tried.run(name)
    assert len(seen) == 4 * SETTING.epochs
    plain, static, longer, converted = (seen[i : i + 2] for i in range(0, 8, 2))
    np.testing.assert_equal(static, plain)
    np.testing.assert_equal(converted, longer)
    orders = [labels.tolist() for _, labels in plain + longer]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


@pytest.mark.long
def test_longer_training_goes_on_from_the_plain_one():
    tried = cell()
    assert tried.run("plain") is tried.run("plain")
    # Another order of runs, as after an interruption, changes nothing.
    later = cell().run("plain_longer")
    assert later["history"] == tried.run("plain_longer")["history"]
    assert later["history"] != tried.run("plain")["history"]


def test_a_loss_that_is_not_finite_is_recorded(monkeypatch):
    def fail(self, *args, **kwargs):
        raise nsl_keras.NonFiniteLossError("The loss became nan.")

    monkeypatch.setattr(keras.Model, "fit", fail)
    record = cell().run("plain")
    assert record["failed"] == "epoch 2: The loss became nan."
    assert len(record["test_accuracy"]) == SETTING.epochs


def test_networks_have_the_batch_norms_of_the_setting():
    for batch_norm, kind in BATCH_NORMS.items():
        setting = dataclasses.replace(SETTING, batch_norm=batch_norm)
        tried = training.Cell(setting, cell().images, NETWORKS["small_resnet"], 0)
        layers = tried.make_network().layers
        found = [type(each) for each in layers if each.name.endswith("_normalization")]
        assert found == [kind] * 9
