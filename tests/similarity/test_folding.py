"""Models with static similarities, folded into plain Keras models."""

import keras
import pytest
from helpers import normal, randomize, reloaded
from layer_harness import IMAGES, assert_independent, difference, stack

from nsl_keras import graphs, layers, nesting
from nsl_keras.convert import fold


def check_fold(model, inputs, tolerance=1e-5):
    """Returns the folded model, of Keras's layers alone and with the same outputs."""
    folded = fold(model)
    assert difference(model, folded, inputs) <= tolerance
    every_layer = [
        part
        for layer in graphs.layers(folded)
        for part in (layer, *nesting.sublayers(layer))
    ]
    assert not any(type(each).__module__.startswith("nsl_keras") for each in every_layer)
    assert {layer.name for layer in folded.layers} >= {each.name for each in model.layers}
    assert_independent(fold(model), model, inputs)
    keras.models.clone_model(folded).set_weights(folded.get_weights())
    return folded


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_layers_of_the_package(dtype):
    keras.config.set_dtype_policy(dtype)
    model = stack(
        layers.NeuralSimilarityConv2D(4, 3, similarity="unconstrained"),
        layers.BatchNormalization(epsilon=0.1),
        layers.NeuralSimilarityDense(6, similarity="symmetric"),
        keras.layers.GlobalAveragePooling2D(),
    )
    check_fold(model, IMAGES, 1e-5 if dtype == "float32" else 0.02)


def test_layers_without_a_similarity_stay():
    convolution = layers.NeuralSimilarityConv2D(4, 3, similarity="unconstrained")
    model = stack(convolution, layers.SphereConv2D(3, 2), layers.CosineDense(2))
    randomize(model.weights)
    folded = fold(model)
    kinds = [keras.layers.Conv2D, layers.SphereConv2D, layers.CosineDense]
    assert [*map(type, folded.layers)] == kinds
    assert difference(model, folded, IMAGES) <= 1e-5


SEQUENCES = normal(2, 2, 4)


RNN, BOTH = keras.layers.RNN, keras.layers.Bidirectional
CELLS = [
    layers.NeuralSimilaritySimpleRNNCell(4),
    keras.layers.GRUCell(4),
    layers.NeuralSimilarityLSTMCell(5, similarity="symmetric"),
]
CELL = layers.NeuralSimilarityGRUCell
SIMPLE_CELL = layers.NeuralSimilaritySimpleRNNCell(4, activation=keras.layers.PReLU())
BACK = keras.layers.GRU(4, go_backwards=True)


@pytest.mark.parametrize(
    "layer",
    [
        BOTH(RNN(CELL(3, similarity="unconstrained"), return_sequences=True), "sum"),
        RNN(CELLS),
        BOTH(RNN(SIMPLE_CELL), backward_layer=keras.layers.GRU(4, go_backwards=True)),
        BOTH(layers.NeuralSimilarityLSTM(4), backward_layer=BACK),
    ],
    ids=["both ways", "stack", "one way", "layer one way"],
)
def test_recurrent_cells(layer, tmp_path):
    model = stack(layer, shape=SEQUENCES.shape[1:])
    model(SEQUENCES)
    randomize(model.weights)
    folded = check_fold(model, SEQUENCES)
    assert difference(folded, reloaded(folded, tmp_path), SEQUENCES) == 0


class Own(layers.NeuralSimilarityConv2D):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


@pytest.mark.parametrize(
    ("layer", "shape", "received"),
    [
        (layers.NeuralSimilarityConv2D(4, 3, predictor="sphere"), (8, 9, 3), "dynamic Neu"),
        (RNN(CELL(3, predictor="sphere", name="one")), (3, 4), "dynamic Neu"),
        (Own(4, 3), (8, 9, 3), "derived Own"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_layers_without_a_plain_equivalent(layer, shape, received):
    model = keras.Sequential([keras.Input(shape), layer])
    name = getattr(layer, "cell", layer).name
    expected = rf"`model` must be one whose similarities .*'{name}', a {received}"
    with pytest.raises(ValueError, match=expected):
        fold(model)
    if isinstance(layer, Own):
        with pytest.raises(
            ValueError, match=r"`fold` needs .* computes as Conv2D, not a Own"
        ):
            layer.fold()
