"""Converted models train, save, load and train on like any other model."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_all_equal, assert_close, normal, stacked, values
from keras import layers

import nsl_keras
from nsl_keras import convert, few_shot

IMAGES = normal(8, 8, 8, 3, seed=5)
LABELS = np.arange(8) % 3
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def stack(*parts):
    end = [layers.Flatten(), layers.Dense(3, name="classes")]
    return stacked((8, 8, 3), *parts, *end)


def convolutional(**options):
    return [
        layers.Conv2D(4, 3, name="first", **options),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(4, 3, padding="same", strides=2, **options),
        layers.BatchNormalization(),
    ]


def functional():
    """A convolution and a batch norm that are called twice."""
    inputs = keras.Input((8, 8, 3))
    convolution, norm = layers.Conv2D(3, 3, padding="same"), layers.BatchNormalization()
    one = norm(convolution(inputs))
    outputs = layers.Concatenate()([one, norm(convolution(one), training=False)])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling2D()(outputs)))


def nested():
    inner = stacked((8, 8, 3), *convolutional(), name="inner")
    return stack(inner, layers.GlobalAveragePooling2D())


def frozen():
    model = nested()
    model.layers[0].trainable = False
    return model


def framed():
    parts = [layers.Reshape((2, 4, 8, 3)), layers.TimeDistributed(layers.Conv2D(2, 3))]
    return stack(*parts, layers.TimeDistributed(layers.BatchNormalization()))


def neighborhoods():
    backbone = stacked((8, 8, 3), *convolutional())
    backbone.add(layers.GlobalAveragePooling2D())
    head = nsl_keras.layers.CosineDense(3)
    # Keras saves no state of random numbers.
    dictionary = nsl_keras.layers.NeighborDictionary(6, dropout=0.0)
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, dictionary, inner_steps=2)
    model.build((None, 8, 8, 3))
    return model


def adapted(learner, *end):
    backbone = stacked((8, 8, 3), *convolutional(), layers.Flatten(), *end)
    return learner(backbone).adapt(IMAGES, LABELS, class_names=["a", "b", "c"])


MODELS = {
    "regularized": lambda: stack(*convolutional(use_bias=False, kernel_regularizer="l2")),
    "half precision": lambda: stack(*convolutional(dtype="mixed_bfloat16")),
    "several of a kind": lambda: stack(
        layers.Conv2D(4, 3, activation=layers.PReLU(shared_axes=[1, 2])),
        *(layers.BatchNormalization(), layers.ReLU(), layers.ReLU(), layers.Dropout(0.0)),
    ),
    "other kernels": lambda: stack(
        *(layers.DepthwiseConv2D(3), layers.BatchNormalization()),
        *(layers.SeparableConv2D(4, 3), layers.Conv2DTranspose(4, 3)),
    ),
    "functional": functional,
    "nested": nested,
    "frozen": frozen,
    "inside TimeDistributed": framed,
    "neighborhoods": neighborhoods,
    "adapted": lambda: adapted(few_shot.NearestCentroid),
    "adapted, prototypes": lambda: adapted(few_shot.ProtoNet),
    "adapted, neighborhood": lambda: adapted(few_shot.NeighborhoodLearner),
    "adapted, MAML": lambda: adapted(
        lambda model: few_shot.MAML(convert.convert_batch_norms(model), "all", 1),
        layers.Dense(3),
    ),
    "adapted, Finetuner": lambda: adapted(
        lambda model: few_shot.Finetuner(model, 3, steps=5), layers.Dense(3)
    ),
}
CONVERTERS = {
    "dynamic": lambda model: convert.add_similarity(model, predictor="sphere"),
    "fold": lambda model: convert.fold(convert.add_similarity(model)),
    "all in turn": lambda model: convert.add_film(
        convert.convert_batch_norms(convert.add_similarity(model, freeze_backbone=False))
    ),
}
ON_JAX = ("functional", "neighborhoods", "adapted")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.jax] * (name in ON_JAX)) for name in MODELS],
)
def test_training_goes_on_after_loading(name, tmp_path):
    source = MODELS[name]()
    source.compile("adam", LOGITS, run_eagerly=True)
    source.train_on_batch(IMAGES, LABELS)
    trained = values(source.variables)
    for converter, convert_ in CONVERTERS.items():
        model = convert_(source)
        assert type(model) is type(source)
        for attribute in ("class_names", "temperature"):
            expected = getattr(source, attribute, None)
            assert getattr(model, attribute, None) == expected, converter
        assert_close(model(IMAGES), source(IMAGES), 0.03 if "half" in name else 1e-4)
        model.layers[-1].trainable = True  # The classifier, too.
        model.compile(keras.optimizers.Adam(0.01), LOGITS, run_eagerly=True)
        model.train_on_batch(IMAGES, LABELS)
        model.save(tmp_path / f"{converter}.keras")
        again = keras.models.load_model(tmp_path / f"{converter}.keras")
        assert_all_equal(again.optimizer.variables, model.optimizer.variables)
        flags = [variable.trainable for variable in model.variables]
        assert [variable.trainable for variable in again.variables] == flags
        for each in (model, again):
            each.compile(each.optimizer, LOGITS, run_eagerly=True)
            each.train_on_batch(IMAGES, LABELS)
        for one, other in zip(model.variables, again.variables, strict=True):
            if "seed_generator" not in one.path:  # Keras saves no state of random numbers.
                close = {"atol": 1e-5, "rtol": 1e-4, "err_msg": f"{converter}, {one.path}"}
                np.testing.assert_allclose(as_numpy(one), as_numpy(other), **close)
    assert_all_equal(source.variables, trained)
