"""Figures of models with similarities, against counts by hand and by TensorFlow."""

import keras
import pytest
from keras import ops

from nsl_keras import layers, predictors
from nsl_keras.convert import add_similarity, fold, summary

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"


def figures_of(layer, shape):
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer(inputs))
    (row,) = summary(model).layers
    return row


# One layer, by hand. 9 taps, 4 channels in, 6 filters; 8x8 positions, or 4x4.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"padding": "same"}, 64 * 9 * 4 * 6),
        ({"padding": "same", "strides": 2}, 16 * 9 * 4 * 6),
        ({"dilation_rate": 2, "similarity": "unconstrained"}, 16 * 9 * 4 * 6),
        ({"padding": "same", "groups": 2}, 64 * 9 * 2 * 6),
    ],
)
def test_static_convolutions_cost_what_plain_ones_cost(options, expected):
    row = figures_of(layers.NeuralSimilarityConv2D(6, 3, **options), (8, 8, 4))
    assert row.multiply_adds == row.plain_multiply_adds == expected
    assert row.folds and row.predictor is None
    assert row.kind == "Conv2D"


@pytest.mark.parametrize(
    ("similarity", "outputs", "hidden", "compared", "made", "strides"),
    [
        ("diagonal", 9, 10, 9 * 4, 0, 1),
        ("unconstrained", 81, 10, 81 * 4, 0, 2),
        ("positive_semidefinite", 45, 10, 81 * 4, 9**3, 2),
    ],
)
def test_dynamic_convolutions(similarity, outputs, hidden, compared, made, strides):
    layer = layers.NeuralSimilarityConv2D(
        20, 3, strides=strides, padding="same", similarity=similarity, predictor="sphere"
    )
    row = figures_of(layer, (8, 8, 4))
    positions = (8 // strides) ** 2
    predicted = 9 * 4 * hidden + 9 * hidden * outputs
    assert row.plain_multiply_adds == positions * 9 * 4 * 20
    added = row.multiply_adds - row.plain_multiply_adds
    assert added == positions * (predicted + compared + made)
    assert row.predictor_multiply_adds == positions * predicted
    assert row.predictor_ratio == predicted / (9 * 4 * 20)
    assert (row.predictor, row.folds) == ("sphere", False)
    assert row.parameters - row.similarity_parameters == 9 * 4 * 20 + 20


def test_one_matrix_an_example_is_made_once():
    predictor = predictors.SimilarityPredictor(width=5, pooled=True)
    layer = layers.NeuralSimilarityConv2D(
        6, 3, similarity="positive_semidefinite", predictor=predictor
    )
    row = figures_of(layer, (8, 8, 4))
    predicted = 9 * 4 * 5 + 9 * 5 * 45
    added = row.multiply_adds - row.plain_multiply_adds
    assert added == 36 * (predicted + 81 * 4) + 9**3


@pytest.mark.parametrize("shared", [False, True])
def test_a_prediction_for_a_block_is_made_once(shared):
    predictor = predictors.SimilarityPredictor(width=5, downsampling=2)
    if shared:
        predictor = predictors.SharedSimilarityPredictor(predictor, adapted_filters=7)
    layer = layers.NeuralSimilarityConv2D(6, 3, padding="same", predictor=predictor)
    row = figures_of(layer, (7, 8, 4))
    adapted = 7 * 8 * 9 * 4 * 7 if shared else 0
    predicted = 4 * 4 * (9 * (7 if shared else 4) * 5 + 9 * 5 * 9) + adapted
    assert row.predictor_multiply_adds == predicted
    assert row.multiply_adds - row.plain_multiply_adds == predicted + 7 * 8 * 9 * 4


def test_depthwise_convolutions():
    layer = layers.NeuralSimilarityDepthwiseConv2D(
        3, padding="same", depth_multiplier=2, predictor="cnn"
    )
    row = figures_of(layer, (8, 8, 4))
    assert row.plain_multiply_adds == 64 * 9 * 8
    added = row.multiply_adds - row.plain_multiply_adds
    assert added == 64 * (9 * 4 * 8 + 9 * 8 * 9 + 9 * 4)
    assert row.kind == "DepthwiseConv2D"


def test_channels_first():
    layer = layers.NeuralSimilarityConv2D(
        6, 3, data_format="channels_first", predictor="sphere"
    )
    row = figures_of(layer, (4, 8, 7))
    assert row.plain_multiply_adds == 6 * 5 * 9 * 4 * 6


def test_dense_layers():
    static = layers.NeuralSimilarityDense(6, similarity="unconstrained", block_size=4)
    row = figures_of(static, (5, 12))
    assert row.multiply_adds == row.plain_multiply_adds == 5 * 12 * 6
    assert row.similarity_parameters == 16
    dynamic = layers.NeuralSimilarityDense(
        6, similarity="unconstrained", block_size=4, predictor="cnn"
    )
    row = figures_of(dynamic, (5, 12))
    added = row.multiply_adds - row.plain_multiply_adds
    assert added == 5 * (12 * 8 + 8 * 16 + 3 * 16)
    assert row.predictor_multiply_adds == 5 * (12 * 8 + 8 * 16)


def test_recurrent_cells():
    cell = layers.NeuralSimilarityLSTMCell(6, similarity="unconstrained")
    row = figures_of(keras.layers.Bidirectional(keras.layers.RNN(cell)), (7, 4))
    assert row.plain_multiply_adds == 2 * 7 * (4 * 24 + 6 * 24)
    assert row.multiply_adds - row.plain_multiply_adds == 2 * 7 * (16 + 36)
    assert row.similarity_parameters == 2 * (16 + 36)
    assert (row.kind, row.folds) == ("Bidirectional", True)


def test_parts_of_a_cell_come_in_order():
    cell = layers.NeuralSimilarityGRUCell(
        4, similarity="diagonal", recurrent_similarity="unconstrained"
    )
    row = figures_of(keras.layers.RNN(cell), (5, 3))
    assert row.similarity == "diagonal, unconstrained"


# Whole models.


@pytest.mark.long
def test_resnet50_on_its_usual_images():
    base = keras.applications.ResNet50(weights=None)
    # The figure that goes with this network everywhere: 3.86 G.
    whole = summary(base)
    assert whole.layers == ()
    assert whole.multiply_adds == whole.plain_multiply_adds == 3_857_973_248
    assert whole.similarity_parameters == 0


@pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's profiler")
def test_plain_models_against_the_profiler():
    import tensorflow as tf

    model = keras.Sequential(
        [
            keras.Input((12, 12, 4)),
            keras.layers.Conv2D(6, 3, strides=2, padding="same", use_bias=False),
            keras.layers.DepthwiseConv2D(3, use_bias=False),
            keras.layers.SeparableConv2D(8, 3, use_bias=False),
            keras.layers.Conv2D(8, 1, use_bias=False),
            keras.layers.Flatten(),
            keras.layers.Dense(5, use_bias=False),
        ]
    )
    traced = tf.function(model).get_concrete_function(tf.TensorSpec((1, 12, 12, 4)))
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    profile = tf.compat.v1.profiler.profile(traced.graph, options=options)
    assert summary(model).multiply_adds == profile.total_float_ops // 2


def test_transposed_convolutions_count_at_their_inputs():
    model = keras.Sequential(
        [keras.Input((4, 5, 2)), keras.layers.Conv2DTranspose(3, 3, strides=2)]
    )
    assert summary(model).multiply_adds == 20 * 9 * 2 * 3


def test_shared_layers_count_at_each_call_and_predictors_once():
    predictor = predictors.SharedSimilarityPredictor(adapted_filters=5)
    one = layers.NeuralSimilarityConv2D(4, 3, padding="same", predictor=predictor)
    two = layers.NeuralSimilarityConv2D(4, 3, padding="same", predictor=predictor)
    inputs = keras.Input((8, 8, 4))
    model = keras.Model(inputs, two(one(one(inputs))))
    result = summary(model)
    positions = 64 * (9 * 4 * 5 + 9 * 5 * 8 + 9 * 8 * 9 + 9 * 4)
    plain = 64 * 9 * 4 * 4
    assert [row.plain_multiply_adds for row in result.layers] == [2 * plain, plain]
    assert result.multiply_adds == 3 * (plain + positions)
    shared = predictor.count_params()
    added = sum(row.similarity_parameters for row in result.layers)
    assert result.similarity_parameters == added - shared
    assert result.parameters == model.count_params()
    assert {row.predictor for row in result.layers} == {"shared sphere"}


def test_totals_are_those_of_the_plain_network():
    plain = keras.Sequential(
        [
            keras.Input((9, 9, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.TimeDistributed(keras.layers.Conv1D(5, 3)),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    expected = summary(plain)
    model = add_similarity(plain, "unconstrained", learn_shape=True)
    result = summary(model)
    assert result.multiply_adds == expected.multiply_adds == expected.plain_multiply_adds
    assert result.parameters - result.similarity_parameters == expected.parameters
    assert result.similarity_parameters == (81 + 9) + (9 + 3)
    folded = summary(fold(model))
    assert (folded.multiply_adds, folded.parameters, folded.layers) == (
        expected.multiply_adds,
        expected.parameters,
        (),
    )


def test_weights_of_an_activation_are_the_plain_layers():
    convolution = keras.layers.Conv2D(4, 3, activation=keras.layers.PReLU())
    plain = keras.Sequential([keras.Input((8, 8, 3)), convolution])
    plain(keras.ops.ones((1, 8, 8, 3)))
    result = summary(add_similarity(plain))
    assert result.parameters - result.similarity_parameters == plain.count_params()
    assert result.similarity_parameters == result.layers[0].similarity_parameters == 9


def test_unknown_sizes_and_kinds():
    inputs = keras.Input((None, None, 3))
    outputs = layers.NeuralSimilarityConv2D(4, 3, name="open")(inputs)
    result = summary(keras.Model(inputs, outputs))
    assert result.multiply_adds is None
    assert "?" in str(result)
    inputs = keras.Input((5, 4))
    outputs = layers.NeuralSimilarityDense(4)(inputs)
    attention = keras.layers.MultiHeadAttention(2, 2)(outputs, outputs)
    result = summary(keras.Model(inputs, attention))
    assert result.layers[0].multiply_adds == 5 * 16
    assert result.multiply_adds is None


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.PReLU(shared_axes=[1, 2]),
        keras.layers.LayerNormalization(axis=[1, 2, 3]),
        keras.layers.RMSNormalization(axis=[1, 2, 3]),
        keras.layers.Normalization(axis=(1, 2, 3)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_normalizations_and_activations_are_not_counted(layer):
    inputs = keras.Input((8, 8, 4))
    outputs = layers.NeuralSimilarityConv2D(6, 3)(layer(inputs))
    assert summary(keras.Model(inputs, outputs)).multiply_adds == 36 * 9 * 4 * 6


def test_a_model_folds_where_all_its_layers_do():
    static = layers.NeuralSimilarityConv2D(4, 3)
    for others, folds in (
        ([layers.BatchNormalization(), layers.CosineDense(3)], True),
        ([layers.SphereConv2D(4, 3)], False),
        ([layers.NeuralSimilarityConv2D(4, 3, predictor="sphere")], False),
    ):
        model = keras.Sequential([keras.Input((8, 8, 4)), static, *others])
        assert summary(model).folds is folds
        if folds:
            fold(model)
        else:
            with pytest.raises(ValueError, match="`model` must have"):
                fold(model)


def test_cosines_film_and_layers_of_ones_own_say_theirs():
    class Doubled(keras.layers.Dense):
        def count_multiply_adds(self, input_shape):
            raise AssertionError("a dense layer is known")

    class Mixing(keras.layers.Layer):
        def build(self, input_shape):
            self.mixing = self.add_weight(shape=(4, 4))

        def call(self, inputs):
            return inputs @ self.mixing

        def count_multiply_adds(self, input_shape):
            return 5 * 16

    inputs = keras.Input((5, 4))
    x = Mixing()(layers.InstanceFiLM(10)(Doubled(4)(inputs)))
    model = keras.Model(inputs, layers.CosineDense(3)(x))
    assert summary(model).multiply_adds == 5 * 16 + 3 * 10 * 4 + 5 * 16 + 5 * 4 * 3
    open_inputs = keras.Input((None, 4))
    assert (
        summary(keras.Model(open_inputs, layers.CosineDense(3)(open_inputs))).multiply_adds
        is None
    )


def test_a_layer_of_ones_own_without_weights_is_counted():
    class Gram(keras.layers.Layer):
        def call(self, inputs):
            return inputs @ ops.swapaxes(inputs, 1, 2)

        def count_multiply_adds(self, input_shape):
            return input_shape[1] ** 2 * input_shape[2]

    model = keras.Sequential([keras.Input((5, 4)), Gram()])
    assert summary(model).multiply_adds == 25 * 4


def test_look_ups_cost_nothing_and_products_with_a_table_do():
    class Own(keras.layers.Embedding):
        pass

    tokens = keras.Input((5,), dtype="int32")
    model = keras.Model(tokens, [keras.layers.Embedding(7, 4)(tokens), Own(7, 4)(tokens)])
    assert summary(model).multiply_adds == 0


@pytest.mark.skipif(
    not hasattr(keras.layers, "ReversibleEmbedding"), reason="an older Keras"
)
def test_an_embedding_in_reverse_is_not_counted():
    embedding = keras.layers.ReversibleEmbedding(7, 4)
    tokens = keras.Input((5,), dtype="int32")
    vectors = embedding(tokens)
    assert summary(keras.Model(tokens, vectors)).multiply_adds == 0
    model = keras.Model(tokens, embedding(vectors, reverse=True))
    assert summary(model).multiply_adds is None


def test_a_custom_predictor_is_counted():
    predictor = keras.Sequential(
        [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(9)], name="own"
    )
    row = figures_of(layers.NeuralSimilarityConv2D(4, 3, predictor=predictor), (8, 8, 3))
    assert row.predictor_multiply_adds == 3 * 9
    assert row.plain_multiply_adds == 36 * 9 * 3 * 4
    assert row.predictor == "Sequential"


# The table.


def test_the_table():
    model = keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            layers.NeuralSimilarityConv2D(64, 3, padding="same", name="static"),
            layers.NeuralSimilarityConv2D(
                64, 3, similarity="unconstrained", predictor="sphere", name="dynamic"
            ),
            keras.layers.ReLU(),
        ],
        name="table",
    )
    lines = []
    result = summary(model, print_fn=lines.append)
    assert "\n".join(lines) == str(result) == repr(result)
    assert lines[0] == "Model 'table': 2 of 3 layers have a neural similarity"
    head, static, dynamic = (" ".join(lines[row].split()) for row in (2, 4, 5))
    assert head == "Layer Kind Similarity M Parameters Added Multiply-adds Plain Folds"
    assert static == "static Conv2D diagonal static 1,801 9 7.08 M 7.08 M yes"
    assert dynamic.startswith("dynamic Conv2D unconstrained dynamic (sphere) ")
    assert dynamic.endswith(" no")
    assert lines[-1].startswith("Predictors take more") and "'dynamic' (" in lines[-1]
    assert lines[-2].startswith("Whole model")
    lines = lines[:-1]
    # Numbers stand right under their heads.
    for head in ("Parameters", "Added", "Multiply-adds", "Plain"):
        end = lines[2].index(head) + len(head)
        assert all(line[end - 1].strip() for line in lines[4:6] + lines[7:])
        assert all(line[end : end + 2] == "  " for line in lines[4:6] + lines[7:])


def test_models_that_cannot_be_summarized():
    with pytest.raises(ValueError, match="must be built"):
        summary(keras.Sequential([keras.layers.Dense(1)]))
