"""A classifier as a function of its variables and batch statistics."""

import inspect

import keras
import numpy as np
import pytest
from keras import layers, ops

import nsl_keras
from nsl_keras import rewiring
from nsl_keras.few_shot.functional import FunctionalClassifier, select_variables
from nsl_keras.layers import NeuralSimilarityConv2D


def network(*after_norm, similarity=False, norm=layers.BatchNormalization, **norm_options):
    convolution = (
        NeuralSimilarityConv2D(3, 3, name="convolution")
        if similarity
        else layers.Conv2D(3, 3, name="convolution")
    )
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            convolution,
            norm(name="norm", **norm_options),
            *after_norm,
            layers.Flatten(),
            layers.Dense(4, name="head"),
        ],
        name="net",
    )


def images(count=6, seed=0):
    shape = (count, 5, 5, 2)
    return (3 * np.random.default_rng(seed).normal(size=shape) + 1).astype("float32")


def numbers(tensor):
    return np.asarray(ops.convert_to_numpy(tensor))


def normalized_logits(model, x, mean, variance):
    """The rest of `network`, after the convolution, by hand."""
    maps = numbers(model.get_layer("convolution")(x))
    maps = (maps - mean) / np.sqrt(variance + model.get_layer("norm").epsilon)
    head = model.get_layer("head")
    return maps.reshape(len(x), -1) @ numbers(head.kernel) + numbers(head.bias)


def moments(model, x):
    maps = numbers(model.get_layer("convolution")(x))
    return maps.mean(axis=(0, 1, 2)), maps.var(axis=(0, 1, 2))


def test_selections():
    model = network(similarity=True)

    def names(selection):
        return [variable.path for variable in select_variables(model, selection)]

    assert names("similarity") == ["net/convolution/comparison/similarity"]
    assert names("classifier") == ["net/head/kernel", "net/head/bias"]
    assert names("similarity+classifier") == names("similarity") + names("classifier")
    assert names("all") == [each.path for each in model.trainable_variables]
    assert names(["net/head/bias", "gamma"]) == ["net/norm/gamma", "net/head/bias"]
    assert names(lambda each: "head" in each.path) == names("classifier")
    model.get_layer("convolution").trainable = False
    with pytest.raises(ValueError, match="`inner_variables` must match trainable"):
        names("similarity")


def test_classifier_is_the_last_layer_of_nested_and_subclassed_models():
    body = network()
    inputs = keras.Input((5, 5, 2))
    nested = keras.Model(inputs, layers.Activation("linear")(body(inputs)))
    head = body.get_layer("head").trainable_variables

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = body

        def call(self, inputs, training=None):
            return self.body(inputs, training=training)

    subclassed = Subclassed()
    subclassed(images())
    for model in (nested, subclassed):
        found = select_variables(model, "classifier")
        assert [id(each) for each in found] == [id(each) for each in head]


@pytest.mark.parametrize(
    "selection",
    ["similarity", "similarity+classifier", ["head", "gamma"], lambda each: False],
)
def test_a_selection_that_matches_nothing_lists_the_names(selection):
    with pytest.raises(ValueError, match=r"which are: net/convolution/kernel, .*head/bias"):
        select_variables(network(), selection)


def test_the_message_says_what_is_frozen():
    model = network()
    model.get_layer("head").trainable = False
    message = (
        r"kernel.* \(layers with trainable=False have none\)\. Received: "
        r"inner_variables='similarity\+classifier', of which 'simil"
    )
    with pytest.raises(ValueError, match=message):
        select_variables(model, "similarity+classifier")


@pytest.mark.parametrize("selection", ["head", 3, [3]])
def test_other_selections_are_refused(selection):
    with pytest.raises(ValueError, match="`inner_variables` must be one of"):
        select_variables(network(), selection)


@pytest.mark.parametrize("policy", ["support", "transductive", "moving"])
def test_policies(policy):
    model = network()
    norm = model.get_layer("norm")
    norm.moving_mean.assign([1.0, -1.0, 0.5])
    norm.moving_variance.assign([2.0, 3.0, 4.0])
    before = model.get_weights()
    functional = FunctionalClassifier(model, model.trainable_variables, policy)
    support, queries = images(), images(seed=1)
    mean, variance = {
        "support": moments(model, support),
        "transductive": moments(model, queries),
        "moving": (numbers(norm.moving_mean), numbers(norm.moving_variance)),
    }[policy]
    found = functional.query_outputs(functional.values(), support, queries)
    expected = normalized_logits(model, queries, mean, variance)
    np.testing.assert_allclose(numbers(found), expected, atol=1e-4)
    statistics = functional.batch_statistics(functional.values(), queries)
    for one, other in zip(statistics, moments(model, queries), strict=True):
        np.testing.assert_allclose(numbers(one), other, rtol=1e-4, atol=1e-5)
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)


@pytest.mark.parametrize(
    "norm", [layers.BatchNormalization, nsl_keras.layers.BatchNormalization]
)
def test_update_of_the_moving_statistics_is_that_of_training(norm):
    model, twin = network(norm=norm), network(norm=norm)
    functional = FunctionalClassifier(model, model.trainable_variables, "moving")
    twin.set_weights(model.get_weights())
    statistics = functional.batch_statistics(functional.values(), images())
    functional.update_moving_statistics(statistics, len(images()))
    twin(images(), training=True)
    for one, other in zip(model.weights, twin.weights, strict=True):
        np.testing.assert_allclose(numbers(one), numbers(other), atol=1e-5)


def test_frozen_norms_keep_to_their_moving_statistics():
    model = network()
    model.get_layer("norm").trainable = False
    functional = FunctionalClassifier(model, model.trainable_variables, "support")
    found, statistics = functional.outputs(functional.values(), images())
    assert statistics == []
    np.testing.assert_allclose(numbers(found), numbers(model(images())), atol=1e-5)
    found = functional.query_outputs(functional.values(), images(seed=1), images())
    np.testing.assert_allclose(numbers(found), numbers(model(images())), atol=1e-5)


def test_random_layers_are_off():
    plain = network()
    noisy = network(layers.Dropout(0.5), layers.GaussianNoise(1.0))
    noisy.set_weights(plain.get_weights())
    found = [FunctionalClassifier(model).outputs([], images()) for model in (plain, noisy)]
    np.testing.assert_array_equal(numbers(found[0][0]), numbers(found[1][0]))


def test_logits_are_float32_under_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = network()
    functional = FunctionalClassifier(model, model.trainable_variables)
    logits, statistics = functional.outputs(functional.values(), images())
    for tensor in (logits, *statistics, *functional.values()):
        assert keras.backend.standardize_dtype(tensor.dtype) == "float32"


def test_unsuitable_models_are_refused():
    with pytest.raises(ValueError, match=r"must be built.*unbuilt model 'bare'"):
        FunctionalClassifier(keras.Sequential([layers.Dense(2)], name="bare"))
    with pytest.raises(ValueError, match=r"must return logits.*'softmax'"):
        FunctionalClassifier(
            keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Softmax()])
        )
    with pytest.raises(ValueError, match=r"must return logits.*'probabilities'"):
        last = layers.Dense(2, activation="softmax", name="probabilities")
        FunctionalClassifier(keras.Sequential([keras.Input((3,)), last]))
    FunctionalClassifier(
        keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Softmax()]),
        logits=False,
    )
    with pytest.raises(ValueError, match="layer 'norm' with synchronized=True"):
        FunctionalClassifier(network(synchronized=True))
    with pytest.raises(ValueError, match="`batch_normalization` must be one of"):
        FunctionalClassifier(network(), batch_normalization="query")
    norm = layers.BatchNormalization(name="twice")
    inputs = keras.Input((3,))
    shared = keras.Model(inputs, layers.Dense(2)(norm(norm(inputs))))
    with pytest.raises(ValueError, match="layer 'twice', which is called more often"):
        FunctionalClassifier(shared)
    FunctionalClassifier(shared, batch_normalization="transductive")


def test_renormalization_is_refused():
    if "renorm" not in inspect.signature(layers.BatchNormalization).parameters:
        pytest.skip("This version of Keras has no batch renormalization.")
    with pytest.raises(ValueError, match="layer 'norm' with renorm=True"):
        FunctionalClassifier(network(renorm=True))


class Hidden(layers.Layer):
    """A layer with a batch norm out of reach."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(name="hidden_norm", momentum=0.9)

    def call(self, inputs, training=None):
        return self.norm(inputs, training=training)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = network()
        self.body.trainable = False
        self.norm = Hidden()

    def call(self, inputs, training=None):
        return self.norm(self.body(inputs, training=training), training=training)


def test_norms_out_of_reach_are_named():
    subclassed = Subclassed()
    subclassed(images())
    body = network()
    graph = keras.Sequential([keras.Input((5, 5, 2)), Hidden(), *body.layers])
    for model in (subclassed, graph):
        for policy in ("support", "transductive"):
            message = f"must be \"moving\".*='{policy}', and layer 'hidden_norm' inside"
            with pytest.raises(ValueError, match=message):
                FunctionalClassifier(model, batch_normalization=policy)
    subclassed.norm.trainable = False
    frozen = FunctionalClassifier(subclassed)
    np.testing.assert_allclose(frozen.outputs([], images())[0], subclassed(images()))
    subclassed.norm.trainable = True
    with pytest.raises(ValueError, match="layer 'hidden_norm' inside"):
        frozen.outputs([], images())


def test_statistics_of_norms_out_of_reach():
    """Under the policy "moving", by the training mode of the whole model."""
    model = Subclassed()
    inputs = model.body(images())
    model(images())
    functional = FunctionalClassifier(model, (), "moving")
    mean, variance = functional.batch_statistics([], images())
    np.testing.assert_allclose(mean, np.mean(inputs, axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, np.var(inputs, axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.norm.norm.moving_mean, np.zeros(4))


def test_statistics_beside_norms_out_of_reach():
    """Those of unbiased batch norms, which count the first batch whole."""
    model = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            nsl_keras.layers.BatchNormalization(name="unbiased"),
            Hidden(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    functional = FunctionalClassifier(model, (), "moving")
    mean, variance, *_ = functional.batch_statistics([], images())
    np.testing.assert_allclose(mean, images().mean((0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, images().var((0, 1, 2)), rtol=1e-4, atol=1e-5)


def test_norms_of_predictors_and_of_nested_models_are_within_reach():
    options = {"padding": "same", "predictor": "cnn"}
    inner = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            nsl_keras.layers.NeuralSimilarityConv2D(2, 3, **options),
            layers.BatchNormalization(),
        ]
    )
    inputs = keras.Input((5, 5, 2))
    outputs = layers.Dense(4)(layers.Flatten()(inner(inputs)))
    model = keras.Model(inputs, outputs)
    layer = model.layers[1].layers[0]
    for variable in layer.trainable_variables:
        variable.assign(variable + 0.3)
    nodes = len(layer._inbound_nodes), layer.output
    functional = FunctionalClassifier(model)
    logits, statistics = functional.outputs([], images())
    assert len(statistics) == 6
    assert (len(layer._inbound_nodes), layer.output) == nodes
    for each in rewiring.sublayers(model):
        if isinstance(each, layers.BatchNormalization):
            each.momentum = 0.0
    np.testing.assert_allclose(logits, model(images(), training=True), atol=1e-4)
    for one, other in zip(statistics, functional.moving_statistics, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_shared_predictor_is_called_more_than_once():
    recipe = nsl_keras.predictors.SimilarityPredictor(batch_normalization=True)
    predictor = nsl_keras.predictors.SharedSimilarityPredictor(recipe, adapted_filters=2)
    shared = keras.Sequential([keras.Input((6, 6, 1))])
    for _ in range(2):
        shared.add(nsl_keras.layers.NeuralSimilarityConv2D(2, 3, predictor=predictor))
    batch = np.random.default_rng(0).normal(size=(3, 6, 6, 1))
    with pytest.raises(ValueError, match="which is called more often"):
        FunctionalClassifier(shared).outputs([], batch)
    other = FunctionalClassifier(shared, (), "transductive")
    assert np.all(np.isfinite(other.outputs([], batch)[0]))


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="TensorFlow's alone")
def test_synchronized_norms_are_refused():
    with pytest.raises(ValueError, match="layer 'norm' with synchronized=True"):
        FunctionalClassifier(network(synchronized=True))


# Max poolings, whose stand-ins are differentiated faster.


@pytest.fixture(name="pooled", scope="module")
def _pooled():
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(3, 3, padding="same"),
            layers.MaxPooling2D(2, name="pool"),
            keras.Sequential([layers.MaxPooling2D(2, strides=1, padding="same")]),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def test_poolings_have_stand_ins_that_change_no_number(pooled):
    x = np.random.default_rng(0).normal(size=(5, 6, 6, 2)).astype("float32")
    live = pooled.get_layer("pool")
    before = dict(vars(live))
    classifier = FunctionalClassifier(pooled, pooled.trainable_variables)
    assert classifier._graph is not pooled
    np.testing.assert_allclose(
        numbers(classifier.outputs(classifier.values(), x)[0]),
        numbers(pooled(x)),
        atol=1e-6,
    )
    assert pooled.get_layer("pool") is live and vars(live) == before
    assert (
        FunctionalClassifier(pooled, pooled.trainable_variables, second_order=False)._graph
        is pooled
    )


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's kernels")
def test_gradients_of_poolings_stand_beside_a_pooling(pooled):
    """Only there the fast kernel is taken; a loop has its gradient in another graph."""
    import tensorflow as tf

    model = nsl_keras.few_shot.MAML(pooled, inner_steps=2)
    x, labels = tf.zeros((2, 4, 6, 6, 2)), tf.tile([[0, 1, 2, 3]], (2, 1))
    model.build((x.shape, labels.shape, x.shape))

    @tf.function
    def gradients(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model((images, labels, images)) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    graph = gradients.get_concrete_function(x).graph.as_graph_def()
    holding = [
        [node.op for node in function.node_def]
        for function in graph.library.function
        if any(node.op == "MaxPoolGrad" for node in function.node_def)
    ]
    assert holding
    assert all("MaxPool" in operations for operations in holding)
