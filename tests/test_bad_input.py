"""Arguments, calls and files that once ended the process, ran without end, or passed."""

import functools

import keras
import numpy as np
import pytest

import nsl_keras

LAYERS = nsl_keras.layers


@pytest.mark.parametrize("name", ["strides", "kernel_size", "dilation_rate"])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(LAYERS.NeuralSimilarityConv1D, 4, kernel_size=3),
        functools.partial(LAYERS.NeuralSimilarityConv2D, 4, kernel_size=3),
        functools.partial(LAYERS.NeuralSimilarityDepthwiseConv2D, kernel_size=3),
        functools.partial(LAYERS.SphereConv2D, 4, kernel_size=3),
    ],
    ids=lambda make: make.func.__name__,
)
def test_geometry_that_would_end_the_process(make, name):
    with pytest.raises(ValueError, match=rf"`{name}` must be at most 1,048,576.*={2**31}"):
        make(**{name: 2**31})


def small_network():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LAYERS.MetaNeighborhoodHead(
                LAYERS.CosineDense(3), 5, inner_steps=2**31
            ),
            "`inner_steps` must be at most 1,000. Received: inner_steps=2147483648",
        ),
        (
            lambda: nsl_keras.few_shot.MAML(small_network(), test_inner_steps=1001),
            "`test_inner_steps` must be at most 1,000",
        ),
        (
            lambda: nsl_keras.few_shot.MAML(small_network(), extra_steps=1001),
            "`extra_steps` must be at most 1,000",
        ),
        (
            lambda: nsl_keras.few_shot.Finetuner(small_network(), 3, steps=10**30),
            "`steps` must be at most 1,000,000",
        ),
        (
            lambda: LAYERS.NeighborDictionary(2**31),
            "`num_neighbors` must be at most 2,147,483,647",
        ),
        (
            lambda: nsl_keras.backbones.convnet4((32, 32, 3), filters=2**31),
            "`filters` must be at most 2,147,483,647",
        ),
    ],
    ids=lambda each: None if callable(each) else each.split("`")[1],
)
def test_numbers_without_end(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sphere", functools.partial(LAYERS.GlobalNeuralSimilarity2D)),
        ("pooled", nsl_keras.predictors.SimilarityPredictor),
        ("first_order", lambda **given: nsl_keras.few_shot.MAML(small_network(), **given)),
        (
            "new_classifier",
            lambda **given: nsl_keras.few_shot.Finetuner(small_network(), 3, **given),
        ),
        (
            "freeze_backbone",
            lambda **given: nsl_keras.convert.add_similarity(small_network(), **given),
        ),
        ("adapt", lambda adapt: adapting_model()(np.ones((2, 4), "float32"), adapt=adapt)),
    ],
)
def test_words_are_no_booleans(name, make):
    with pytest.raises(ValueError, match=f"`{name}` must be True or False.*='False'"):
        make(**{name: "False"})


def adapting_model():
    model = nsl_keras.MetaNeighborhoodModel(None, LAYERS.CosineDense(3), dictionary=6)
    model.build((None, 4))
    return model


def test_neighbors_of_inputs_of_another_width():
    for x in (np.ones((2, 5), "float32"), np.ones((2, 4, 1), "float32")):
        with pytest.raises(ValueError, match=r"must have shape \(batch, 4\), as wide as"):
            adapting_model().neighbors(x)


def test_a_model_file_that_is_not_whole(tmp_path):
    """Keras's own words, which the README explains."""
    path = tmp_path / "model.keras"
    adapting_model().save(path)
    content = path.read_bytes()
    for size in (0, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"File not found.*accessible `.keras` zip"):
            keras.saving.load_model(path)
