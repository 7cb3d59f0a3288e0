"""`check_learner`: what every learner of the package must be able to do.

As `layer_harness` for layers: configs, shapes, building once, `.keras` files, freezing,
mixed precision, bad arrays, and training steps. `LearnerCase` describes a learner; `CASES`
lists them all, `MetaNeighborhoodModel` included.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import few_shot_episodes as data
import keras
import numpy as np
from helpers import CROSS_ENTROPY, as_numpy, normal, randomize, refused, reloaded, stacked

import nsl_keras
from nsl_keras import few_shot

IMAGE = (6, 6, 1)


def episodes():
    return data.episodes(shape=IMAGE)


def vectors():
    return normal(4, data.SIZE), np.arange(4) % data.WAYS


def with_nan(arrays, place):
    """The arrays, with a NaN in one of them, the only one or the one at a place."""
    arrays = keras.tree.map_structure(np.array, arrays)
    keras.tree.flatten(arrays)[place].reshape(-1)[3] = np.nan
    return arrays


@dataclasses.dataclass(frozen=True)
class LearnerCase:
    """`make` returns a fresh learner, `data` inputs and labels.

    `trains` says whether it has variables to train, `inputs` where its numbers are.
    """

    name: str
    make: Callable[[], keras.Model]
    data: Callable[[], tuple[Any, np.ndarray]] = episodes
    trains: bool = True
    inputs: tuple[tuple[int, str], ...] = ((0, "support_images"), (2, "query_images"))

    def compiled(self, **options):
        model = self.make()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), CROSS_ENTROPY, **options)
        return model

    def built(self, **options):
        """A learner with random weights, compiled with options, and inputs and labels."""
        model = self.compiled(**options) if options else self.make()
        inputs, labels = self.data()
        model.build(shapes_of(inputs))
        randomize(model.trainable_variables, 0.1)
        return model, inputs, labels


def metric(learner, flat=True, **options):
    return lambda: learner(data.convolutional(flat), data.WAYS, **options)


def classifier():
    return stacked(
        IMAGE,
        keras.layers.Conv2D(2, 3, activation="softplus"),
        nsl_keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(data.WAYS),
    )


def maml():
    options = {"learning_rate_form": "learned", "test_inner_steps": 2}
    return few_shot.MAML(classifier(), "classifier", inner_steps=1, **options)


def meta_neighborhoods():
    features = stacked((data.SIZE,), keras.layers.Dense(5))
    head = nsl_keras.layers.CosineDense(data.WAYS)
    dictionary = nsl_keras.layers.NeighborDictionary(8, dropout=0.0)
    return nsl_keras.MetaNeighborhoodModel(features, head, dictionary)


CASES = [
    LearnerCase(
        "proto",
        metric(few_shot.ProtoNet, learn_temperature=True, batch_normalization="support"),
    ),
    LearnerCase("neighborhood", metric(few_shot.NeighborhoodLearner)),
    LearnerCase("centroid", metric(few_shot.NearestCentroid), trains=False),
    LearnerCase("maml", maml),
    LearnerCase("meta_neighborhoods", meta_neighborhoods, vectors, inputs=((0, "x"),)),
]


def adaptable():
    """Cases of all learners that adapt, by name."""
    steps = {"inner_steps": 2, "learning_rate_form": "diagonal", "metric": "euclidean"}
    distance = {"metric": "euclidean", "normalize": False}
    makers = {
        "neighborhood_steps": metric(few_shot.NeighborhoodLearner, **steps),
        "inner_product": metric(few_shot.ProtoNet, metric=ScaledProduct(0.5)),
        "distance": metric(few_shot.NearestCentroid, **distance),
        "without_lengths": metric(few_shot.NearestCentroid, normalize=False),
    }
    cases = [case for case in CASES if case.name != "meta_neighborhoods"]
    cases += [LearnerCase(*maker) for maker in makers.items()]
    return {case.name: case for case in cases}


@keras.saving.register_keras_serializable("tests")
class ScaledProduct(nsl_keras.key_metrics.KeyMetric):
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, queries, keys):
        return self.scale * keras.ops.matmul(queries, keras.ops.swapaxes(keys, -1, -2))

    def get_config(self):
        return {"scale": self.scale}


def check_learner(case, folder):
    """Runs the checks that need no compilation; `folder` is for files."""
    model, inputs, labels = case.built(**({"run_eagerly": True} if case.trains else {}))
    outputs = as_numpy(model(inputs))
    check_shapes(model, inputs, outputs)
    if not case.trains:
        np.testing.assert_array_equal(model(inputs, training=True), outputs)
    check_mixed_precision(case, model, outputs)
    check_bad_arrays(case)
    check_files(case, model, inputs, labels, outputs, folder)


def check_shapes(model, inputs, outputs):
    shapes = shapes_of(inputs)
    assert model.compute_output_shape(shapes) == outputs.shape
    assert np.ptp(outputs) > 0
    count = len(model.weights)
    model.build(shapes)
    assert len(model.weights) == count


def shapes_of(inputs):
    return [each.shape for each in inputs] if isinstance(inputs, tuple) else inputs.shape


def check_mixed_precision(case, reference, outputs):
    inputs, labels = case.data()
    keras.config.set_dtype_policy("mixed_float16")
    model = case.compiled(run_eagerly=True)
    keras.config.set_dtype_policy("float32")
    model.build(shapes_of(inputs))
    model.set_weights(reference.get_weights())
    found = model(inputs)
    assert keras.backend.standardize_dtype(found.dtype) == "float32"
    assert np.abs(found - outputs).max() <= 0.05 * np.abs(outputs).max()
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if case.trains:
        assert np.isfinite(model.train_on_batch(inputs, labels))


def check_bad_arrays(case):
    model, (inputs, labels) = case.compiled(run_eagerly=True), case.data()
    bad = [(with_nan(inputs, place), labels, name) for place, name in case.inputs]
    bad += [(inputs, wrong, "y") for wrong in (labels - 1, labels + 1, labels + 0.5)]
    for given, targets, name in bad:
        with refused(f"`{name}` must .*Received"):
            model.fit(given, targets, verbose=0)


def check_step(model, inputs, labels):
    """A training step changes every variable, and leaves all of them finite."""
    before = [as_numpy(variable) for variable in model.trainable_variables]
    model.fit(inputs, labels, verbose=0)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        new = as_numpy(variable)
        assert np.all(np.isfinite(new)), variable.path
        # Biases before a batch norm, or where distances alone count, have no gradient.
        if variable.name != "bias":
            assert np.any(new != old), f"{variable.path} got no gradient"


def check_files(case, model, inputs, labels, outputs, folder):
    """A loaded learner is frozen if it was, else computes the same, and trains."""
    model.trainable = False
    # Frozen batch norms have their moving statistics.
    if getattr(model, "effective_batch_normalization", None) is None:
        np.testing.assert_array_equal(model(inputs), outputs)
    again = reloaded(model, folder)
    assert not model.trainable_variables and not again.trainable_variables
    np.testing.assert_equal(again.get_weights(), model.get_weights())
    model.trainable = True
    if case.trains:
        model.optimizer.build(model.trainable_variables)
    again = reloaded(model, folder)
    np.testing.assert_array_equal(again(inputs), outputs)
    np.testing.assert_equal(again.get_weights(), model.get_weights())
    # Layers and models in a config have names of their own.
    one, two = (
        {key: value for key, value in each.get_config().items() if type(value) is not dict}
        for each in (again, model)
    )
    assert one == two
    if case.trains:
        again.run_eagerly = True
        check_step(again, inputs, labels)


def check_adapt(case, folder):
    """The adapted model has the learner's logits, also from its file."""
    learner, inputs, _ = case.built()
    support, labels, images = (each[0] for each in inputs)
    expected = as_numpy(learner(inputs))[0]
    names = ("one", "two", "three")
    model = learner.adapt(support, labels, names)
    randomize(learner.weights)  # The adapted model has weights of its own.
    again = reloaded(model, folder)
    assert model.layers[-1].class_names == again.layers[-1].class_names == names
    assert model.layers[-1].temperature == again.layers[-1].temperature != 1
    for count in (len(images), 1):
        found = model.layers[-1].temperature * as_numpy(again(images[:count]))
        np.testing.assert_allclose(found, expected[:count], atol=1e-4)
