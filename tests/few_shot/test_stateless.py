"""A model as a function of its variables and batch statistics."""

import keras
import numpy as np
import pytest
from helpers import Subclassed, as_numpy, randomize, refused, stacked
from keras import layers, ops

import nsl_keras
from nsl_keras import few_shot
from nsl_keras.few_shot.stateless import StatelessModel, select_variables
from nsl_keras.layers import BatchNormalization, NeuralSimilarityConv2D


def network(similarity=False, norm=BatchNormalization):
    convolution = NeuralSimilarityConv2D if similarity else layers.Conv2D
    before = [convolution(3, 3, name="convolution"), norm(name="norm")]
    head = [layers.Flatten(), layers.Dense(4, name="head")]
    return stacked((5, 5, 2), *before, *head, name="net")


def images(count=6, seed=0):
    shape = (count, 5, 5, 2)
    return (3 * np.random.default_rng(seed).normal(size=shape) + 1).astype("float32")


def test_selections():
    model = network(similarity=True)

    def names(selection):
        return [variable.path for variable in select_variables(model, selection)]

    assert names("similarity") == ["net/convolution/bilinear_form/similarity"]
    assert names("classifier") == ["net/head/kernel", "net/head/bias"]
    assert names("similarity+classifier") == names("similarity") + names("classifier")
    assert names("all") == [each.path for each in model.trainable_variables]
    assert names(["net/head/bias", "gamma"]) == ["net/norm/gamma", "net/head/bias"]
    assert names([2, 0]) == [model.variables[place].path for place in (2, 0)]
    model.get_layer("convolution").trainable = False
    with refused("`inner_variables` must be"):
        names("similarity")


class Named(layers.Layer):
    """Somebody else's weight, called as the parameters of `M` are."""

    def build(self, input_shape):
        self.scale = self.add_weight(name="similarity", shape=(), initializer="ones")

    def call(self, inputs):
        return self.scale * inputs


def test_similarities_are_selected_by_the_layer_not_by_the_name():
    model = keras.Sequential([network(similarity=True), Named()])
    (selected,) = select_variables(model, "similarity")
    assert selected is model.layers[0].layers[0].bilinear_form.similarity_parameters


@pytest.mark.parametrize("shared", [False, True])
def test_predictors_alone_adapt(shared):
    predictor = nsl_keras.predictors.SharedSimilarityPredictor() if shared else "sphere"
    convolutions = [NeuralSimilarityConv2D(3, 3, predictor=predictor) for _ in range(2)]
    model = stacked((5, 5, 2), *convolutions, layers.Flatten(), layers.Dense(2))
    randomize(model.trainable_variables, 0.1)
    networks = [each.bilinear_form.network for each in convolutions]
    predicting = {id(each) for network in networks for each in network.trainable_variables}
    options = {"inner_learning_rate": 0.1, "batch_normalization": "moving"}
    learner = few_shot.MAML(model, "predictor", inner_steps=1, **options)
    adapted = learner.adapt(images(), np.arange(6) % 2)
    for variable, copy in zip(model.variables, adapted.layers[0].variables, strict=True):
        changed = np.any(as_numpy(copy) != as_numpy(variable))
        assert changed == (id(variable) in predicting), variable.path
    both = select_variables(model, "predictor+classifier")
    assert {id(each) for each in both} == predicting | {
        id(each) for each in model.layers[-1].trainable_variables
    }


def test_classifier_is_the_last_layer_also_inside_a_nested_model():
    body, inputs = network(), keras.Input((5, 5, 2))
    nested = keras.Model(inputs, layers.Activation("linear")(body(inputs)))
    head = [id(each) for each in body.get_layer("head").trainable_variables]
    assert [id(each) for each in select_variables(nested, "classifier")] == head
    subclassed = Subclassed(body)
    subclassed(images())
    assert len(select_variables(subclassed, "all")) == len(subclassed.trainable_variables)
    with refused("`model` must be functional or Sequential"):
        select_variables(subclassed, "classifier")


@pytest.mark.parametrize(
    "selection",
    ["similarity", "predictor", "classifier+head", ["head", "gamma"], [0.5], []],
)
def test_wrong_selections(selection):
    message = r"`inner_variables` must be .*variables \['net/convolution/kernel'.*Received"
    with refused(message):
        select_variables(network(), selection)


def test_what_is_frozen_does_not_adapt_unless_all_is():
    model = network()
    model.get_layer("head").trainable = False
    with refused(r"trainable variables \['net.*\(layers with trainable=False have"):
        select_variables(model, "classifier")
    model.trainable = False
    assert len(select_variables(model, "classifier")) == 2
    assert not model.trainable_variables


def test_trainable_norms_of_keras_are_refused():
    model = network(norm=layers.BatchNormalization)
    with refused(r"batch norms \['norm'\].*convert_batch_norms\(model\)`.*='support'"):
        StatelessModel(model)
    model.get_layer("norm").trainable = False
    thawed = StatelessModel(model)
    model.get_layer("norm").trainable = True
    with refused(r"batch norms \['norm'\] of Keras"):
        thawed.query_outputs([], images(), images())
    StatelessModel(nsl_keras.convert.convert_batch_norms(model))


def test_norms_inside_layers_normalize_by_the_batch():
    """Those of a predictor, of a nested model and of a custom layer."""

    class Custom(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = BatchNormalization()

        def call(self, inputs):
            return self.norm(inputs)

    dynamic = NeuralSimilarityConv2D(2, 3, padding="same", predictor="cnn")
    inputs = keras.Input((5, 5, 2))
    inner = keras.Sequential([inputs, dynamic, BatchNormalization()])
    outputs = layers.Dense(4)(layers.Flatten()(Custom()(inner(inputs))))
    model = keras.Model(inputs, outputs)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3)
    found, statistics = StatelessModel(model).outputs([], images())
    assert len(statistics) == 8
    np.testing.assert_allclose(found, model(images(), training=True), atol=1e-4)


def test_a_sum_of_two_classifiers_has_no_last_layer():
    inputs = keras.Input((4,))
    both = [layers.Dense(3, name=name)(inputs) for name in ("one", "other")]
    model = keras.Model(inputs, layers.Add()(both))
    assert len(select_variables(model, "all")) == 4
    with refused("end in one layer with weights, its classifier"):
        select_variables(model, "classifier")


class WithInexactGradient(layers.Layer):
    """Its gradient is right, and a constant: it has no derivative."""

    def call(self, inputs):
        slope = ops.stop_gradient(2 * inputs)
        square = ops.stop_gradient(inputs**2)
        return square + slope * (inputs - ops.stop_gradient(inputs))


def error(*stack, **options):
    ends = layers.Flatten(), layers.Dense(3, "tanh")
    model = stacked((5, 5, 2), layers.Dense(2, "tanh"), *stack, *ends)
    return few_shot.check_second_order(model, images(2), **options)


def test_exact_derivatives():
    assert error(layers.Conv2D(3, 3, activation="softplus")) < 0.01
    assert error(layers.ReLU(), layers.MaxPooling2D(), step=1e-4) < 0.1


def test_inexact_derivatives_and_errors():
    ones, model = np.ones((2, 3)), stacked((3,), layers.Dense(2), WithInexactGradient())
    # Of the curvature of y^4, 12 y^2, it lacks that of the inner square, 4 y^2.
    np.testing.assert_allclose(few_shot.check_second_order(model, ones), 1 / 3, rtol=1e-3)
    with refused("`step` must be a finite number above zero"):
        few_shot.check_second_order(model, ones, step=0.0)
    with refused("`check_second_order` needs a built layer"):
        few_shot.check_second_order(keras.Sequential([layers.Dense(2)]), ones)
