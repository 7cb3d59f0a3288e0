"""Comparison of a model with the one that a conversion makes of it."""

import keras
import numpy as np
from helpers import randomize, relative_error

from nsl_keras import graphs
from nsl_keras.convert import add_similarity, fold
from nsl_keras.similarity.neural_similarity import similarities_of

RNG = np.random.default_rng(4)
IMAGES = RNG.normal(size=(4, 8, 9, 3)).astype("float32")


def difference(model, other, inputs):
    """Largest difference of the outputs, relative to their largest entry."""
    return deviation(model(inputs), other(inputs))


def deviation(expected, received):
    pairs = zip(keras.tree.flatten(expected), keras.tree.flatten(received), strict=True)
    return max(relative_error(two, one) for one, two in pairs)


def stack(*parts, shape=IMAGES.shape[1:]):
    """A Sequential model with random weights, but for those that layers have already."""
    model = keras.Sequential([keras.Input(shape), *parts], name="stack")
    randomize(model.weights)
    return model


def converted(model):
    """Names of the layers with a similarity."""
    return [layer.name for layer in graphs.layers(model) if similarities_of(layer)]


def trainable_names(model):
    return sorted(variable.name for variable in model.trainable_variables)


def classes_of(model):
    return {type(layer) for layer in graphs.layers(model)}


def graph_of(model):
    operations = getattr(model, "operations", model.layers)  # Sequential models have none.
    return [(type(each).__name__, name_of(each)) for each in operations]


def name_of(operation):
    """`clone_model` renames unnamed inputs, and Keras before 3.11 what is no layer."""
    is_input = isinstance(operation, keras.layers.InputLayer)
    is_layer = isinstance(operation, keras.layers.Layer)
    return operation.name if is_layer and not is_input else None


def assert_independent(model, other, inputs):
    """Training one model leaves the other's outputs as they are."""
    assert not {id(v) for v in model.variables} & {id(v) for v in other.variables}
    before = model(inputs)
    randomize(other.weights)
    assert deviation(before, model(inputs)) == 0
    assert difference(model, other, inputs) > 1e-3


def check_conversion(plain, inputs, names, tolerance=1e-5, **options):
    """Adds similarities, then folds them if they are static; checks each model.

    Returns:
        The model with randomized similarities.
    """
    model = add_similarity(plain, **options)
    assert model.name == plain.name
    assert sorted(converted(model)) == sorted(names)
    assert difference(plain, model, inputs) <= tolerance
    randomize(model.trainable_variables, 0.3 if options.get("predictor") is None else 0.1)
    assert difference(plain, model, inputs) > 1e-3
    if options.get("predictor") is None:
        folded = fold(model)
        assert difference(model, folded, inputs) <= tolerance
        assert classes_of(folded) == classes_of(plain)
        assert graph_of(folded) == graph_of(plain)
        paths = [[each.path for each in model.weights] for model in (folded, plain)]
        assert paths[0] == paths[1]
        assert_independent(model, folded, inputs)
    before = model.get_weights()
    assert_independent(plain, model, inputs)
    model.set_weights(before)
    return model
