"""MAML: outer gradients, policies, steps, checks, and `fit` around it."""

import functools
import itertools
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

import nsl_keras
from nsl_keras.few_shot import MAML

BACKEND = keras.backend.backend()
tensorflow_only = pytest.mark.skipif(BACKEND == "jax", reason="TensorFlow's alone")
WAYS = 2


def loss_of_logits():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(image_shape=(6, 6, 1)):
    """Smooth but for the pooling, for finite differences."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(2, 3, padding="same", activation="softplus", name="convolution"),
            layers.BatchNormalization(name="norm"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(WAYS, name="head"),
        ]
    )


def perceptron():
    """What `fit` compiles fast."""
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Flatten(),
            layers.BatchNormalization(name="norm"),
            layers.Dense(WAYS, name="head"),
        ]
    )


def episodes(count=2, support=4, queries=6, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    support_labels = np.tile(np.arange(support) % WAYS, (count, 1)).astype("int32")
    query_labels = np.tile(np.arange(queries) % WAYS, (count, 1)).astype("int32")

    def pictures(labels):
        noise = random.normal(size=(*labels.shape, 6, 6, 1))
        return (noise + labels[..., None, None, None]).astype(dtype)

    inputs = (pictures(support_labels), support_labels, pictures(query_labels))
    return inputs, query_labels


def built(*args, shape=tuple, **kwargs):
    model = MAML(*args, **kwargs)
    inputs, _ = episodes()
    model.build([shape((None, *each.shape[1:])) for each in inputs])
    return model


def numbers(tensor):
    return np.asarray(ops.convert_to_numpy(tensor))


# The same, written out: one small network, its batch norm and the inner steps.


def gradients(function, at):
    if BACKEND == "jax":
        import jax

        return jax.grad(function)(list(at))
    import tensorflow as tf

    at = [tf.convert_to_tensor(each) for each in at]
    with tf.GradientTape() as tape:
        tape.watch(at)
        value = function(at)
    return tape.gradient(value, at, unconnected_gradients="zero")


def mean_cross_entropy(logits, labels):
    return -ops.mean(
        ops.take_along_axis(ops.log_softmax(logits), ops.cast(labels, "int32")[:, None], 1)
    )


def logits_by_hand(weights, x, statistics=None):
    kernel, bias, gamma, beta, head, head_bias = weights
    maps = ops.conv(x, kernel, padding="same") + bias
    maps = ops.log(1 + ops.exp(maps))
    if statistics is None:
        mean = ops.mean(maps, (0, 1, 2))
        statistics = mean, ops.mean((maps - mean) ** 2, (0, 1, 2))
    mean, variance = statistics
    maps = (maps - mean) / ops.sqrt(variance + 1e-3) * gamma + beta
    maps = ops.max_pool(maps, 2, strides=2)
    return ops.reshape(maps, (maps.shape[0], -1)) @ head + head_bias, statistics


def query_logits_by_hand(
    weights, episode, steps, rate, first_order, policy="support", stored=None
):
    """`steps` may be a list of lists: the places of the variables each step changes."""
    support, labels, queries = episode
    if isinstance(steps, int):
        steps = [range(len(weights))] * steps
    in_steps = stored if policy == "moving" else None
    for places in steps:

        def inner_loss(at, weights=weights):
            return mean_cross_entropy(logits_by_hand(at, support, in_steps)[0], labels)

        found = gradients(inner_loss, weights)
        if first_order:
            found = [ops.stop_gradient(each) for each in found]
        weights = [
            weight - rate * gradient if place in places else weight
            for place, (weight, gradient) in enumerate(zip(weights, found, strict=True))
        ]
    statistics = {
        "support": logits_by_hand(weights, support)[1],
        "transductive": None,
        "moving": stored,
    }[policy]
    return logits_by_hand(weights, queries, statistics)[0]


def outer_gradients_by_hand(weights, inputs, query_labels, *args, **kwargs):
    def loss(weights):
        total = 0
        for episode, labels in zip(zip(*inputs, strict=True), query_labels, strict=True):
            logits = query_logits_by_hand(weights, episode, *args, **kwargs)
            total = total + mean_cross_entropy(logits, labels)
        return total / len(query_labels)

    return [numbers(each) for each in gradients(loss, weights)]


def outer_gradients(model, inputs, query_labels, mode):
    """Of the compiled loss with respect to all trainable variables."""
    variables = model.trainable_variables
    loss_function = loss_of_logits()

    def loss(values):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return loss_function(query_labels, model(inputs, training=True))

    values = [ops.convert_to_tensor(variable) for variable in variables]
    if BACKEND == "jax":
        import jax

        found = (jax.jit(jax.grad(loss)) if mode == "jit" else jax.grad(loss))(values)
    else:
        import tensorflow as tf

        def compute(values):
            return gradients(loss, values)

        if mode != "eager":
            compute = tf.function(compute, jit_compile=mode == "jit")
        found = compute(values)
    return [numbers(each) for each in found]


def as_float64(model):
    """Gives the network's variables values that are nothing special."""
    random = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(numbers(variable) + 0.3 * random.normal(size=variable.shape))


def assert_gradients_close(found, expected, tolerance):
    scale = max(np.abs(each).max() for each in expected)
    assert scale > 1e-3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * scale)


def precision(mode="eager"):
    """float64 where it is to be had: XLA has no second gradient of max pooling in it."""
    if BACKEND == "jax" or mode == "jit":
        return "float32", 1e-3
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return "float64", 1e-10


@functools.cache
def written_out(steps, first_order, dtype):
    """Some weights of `network`, and the outer gradients at them."""
    random = np.random.default_rng(3)
    shapes = [(3, 3, 1, 2), (2,), (2,), (2,), (18, WAYS), (WAYS,)]
    weights = [0.5 * random.normal(size=shape).astype(dtype) for shape in shapes]
    tensors = [ops.convert_to_tensor(each) for each in weights]
    inputs, labels = episodes(dtype=dtype)
    return weights, outer_gradients_by_hand(
        tensors, inputs, labels, steps, 0.3, first_order
    )


#: Steps, first order and mode of the cases that run always.
SHORT = [(1, True, "eager"), (2, False, "graph")]


@pytest.mark.parametrize(
    ("steps", "first_order", "mode"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for case in itertools.product((1, 2, 5), (False, True), ("eager", "graph", "jit"))
    ],
)
def test_outer_gradients_equal_those_written_out(steps, first_order, mode):
    if BACKEND == "jax" and mode == "graph":
        pytest.skip("JAX has no graphs.")
    dtype, tolerance = precision(mode)
    inputs, labels = episodes(dtype=dtype)
    model = built(
        network(), inner_steps=steps, inner_learning_rate=0.3, first_order=first_order
    )
    weights, expected = written_out(steps, first_order, dtype)
    for variable, value in zip(model.model.trainable_variables, weights, strict=True):
        variable.assign(value)
    found = outer_gradients(model, inputs, labels, mode)
    assert_gradients_close(found, expected, tolerance)
    _, other = written_out(steps, not first_order, dtype)
    with pytest.raises(AssertionError):  # The two orders differ, so the test can tell.
        assert_gradients_close(found, other, 1e-2)


@tensorflow_only
@pytest.mark.parametrize(
    ("steps", "policy"),
    [
        (1, "transductive"),
        pytest.param(2, "moving", marks=pytest.mark.long),
        pytest.param(5, "support", marks=pytest.mark.long),
    ],
)
def test_outer_gradients_equal_finite_differences(steps, policy):
    import tensorflow as tf

    dtype, _ = precision()
    inputs, labels = episodes(dtype=dtype)
    model = built(
        network(),
        inner_steps=steps,
        inner_learning_rate=0.3,
        learning_rate_form="learned",
        batch_normalization=policy,
    )
    as_float64(model)
    found = outer_gradients(model, inputs, labels, "eager")
    variables = model.trainable_variables
    assert len(variables) == 12
    random = np.random.default_rng(1)

    @tf.function
    def loss(values):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return loss_of_logits()(labels, model(inputs, training=True))

    values = [ops.convert_to_tensor(variable) for variable in variables]
    for place, gradient in enumerate(found):
        direction = random.normal(size=gradient.shape)
        above, below = list(values), list(values)
        above[place] = values[place] + 1e-6 * direction
        below[place] = values[place] - 1e-6 * direction
        expected = float(loss(above) - loss(below)) / 2e-6
        received = np.sum(gradient * direction)
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("policy", ["support", "transductive", "moving"])
def test_policies_equal_a_direct_computation(policy):
    dtype, tolerance = precision()
    inputs, labels = episodes(dtype=dtype)
    model = built(
        network(), inner_steps=2, inner_learning_rate=0.3, batch_normalization=policy
    )
    as_float64(model.model)
    norm = model.model.get_layer("norm")
    norm.moving_mean.assign([0.7, 1.1])
    norm.moving_variance.assign([1.5, 0.4])
    stored = tuple(map(ops.convert_to_tensor, (norm.moving_mean, norm.moving_variance)))
    weights = [ops.convert_to_tensor(each) for each in model.model.trainable_variables]
    arguments = (2, 0.3, False, policy, stored)
    found = outer_gradients(model, inputs, labels, "eager")
    expected = outer_gradients_by_hand(weights, inputs, labels, *arguments)
    assert_gradients_close(found, expected, tolerance)
    logits = numbers(model(inputs))
    for row, episode in zip(logits, zip(*inputs, strict=True), strict=True):
        expected = numbers(query_logits_by_hand(weights, episode, *arguments))
        np.testing.assert_allclose(row, expected, atol=10 * tolerance)
    alone = numbers(model((*inputs[:2], inputs[2][:, :1])))
    independent = np.allclose(alone, logits[:, :1], atol=1e-4)
    assert independent == (policy != "transductive")


def test_steps_of_parts_of_the_variables_in_training_and_at_test():
    dtype, tolerance = precision()
    inputs, _ = episodes(dtype=dtype)
    model = built(
        network(),
        inner_variables=lambda each: each.name == "gamma" or "convolution" in each.path,
        inner_steps=2,
        inner_learning_rate=0.3,
        extra_steps=1,
        test_inner_steps=1,
        test_extra_steps=3,
    )
    as_float64(model.model)
    weights = [ops.convert_to_tensor(each) for each in model.model.trainable_variables]
    for training, (inner, extra) in {True: (2, 1), False: (1, 3)}.items():
        steps = [[0, 1, 2]] * inner + [[4, 5]] * extra
        logits = numbers(model(inputs, training=training))
        for row, episode in zip(logits, zip(*inputs, strict=True), strict=True):
            expected = numbers(query_logits_by_hand(weights, episode, steps, 0.3, False))
            np.testing.assert_allclose(row, expected, atol=10 * tolerance)


def compiled(model, **options):
    options.setdefault("jit_compile", False)
    model.compile(
        keras.optimizers.Adam(0.01), loss_of_logits(), metrics=["accuracy"], **options
    )
    return model


def test_fit_learns_with_rates_and_leaves_the_moving_statistics():
    """In batches of five and two episodes."""
    inputs, labels = episodes(7)
    learned = {"inner_learning_rate": 0.1, "learning_rate_form": "learned"}
    model = compiled(MAML(perceptron(), inner_steps=1, **learned))
    with pytest.raises(ValueError, match="`inner_learning_rates` needs a built"):
        _ = model.inner_learning_rates
    history = model.fit(inputs, labels, batch_size=5, epochs=4, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    norm = model.model.get_layer("norm")
    np.testing.assert_array_equal(numbers(norm.moving_mean), 0)
    np.testing.assert_array_equal(numbers(norm.moving_variance), 1)
    rates = {path: float(rate) for path, rate in model.inner_learning_rates.items()}
    assert len(rates) == 4
    assert len(set(rates.values())) > 1
    apart = model.predict(inputs, batch_size=5, verbose=0)
    np.testing.assert_allclose(apart, numbers(model(inputs)), atol=1e-5)
    for variable in model.trainable_variables:
        if variable.name.startswith("inner_learning_rate"):
            variable.assign(-0.2)
    rates = model.inner_learning_rates.values()
    np.testing.assert_allclose([float(rate) for rate in rates], 0.2, rtol=1e-6)


@pytest.mark.parametrize("make", [network, lambda: Subclassed()])
def test_moving_statistics_follow_the_queries_in_training_alone(make):
    inputs, labels = episodes()
    model = MAML(make(), inner_steps=1, batch_normalization="moving")
    compiled(model, run_eagerly=True)
    model.evaluate(inputs, labels, verbose=0)
    convolution, norm = model.model.layers[:2]
    np.testing.assert_array_equal(numbers(norm.moving_mean), 0)
    model.inner_learning_rate = 1e-12  # The statistics are those of the network itself.
    maps = numbers(convolution(inputs[2].reshape(-1, 6, 6, 1)))
    model.fit(inputs, labels, batch_size=2, verbose=0)
    expected = 0.01 * maps.mean((0, 1, 2))
    np.testing.assert_allclose(numbers(norm.moving_mean), expected, rtol=1e-3)
    expected = 0.99 + 0.01 * maps.var((0, 1, 2))
    np.testing.assert_allclose(numbers(norm.moving_variance), expected, rtol=1e-4)


def test_moving_statistics_count_all_queries():
    inputs, labels = episodes(2)
    norm = nsl_keras.layers.BatchNormalization()
    layers = [norm, keras.layers.Flatten(), keras.layers.Dense(int(labels.max()) + 1)]
    plain = keras.Sequential([keras.Input(inputs[2].shape[2:]), *layers])
    MAML(plain, inner_steps=1, batch_normalization="moving")(inputs, training=True)
    assert float(norm.seen_examples) == labels.size


@pytest.mark.long
def test_fit_with_xla_equals_fit_without_and_stops_at_non_finite_losses():
    inputs, labels = episodes(2)
    plain = MAML(network(), inner_steps=1, batch_normalization="moving")
    compiled(plain, run_eagerly=True).build([each.shape for each in inputs])
    weights = plain.model.get_weights()
    plain.fit(inputs, labels, verbose=0)
    network_of_other = network()
    network_of_other.set_weights(weights)
    other = MAML(network_of_other, inner_steps=1, batch_normalization="moving")
    compiled(other, jit_compile=True).fit(inputs, labels, verbose=0)
    for one, two in zip(plain.weights, other.weights, strict=True):
        np.testing.assert_allclose(numbers(one), numbers(two), atol=2e-4)
    inputs[0][1] *= 1e25
    with pytest.raises(nsl_keras.NonFiniteLossError, match="batch 1 of epoch 1"):
        other.fit(inputs, labels, verbose=0)


def test_accumulated_gradients_of_single_episodes_are_those_of_their_batch():
    inputs, labels = episodes(2)
    networks = [network(), network()]
    networks[1].set_weights(networks[0].get_weights())
    before = networks[0].get_weights()
    for each, batch_size in zip(networks, (2, 1), strict=True):
        model = MAML(each, inner_steps=1, inner_learning_rate=0.1)
        accumulated = {} if batch_size == 2 else {"gradient_accumulation_steps": 2}
        optimizer = keras.optimizers.SGD(0.5, **accumulated)
        model.compile(optimizer, loss_of_logits(), run_eagerly=True)
        model.fit(inputs, labels, batch_size=batch_size, shuffle=False, verbose=0)
    for one, two in zip(*(each.get_weights() for each in networks), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    assert np.any(networks[0].get_weights()[-1] != before[-1])


@keras.saving.register_keras_serializable("test_maml")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.convolution = layers.Conv2D(2, 3, activation="relu")
        self.norm = layers.BatchNormalization()
        self.flatten = layers.Flatten()
        self.head = layers.Dense(WAYS)

    def call(self, inputs, training=None):
        maps = self.norm(self.convolution(inputs), training=training)
        return self.head(self.flatten(maps))


def shape_of_backend(shape):
    """A `tf.TensorShape` on TensorFlow."""
    if BACKEND == "jax":
        return shape
    import tensorflow as tf

    return tf.TensorShape(shape)


@pytest.mark.parametrize(("make", "policy"), [(network, "support"), (Subclassed, "moving")])
def test_round_trip(make, policy, tmp_path):
    inputs, _ = episodes()
    model = built(
        make(),
        "classifier",
        inner_steps=1,
        learning_rate_form="learned",
        test_extra_steps=1,
        extra_variables=["bias"],
        batch_normalization=policy,
        shape=shape_of_backend,
    )
    as_float64(model)
    expected = numbers(model(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    configs = [each.get_config() for each in (loaded, model)]
    assert configs[0].pop("model")["class_name"] == configs[1].pop("model")["class_name"]
    assert configs[0] == configs[1]
    np.testing.assert_allclose(numbers(loaded(inputs)), expected, atol=1e-6)


@tensorflow_only
def test_frozen_models_adapt_and_load(tmp_path):
    inputs, _ = episodes()
    # Frozen batch norms have their moving statistics.
    model = MAML(perceptron(), inner_steps=1, batch_normalization="moving")
    expected = numbers(model(inputs))
    model.trainable = False
    np.testing.assert_array_equal(numbers(model(inputs)), expected)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numbers(again(inputs)), expected, atol=1e-6)
    assert not again.trainable_variables


def test_export(tmp_path):
    import tensorflow as tf

    inputs, _ = episodes(3)
    model = built(network(), inner_steps=1)
    expected = numbers(model(inputs))
    model.export(
        tmp_path,
        verbose=False,
        input_signature=[
            [tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in inputs]
        ],
    )
    loaded = tf.saved_model.load(tmp_path)
    for size in (1, 3):
        found = loaded.serve([tf.constant(each[:size]) for each in inputs])
        np.testing.assert_allclose(numbers(found), expected[:size], atol=1e-5)


def test_mixed_precision():
    inputs, labels = episodes(2)
    full = built(network(), inner_steps=1, inner_learning_rate=0.1)
    keras.config.set_dtype_policy("mixed_bfloat16")
    mixed = built(network(), inner_steps=1, inner_learning_rate=0.1)
    mixed.model.set_weights(full.model.get_weights())
    expected, found = numbers(full(inputs)), numbers(mixed(inputs))
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    compiled(mixed, run_eagerly=True).fit(inputs, labels, verbose=0)
    # The steps are those of full precision: none is lost to rounding.
    small = built(network(), inner_steps=1, inner_learning_rate=1e-6)
    support = ops.convert_to_tensor(inputs[0][0], "float32")
    targets = ops.one_hot(ops.convert_to_tensor(inputs[1][0], "int32"), small.ways)
    start = small.classifier.values()
    values = small._adapted(support, targets, ops.zeros((), "int32"), False)
    assert {keras.backend.standardize_dtype(each.dtype) for each in values} == {"float32"}
    assert any(
        np.any(numbers(one) != numbers(two)) for one, two in zip(start, values, strict=True)
    )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_learned_rates_in_mixed_precision(policy):
    inputs, labels = episodes(2)
    keras.config.set_dtype_policy(policy)
    model = MAML(network(), inner_steps=1, learning_rate_form="learned")
    compiled(model, run_eagerly=True).fit(inputs, labels, verbose=0)
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    assert np.isfinite(model.predict(inputs, verbose=0)).all()


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="JAX has no float64 unless it is told to"
)
def test_networks_in_double_precision():
    inputs, _ = episodes(2)
    keras.config.set_dtype_policy("float64")
    model = network()
    keras.config.set_dtype_policy("float32")
    found = MAML(model, inner_steps=1)(inputs)
    assert keras.backend.standardize_dtype(found.dtype) == "float64"


def test_labels_must_be_the_models_ways():
    """What all learners check is in `test_learners.py`."""
    (support, labels, queries), query_labels = episodes(3)
    model = compiled(MAML(perceptron(), inner_steps=1))
    labels[1, 0] = 2
    bad = (support, labels, queries)
    message = (
        r"as many as model .* has outputs.*Received: the labels \[0, 1, 2\] in episode 1"
    )
    for run in (lambda: model.fit(bad, query_labels), lambda: model(bad)):
        with pytest.raises(ValueError, match=message):
            run()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("inner_steps", 0),
        ("inner_learning_rate", 0.0),
        ("learning_rate_form", "scalar"),
        ("extra_steps", -1),
        ("test_inner_steps", 0),
        ("test_extra_steps", -1),
        ("batch_normalization", "query"),
        ("inner_variables", "head"),
    ],
)
def test_arguments(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` must be"):
        MAML(network(), **{argument: value})


def test_extra_variables_are_checked_where_they_are_used():
    MAML(network(), extra_variables="similarity")
    with pytest.raises(ValueError, match="`extra_variables` must match"):
        MAML(network(), extra_variables="similarity", test_extra_steps=1)


def test_models_and_inputs_of_another_kind():
    with pytest.raises(ValueError, match="`model` must be a Keras model"):
        MAML(layers.Dense(2))
    maps = keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(2, 3)])
    with pytest.raises(ValueError, match=r"shape=\(None, 4, 4, 2\)"):
        built(maps)
    inputs, _ = episodes()
    with pytest.raises(ValueError, match="Inputs must be"):
        MAML(network()).build([each.shape for each in inputs[:2]])
    with pytest.raises(ValueError, match="must have its batch norms in its own graph"):
        built(Subclassed())


@tensorflow_only
def test_a_missing_second_gradient_names_the_layer():
    def resized():
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.UpSampling2D(2, interpolation="bilinear", name="enlarged"),
                layers.Flatten(),
                layers.Dense(WAYS),
            ]
        )

    with pytest.raises(ValueError, match=r"or pass first_order=True.*layer 'enlarged'"):
        built(resized())
    built(resized(), first_order=True)


SCRIPT = """
import json
import numpy as np
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

import keras
import nsl_keras

random = np.random.default_rng(0)
labels = np.tile(np.arange(4) % 2, (8, 1)).astype("int32")
support, queries = (
    (random.normal(size=(8, 4, 6, 6, 1)) + labels[..., None, None, None]).astype("float32")
    for _ in range(2))
for strategy in (
    tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        network = keras.Sequential([
            keras.Input((6, 6, 1)), keras.layers.Conv2D(2, 3, activation="relu"),
            keras.layers.BatchNormalization(), keras.layers.MaxPooling2D(),
            keras.layers.Flatten(), keras.layers.Dense(2)])
        model = nsl_keras.few_shot.MAML(
            network, inner_steps=1, inner_learning_rate=0.1, learning_rate_form="learned")
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"], jit_compile=False)
    history = model.fit((support, labels, queries), labels, batch_size=4, epochs=2,
                        shuffle=False, verbose=0).history
    sampler = nsl_keras.few_shot.EpisodeSampler(
        support.reshape(-1, 6, 6, 1), labels.ravel(), ways=2, shots=2, queries=2)
    evaluation = nsl_keras.few_shot.evaluate(model, sampler, episodes=5, verbose=0)
    print(json.dumps({
        "accuracies": evaluation.accuracies.tolist(),
        "replicas": strategy.num_replicas_in_sync,
        "history": history,
        "weights": [
            np.asarray(each.value).ravel().tolist() for each in model.trainable_variables],
    }))
"""


@pytest.mark.long
@tensorflow_only
def test_two_replicas_equal_one_device():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    one, two = map(json.loads, result.stdout.splitlines()[-2:])
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert len(one["weights"]) == 12
    assert one["accuracies"] == two["accuracies"] and len(one["accuracies"]) == 5
    for key, values in one["history"].items():
        np.testing.assert_allclose(values, two["history"][key], atol=1e-5)
    for own, other in zip(one["weights"], two["weights"], strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("form", ["fixed", "learned"])
@pytest.mark.parametrize("start", ["trained", "frozen"])
def test_what_adapts_is_what_was_chosen_at_the_start(form, start, tmp_path):
    """Flags that change later change neither the model nor its file."""
    inputs, _ = episodes()
    wrapped = network()
    wrapped.trainable = start == "trained"
    model = MAML(
        wrapped, "all", inner_steps=2, inner_learning_rate=0.1, learning_rate_form=form
    )
    expected = numbers(model(inputs))
    wrapped.trainable = True
    wrapped.get_layer("convolution").trainable = False
    wrapped.get_layer("norm").trainable = start == "trained"  # It says whose statistics.
    np.testing.assert_array_equal(numbers(model(inputs)), expected)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numbers(again(inputs)), expected, rtol=1e-5)
    assert len(again.inner_learning_rates) == len(model.inner_learning_rates) == 6


def test_a_classifier_that_was_frozen_later_adapts_after_loading(tmp_path):
    inputs, _ = episodes()
    wrapped = network()
    model = MAML(wrapped, "classifier", inner_learning_rate=0.1)
    expected = numbers(model(inputs))
    wrapped.get_layer("head").trainable = False
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numbers(again(inputs)), expected, rtol=1e-5)


def test_building_twice_changes_nothing():
    inputs, _ = episodes()
    model = built(network(), learning_rate_form="learned")
    count = len(model.weights)
    model.build([each.shape for each in inputs])
    assert len(model.weights) == count


def test_two_outputs_are_refused():
    images = keras.Input((6, 6, 1))
    flat = layers.Flatten()(images)
    two = keras.Model(images, [layers.Dense(2)(flat), layers.Dense(2)(flat)])
    with pytest.raises(ValueError, match=r"`model` must return logits .*Received"):
        built(two)
