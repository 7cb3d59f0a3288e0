"""Parameters and multiply-adds, counted by hand."""

import keras
import pytest
from keras import ops

from nsl_keras import layers, predictors
from nsl_keras.convert import add_similarity, fold, summary
from nsl_keras.similarities import Unconstrained

# 9 taps, 4 channels, 6 filters, 64 positions of an 8x8 image; an LSTM cell on 7 steps.
PLAIN = 64 * 9 * 4 * 6
SPHERE = 9 * 4 * 5 + 9 * 5 * 9  # A predictor of width 5, at one position.
NARROW = {"predictor": predictors.SimilarityPredictor(width=5)}
LSTM = layers.NeuralSimilarityLSTMCell(6, similarity="unconstrained")


def convolution(**options):
    return layers.NeuralSimilarityConv2D(6, 3, **{"padding": "same", **options})


def recipe(**options):
    return predictors.SimilarityPredictor(width=5, **options)


def dense(**options):
    return layers.NeuralSimilarityDense(6, **UNS, block_size=4, **options)


IMAGE, UNS = (8, 8, 4), {"similarity": "unconstrained"}
PREDICTED = 64 * (SPHERE + 9 * 4)
OF_81 = 9 * 4 * 5 + 9 * 5 * 81  # A predictor of an unconstrained `M`, at one position.
POOLED = 16 * OF_81 + 64 * 81 * 4  # Predicted for blocks of 2x2 positions.
BLOCKS = 16 * SPHERE + 56 * 9 * 4
SHARED = predictors.SharedSimilarityPredictor(recipe(), 4)
DEPTHWISE = layers.NeuralSimilarityDepthwiseConv2D(3, padding="same", **NARROW)
TRANSPOSED = layers.NeuralSimilarityConv2DTranspose(6, 3, 2, **UNS, **NARROW)
#: It knows no sizes of its own.
NESTED = keras.Sequential([keras.Input((None, None, 4)), convolution()])
LSTMS = keras.layers.Bidirectional(keras.layers.RNN(LSTM))
GRU = keras.layers.RNN(layers.NeuralSimilarityGRUCell(6, **NARROW))


@pytest.mark.parametrize(
    ("layer", "shape", "plain", "added"),
    [
        (convolution(), IMAGE, PLAIN, 0),
        (convolution(strides=2, **UNS), IMAGE, PLAIN // 4, 0),
        (convolution(groups=2), IMAGE, PLAIN // 2, 0),
        (convolution(**NARROW), IMAGE, PLAIN, PREDICTED),
        (convolution(**UNS, predictor=recipe(pooled=True)), IMAGE, PLAIN, POOLED),
        (convolution(predictor=recipe(downsampling=2)), (7, 8, 4), 7 * PLAIN // 8, BLOCKS),
        (convolution(predictor=SHARED), IMAGE, PLAIN, PREDICTED + 64 * 9 * 4 * 4),
        (DEPTHWISE, IMAGE, 64 * 9 * 4, 64 * (4 * 5 + 9 * 5 * 9 + 9 * 4)),
        # At the positions of its input, on patches of 6 filters.
        (TRANSPOSED, IMAGE, PLAIN, 16 * OF_81 + 64 * 81 * 6),
        (dense(), (5, 12), 5 * 12 * 6, 0),
        (dense(**NARROW), (5, 12), 5 * 12 * 6, 5 * (12 * 5 + 5 * 16 + 3 * 16)),
        (NESTED, IMAGE, PLAIN, 0),
        (keras.layers.TimeDistributed(NESTED), (7, *IMAGE), 7 * PLAIN, 0),
        (LSTMS, (7, 4), 2 * 7 * (4 + 6) * 24, 2 * 7 * (4**2 + 6**2)),
        (GRU, (7, 4), 7 * (4 + 6) * 18, 7 * (4 * 5 + 5 * 4 + 4 + 6 * 5 + 5 * 6 + 6)),
    ],
)
def test_one_layer(layer, shape, plain, added):
    model = keras.Sequential([keras.Input(shape), layer])
    (row,) = summary(model).layers
    assert (row.plain_multiply_adds, row.multiply_adds) == (plain, plain + added)
    dynamic = getattr(getattr(layer, "cell", layer), "predictor", None) is not None
    assert row.folds == (not dynamic)
    assert row.similarity.startswith("dynamic" if dynamic else "static")
    assert row.parameters == model.count_params()


@pytest.mark.long
def test_resnet50_on_its_usual_images():
    # The figure for this network everywhere: 3.86 G.
    whole = summary(keras.applications.ResNet50(weights=None))
    assert whole.layers == whole.not_counted == ()
    assert whole.multiply_adds == whole.plain_multiply_adds == 3_857_973_248
    assert whole.similarity_parameters == 0


def test_shared_layers_count_at_each_call_and_predictors_once():
    predictor = predictors.SharedSimilarityPredictor(recipe(), adapted_filters=4)
    options = {"padding": "same", "predictor": predictor}
    one = layers.NeuralSimilarityConv2D(4, 3, **options)
    two = layers.NeuralSimilarityConv2D(4, 3, **options)
    inputs = keras.Input((8, 8, 4))
    model = keras.Model(inputs, two(one(one(inputs))))
    result = summary(model)
    plain = 64 * 9 * 4 * 4
    assert [row.plain_multiply_adds for row in result.layers] == [2 * plain, plain]
    assert result.multiply_adds == 3 * (plain + 64 * (9 * 4 * 4 + SPHERE + 9 * 4))
    added = sum(row.similarity_parameters for row in result.layers)
    assert result.similarity_parameters == added - predictor.count_params()
    assert result.parameters == model.count_params()


def test_totals_are_those_of_the_plain_network():
    plain = keras.Sequential(
        [
            keras.Input((9, 9, 3)),
            keras.layers.Conv2D(4, 3, activation=keras.layers.PReLU()),
            keras.layers.BatchNormalization(),
            keras.layers.TimeDistributed(keras.layers.Conv1D(5, 3)),
            keras.layers.Conv2DTranspose(3, 2),
            keras.layers.SeparableConv2D(2, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    plain(ops.ones((1, 9, 9, 3)))
    expected = summary(plain)
    result = summary(add_similarity(plain, Unconstrained(learn_shape=True)))
    assert result.multiply_adds == expected.multiply_adds == expected.plain_multiply_adds
    assert result.parameters - result.similarity_parameters == expected.parameters
    assert result.similarity_parameters == 2 * (81 + 9) + (9 + 3) + (16 + 4)
    folded = summary(fold(add_similarity(plain)))
    assert (folded.multiply_adds, folded.parameters, folded.layers) == (
        expected.multiply_adds,
        expected.parameters,
        (),
    )


def test_unknown_sizes_and_layers():
    inputs = keras.Input((None, None, 4))
    result = summary(keras.Model(inputs, convolution()(inputs)))
    assert result.multiply_adds is None
    assert "?" in str(result)
    inputs = keras.Input((5, 4))
    x = layers.NeuralSimilarityDense(4)(inputs)
    attention = keras.layers.MultiHeadAttention(2, 2, name="attention")
    model = keras.Model(inputs, keras.layers.BatchNormalization()(attention(x, x)))
    result = summary(model)
    assert result.multiply_adds == 5 * 16
    assert result.not_counted == ("attention",)
    assert str(result).endswith("Multiply-adds not counted: attention")
    with pytest.raises(ValueError, match="must be built"):
        summary(keras.Sequential([keras.layers.Dense(1)]))


def test_the_table():
    model = keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            layers.NeuralSimilarityConv2D(64, 3, padding="same", name="static"),
            convolution(similarity="unconstrained", predictor="sphere", name="dynamic"),
            keras.layers.ReLU(),
        ],
        name="table",
    )
    lines = str(summary(model)).splitlines()
    head, static, dynamic, whole = (" ".join(lines[row].split()) for row in (0, 2, 3, 4))
    assert not summary(model).folds
    assert head == "Layer Kind Similarity Parameters Added Multiply-adds Plain Folds"
    assert static == "static Conv2D static Diagonal 1,801 9 7,077,888 7,077,888 yes"
    assert dynamic.startswith("dynamic Conv2D dynamic Unconstrained ")
    assert dynamic.endswith(" no")
    assert whole.startswith("Total Sequential static Diagonal, dynamic Unconstrained ")
    starts = {line.index(line.split()[1]) for line in (lines[0], *lines[2:])}
    assert len(starts) == 1
