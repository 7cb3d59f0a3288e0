"""The rows of `summary`, with parameters counted by hand."""

import keras
import pytest
from helpers import stacked

from nsl_keras import layers, predictors
from nsl_keras.convert import add_similarity, fold, summary
from nsl_keras.similarities import Unconstrained

RECIPE = predictors.SimilarityPredictor(width=5)
#: Two kernels, and two batch norms with four vectors and a count.
PREDICTOR = 9 * 4 * 5 + (4 * 5 + 1) + 9 * 5 * 9 + (4 * 9 + 1)


def convolution(filters=6, **options):
    return layers.NeuralSimilarityConv2D(filters, 3, padding="same", **options)


def nested():
    return keras.Sequential([keras.Input((None, None, 4)), convolution()])


@pytest.mark.parametrize(
    ("make", "shape", "kind", "similarity", "added"),
    [
        (convolution, (8, 8, 4), "Conv2D", "static Diagonal", 9),
        (
            lambda: convolution(predictor=RECIPE),
            *((8, 8, 4), "Conv2D", "dynamic Diagonal", PREDICTOR),
        ),
        (nested, (8, 8, 4), "Conv2D", "static Diagonal", 9),
        (
            lambda: keras.layers.RNN(layers.NeuralSimilarityLSTMCell(6)),
            *((7, 4), "RNN", "static Diagonal", 4 + 6),
        ),
    ],
)
def test_one_layer(make, shape, kind, similarity, added):
    model = keras.Sequential([keras.Input(shape), make()])
    (row,) = summary(model).layers
    assert (row.kind, row.similarity) == (kind, similarity)
    assert row.similarity_parameters == added
    assert row.parameters == model.count_params()
    assert row.folds == similarity.startswith("static")


def test_shared_layers_and_predictors_count_once():
    predictor = predictors.SharedSimilarityPredictor(RECIPE, adapted_filters=4)
    one, two = (convolution(4, predictor=predictor) for _ in range(2))
    inputs = keras.Input((8, 8, 4))
    model = keras.Model(inputs, two(one(one(inputs))))
    result = summary(model)
    assert [row.name for row in result.layers] == [one.name, two.name]
    added = sum(row.similarity_parameters for row in result.layers)
    assert result.similarity_parameters == added - predictor.count_params()
    assert result.parameters == model.count_params()


def test_totals():
    plain = stacked(
        (9, 9, 3),
        keras.layers.Conv2D(4, 3),
        keras.layers.TimeDistributed(keras.layers.Conv1D(5, 3)),
        keras.layers.Conv2DTranspose(3, 2),
        keras.layers.Flatten(),
    )
    result = summary(add_similarity(plain, Unconstrained(learn_shape=True)))
    assert result.parameters - result.similarity_parameters == plain.count_params()
    assert result.similarity_parameters == (81 + 9) + (9 + 3) + (16 + 4)
    folded = summary(fold(add_similarity(plain)))
    assert (folded.parameters, folded.layers) == (plain.count_params(), ())
    with pytest.raises(ValueError, match="must be a built model"):
        summary(keras.Sequential([keras.layers.Dense(1)]))
