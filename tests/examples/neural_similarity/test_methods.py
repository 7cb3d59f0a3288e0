"""Rows of the tables: recipes and penalties are the authors', and all can be built."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from examples.common.convolutions import convolutions
from examples.neural_similarity import methods


def tiny_model(**options):
    backbone = nsl_keras.backbones.cnn9(
        (8, 8, 3), 4, convolutions(**options), filters=(4, 4, 4)
    )
    return methods.trainable(backbone, methods.RECIPES["paper"].scaled(6), False)


def test_published_recipes():
    recipes = methods.RECIPES
    paper = recipes["paper"]
    rate = paper.rates()
    rates = [float(rate(step)) for step in (0, 34_000, 34_001, 54_001)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.001], rtol=1e-5)
    assert paper.make_optimizer().momentum == 0.9
    assert not paper.make_optimizer().nesterov
    assert (recipes["code"].rate_drops, recipes["code"].steps) == (
        (20_000, 30_000, 37_500),
        42_500,
    )
    short = paper.scaled(640)
    assert (short.steps, short.rate_drops) == (640, (340, 540))
    adam = recipes["attention"].make_optimizer()
    assert isinstance(adam, keras.optimizers.Adam)
    assert adam.epsilon == 1e-8


@pytest.mark.parametrize(
    ("options", "decayed_similarity"),
    [
        ({"similarity": "diagonal"}, None),
        ({"similarity": "unconstrained"}, 2.5e-3),
        ({"similarity": "unconstrained", "predictor": "sphere"}, None),
    ],
    ids=str,
)
def test_decay_is_that_of_the_authors(options, decayed_similarity):
    model = tiny_model(**options)
    expected = 0.0
    for variable in model.trainable_variables:
        value = ops.convert_to_numpy(variable).astype("float64")
        if variable.name in ("kernel", "gamma", "beta"):
            expected += 2.5e-4 * np.sum(value**2)
        elif decayed_similarity is not None and variable.name == "similarity":
            expected += decayed_similarity * np.sum(value**2)
    np.testing.assert_allclose(float(sum(model.losses)), expected, rtol=1e-5)


def test_inputs_are_scaled_as_published():
    for name, expected in (("paper", (0, 255)), ("attention", (-0.996094, 0.996094))):
        backbone = keras.Sequential([keras.Input((2,)), keras.layers.Identity()])
        model = methods.trainable(backbone, methods.RECIPES[name])
        found = ops.convert_to_numpy(model(np.array([[0.0, 1.0]], "float32")))
        np.testing.assert_allclose(found[0], expected, rtol=1e-5)


def test_predictors_are_the_authors_or_the_packages():
    for network_default, published in ((False, True), (True, False)):
        for name in ("dynamic_dns", "dynamic_dns_shared"):
            model = methods.build(
                *("cnn9", methods.METHODS[name], (8, 8, 3), 4, 0.9, published),
                filters=(4, 4, 20),
            )
            layers = [layer for layer in model.layers if hasattr(layer, "predictor")]
            recipes = [
                getattr(each.predictor, "predictor", each.predictor) for each in layers
            ]
            assert {each.start == "identity" for each in recipes} == {network_default}
            if name == "dynamic_dns":
                norms = {"momentum": 0.9, "synchronized": False}
                warmup = {} if network_default else {"momentum_warmup": False}
                assert recipes[0].batch_normalization == {**norms, **warmup}
                networks = [each.comparison.network for each in layers]
                widths = {each.get_layer("hidden").filters for each in networks}
                assert widths == ({64} if published else {8, 10})


@pytest.mark.parametrize("measure", ["parameters", "multiply_adds"])
def test_plain_networks_as_large_as_another(measure):
    name = {"parameters": "cnn_parameters", "multiply_adds": "cnn_cost"}[measure]
    arguments = ((8, 8, 3), 4, 0.9, False)
    options = {"filters": (6, 8, 16)}
    row = methods.METHODS[name]
    wanted = methods.build("cnn9", methods.METHODS["dynamic_dns"], *arguments, **options)
    target = methods.size_of(wanted)[measure]
    found = methods.alike_filters("cnn9", row, *arguments, **options)
    last = found[-1]
    assert found == [round(6 * last / 16), round(8 * last / 16), last]

    def distance(last):
        widths = [round(each * last / 16) for each in (6, 8, 16)]
        plain = methods.METHODS["cnn"]
        model = methods.build("cnn9", plain, *arguments, filters=widths)
        return abs(methods.size_of(model)[measure] - target)

    assert distance(last) <= min(distance(last - 1), distance(last + 1))
    built = methods.build("cnn9", row, *arguments, **options)
    assert methods.size_of(built)[measure] - target in (
        distance(last),
        -distance(last),
    )


def test_adamw_spares_similarities():
    backbone = nsl_keras.backbones.cnn9(
        (8, 8, 3), 4, convolutions(similarity="diagonal"), filters=(4, 4, 4)
    )
    recipe = dataclasses.replace(
        methods.RECIPES["paper"].scaled(6), optimizer="adamw", weight_decay=0.5, penalty=0.0
    )
    model = methods.trainable(backbone, recipe, False)
    gradients = [ops.zeros_like(each) for each in model.trainable_variables]
    before = [ops.convert_to_numpy(each) for each in model.trainable_variables]
    model.optimizer.apply(gradients, model.trainable_variables)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        changed = bool(np.any(ops.convert_to_numpy(variable) != old))
        assert changed == (variable.name != "similarity" and bool(old.any()))


@pytest.mark.long
def test_every_row_of_every_table_can_be_built():
    sizes = {"cnn9": 8, "cnn10": 32, "spherenet": 32}
    tables = methods.TABLES.values()
    # Tables share rows, which are built once.
    rows = {(t.network, name): row for t in tables for name, row in t.methods.items()}
    parameters = {}
    for (network, name), row in rows.items():
        shape = (sizes[network], sizes[network], 3)
        model = methods.build(network, row, shape, 10, momentum=0.9)
        assert model.output_shape == (None, 10)
        parameters[network, name] = sum(
            int(np.prod(v.shape)) for v in model.trainable_variables
        )
    for table in tables:
        counts = {}
        for name, method in table.methods.items():
            # Predictors of different kinds have the same parameters.
            counts[name] = (
                parameters[table.network, name],
                method.similarity.get("predictor"),
                method.options.get("sphere"),
            )
        assert len(set(counts.values())) == len(counts), counts
        assert table.baseline in table.methods
