"""MAML: outer gradients, policies, steps, errors, and `fit` around it."""

import functools
import itertools

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
            nsl_keras.layers.BatchNormalization(name="norm"),
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
            nsl_keras.layers.BatchNormalization(name="norm"),
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


def built(*args, **kwargs):
    model = MAML(*args, **kwargs)
    inputs, _ = episodes()
    model.build([(None, *each.shape[1:]) for each in inputs])
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
    history = model.fit(inputs, labels, batch_size=5, epochs=4, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    norm = model.model.get_layer("norm")
    np.testing.assert_array_equal(numbers(norm.moving_mean), 0)
    np.testing.assert_array_equal(numbers(norm.moving_variance), 1)
    rates = set(map(float, model.inner_learning_rates))
    assert len(rates) == 4
    apart = model.predict(inputs, batch_size=5, verbose=0)
    np.testing.assert_allclose(apart, numbers(model(inputs)), atol=1e-5)
    for variable in model.trainable_variables:
        if variable.name.startswith("inner_learning_rate"):
            variable.assign(-0.2)
    rates = model.inner_learning_rates
    np.testing.assert_allclose([float(rate) for rate in rates], 0.2, rtol=1e-6)


def test_moving_statistics_follow_the_queries_in_training_alone():
    inputs, labels = episodes()
    model = MAML(network(), inner_steps=1, batch_normalization="moving")
    compiled(model, run_eagerly=True)
    model.evaluate(inputs, labels, verbose=0)
    convolution, norm = model.model.layers[:2]
    np.testing.assert_array_equal(numbers(norm.moving_mean), 0)
    model.inner_learning_rate = 1e-12  # The statistics are those of the network itself.
    maps = numbers(convolution(inputs[2].reshape(-1, 6, 6, 1)))
    model.fit(inputs, labels, batch_size=2, verbose=0)
    np.testing.assert_allclose(norm.moving_mean, maps.mean((0, 1, 2)), rtol=1e-3)
    np.testing.assert_allclose(norm.moving_variance, maps.var((0, 1, 2)), rtol=1e-3)
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


@keras.saving.register_keras_serializable("test_maml")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.convolution = layers.Conv2D(2, 3, activation="relu")
        self.norm = nsl_keras.layers.BatchNormalization()
        self.flatten = layers.Flatten()
        self.head = layers.Dense(WAYS)

    def call(self, inputs, training=None):
        maps = self.norm(self.convolution(inputs), training=training)
        return self.head(self.flatten(maps))


def test_subclassed_models_in_files(tmp_path):
    inputs, _ = episodes()
    wrapped = Subclassed()
    with pytest.raises(ValueError, match="`MAML` needs a built layer or model"):
        MAML(wrapped)
    wrapped(inputs[0][0])
    model = MAML(wrapped, "classifier", inner_steps=1, extra_variables=["bias"])
    expected = numbers(model(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.model) is Subclassed
    np.testing.assert_allclose(numbers(again(inputs)), expected, atol=1e-6)


def test_steps_of_mixed_precision_are_those_of_full():
    """A head in float32 keeps small steps, which half precision would round away."""
    inputs, _ = episodes(1)
    keras.config.set_dtype_policy("mixed_bfloat16")
    head = layers.Dense(WAYS, dtype="float32")
    wrapped = keras.Sequential([keras.Input((6, 6, 1)), layers.Flatten(), head])
    model = built(wrapped, "classifier", inner_steps=1, inner_learning_rate=1e-5)
    adapted = numbers(model(inputs))
    model.inner_learning_rate = 1e-30
    assert 0 < np.abs(numbers(model(inputs)) - adapted).max() < 1e-2


def test_a_non_finite_inner_loss_stops_fit():
    inputs, labels = episodes(3)
    inputs[0][1] *= 1e25  # Finite; the second step is not.
    model = MAML(perceptron(), inner_steps=2, batch_normalization="moving")
    found = numbers(model(inputs))
    assert np.all(np.isfinite(found[[0, 2]])) and np.all(np.isnan(found[1]))
    with pytest.raises(nsl_keras.NonFiniteLossError, match="batch 1 of epoch 1"):
        compiled(model, run_eagerly=True).fit(inputs, labels, batch_size=3, verbose=0)


def with_softmax():
    return keras.Sequential([keras.Input((6, 6, 1)), layers.Flatten(), layers.Softmax()])


def with_two_outputs():
    images = keras.Input((6, 6, 1))
    flat = layers.Flatten()(images)
    return keras.Model(images, [layers.Dense(2)(flat), layers.Dense(2)(flat)])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (network, {"inner_steps": 0}, "`inner_steps` must be"),
        (network, {"inner_learning_rate": 0.0}, "`inner_learning_rate` must be"),
        (network, {"learning_rate_form": "scalar"}, "`learning_rate_form` must be"),
        (network, {"extra_steps": -1}, "`extra_steps` must be"),
        (network, {"test_inner_steps": 0}, "`test_inner_steps` must be"),
        (network, {"test_extra_steps": -1}, "`test_extra_steps` must be"),
        (network, {"batch_normalization": "query"}, "`batch_normalization` must be"),
        (network, {"inner_variables": "head"}, "`inner_variables` must be"),
        (
            network,
            {"extra_variables": "similarity", "test_extra_steps": 1},
            "`extra_variables` must match",
        ),
        (lambda: layers.Dense(2), {}, "`model` must be a Keras model"),
        (with_softmax, {}, r"`model` must return logits.*'softmax"),
        (
            lambda: keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(2, 3)]),
            {},
            r"shape=\(None, 4, 4, 2\)",
        ),
        (with_two_outputs, {}, r"`model` must return logits .*Received"),
    ],
)
def test_errors(make, options, message):
    with pytest.raises(ValueError, match=message):
        built(make(), **options)


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
