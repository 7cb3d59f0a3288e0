"""Recurrent cells with a neural similarity, against Keras's own."""

import keras
import numpy as np
import pytest
from helpers import DTYPES, assert_all_equal, assert_close, assert_equal, randomize, values
from keras import ops
from layer_cases import TOLERANCES, identity_parameters, to_matrix

from nsl_keras import layers, predictors, similarities

BATCH, STEPS, FEATURES, UNITS = 5, 4, 6, 4
SEQUENCES = np.random.default_rng(5).normal(size=(BATCH, STEPS, FEATURES))
# Ends, holes, one without a gap, and one without a step.
MASK = np.array([[1] * 4, [1, 1, 0, 0], [0, 1, 0, 1], [0] * 4, [1, 0, 0, 1]], bool)

#: Cells by name: ours, Keras's, and the arguments that make the variant.
CELLS = {
    "simple_rnn": (layers.NeuralSimilaritySimpleRNNCell, keras.layers.SimpleRNNCell, {}),
    "gru": (layers.NeuralSimilarityGRUCell, keras.layers.GRUCell, {}),
    "gru_reset_before": (
        *(layers.NeuralSimilarityGRUCell, keras.layers.GRUCell),
        {"reset_after": False},
    ),
    "lstm": (layers.NeuralSimilarityLSTMCell, keras.layers.LSTMCell, {}),
}
each_cell = pytest.mark.parametrize("name", CELLS)


def sequences(dtype="float32"):
    return ops.convert_to_tensor(SEQUENCES, dtype=dtype)


def made(name, **options):
    ours, _, variant = CELLS[name]
    return ours(UNITS, **variant, **options)


def built(name, **options):
    """A built cell with random weights."""
    cell = made(name, **options)
    cell.build((None, FEATURES))
    randomize(cell.trainable_variables, 0.4)
    return cell


def plain_twin(name, cell, **options):
    """Keras's cell with the kernels and the bias of one of ours."""
    _, plain, variant = CELLS[name]
    twin = plain(UNITS, **variant, **options)
    twin.build((None, FEATURES))
    twin.kernel.assign(cell.kernel)
    twin.recurrent_kernel.assign(cell.recurrent_kernel)
    if cell.use_bias:
        twin.bias.assign(cell.bias)
    return twin


def assert_equals_the_twin(name, options, calling, **rnn_options):
    """The same dropout masks too: seed and order of the draws are Keras's."""
    cell = made(name, **options)
    cell.build((None, FEATURES))
    plain_options = {k: v for k, v in options.items() if k != "similarity"}
    ours, theirs = (
        keras.layers.RNN(each, return_sequences=True, return_state=True, **rnn_options)(
            sequences(), mask=ops.convert_to_tensor(MASK), **calling
        )
        for each in (cell, plain_twin(name, cell, **plain_options))
    )
    for received, expected in zip(ours, theirs, strict=True):
        assert_close(received, expected, 1e-6)


@each_cell
def test_starts_as_the_plain_cell(name):
    options = {"bias_initializer": "random_normal", "seed": 3, "dropout": 0.3}
    unrolled = {"similarity": "positive_semidefinite", "use_bias": False, **options}
    assert_equals_the_twin(name, unrolled, {"training": True}, unroll=True)
    both = {"recurrent_dropout": 0.4, "activation": "relu", **options}
    assert_equals_the_twin(name, both, {"training": True}, zero_output_for_mask=True)


FORMS = {
    "diagonal": {},
    "blocks": {"similarity": "unconstrained", "block_size": 2},
    "predicted": {
        "similarity": "symmetric",
        "predictor": predictors.SimilarityPredictor("full_sphere", start="published"),
    },
    "predicted_blocks": {
        "similarity": "unconstrained",
        "block_size": 2,
        "predictor": "sphere",
    },
}


def matrix_of(part, vector, features):
    """`M` of all features for one vector: predicted in it, or the static one."""
    taps = part.block_size or features
    if part.predictor is None:
        parameters = part.similarity_parameters
    else:
        identity = identity_parameters(part.similarity, taps)
        prediction = ops.convert_to_numpy(part.network(vector[None]))
        parameters = identity + prediction.reshape(identity.shape)
    return np.kron(np.eye(features // taps), to_matrix(part.similarity, parameters))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        # Every form in the cell that compares its state twice.
        *(("gru_reset_before", form) for form in FORMS),
        *((name, "predicted_blocks") for name in ("simple_rnn", "gru", "lstm")),
    ],
)
def test_equals_the_plain_cell_with_the_kernels_of_each_example(name, form):
    dtype = DTYPES[0]
    # A diagonal `M` and dropout commute.
    rate = 0.5 if form == "diagonal" else 0.0
    options = {"dtype": dtype, "dropout": rate, "recurrent_dropout": rate, "seed": 1}
    cell = built(name, **options, **FORMS[form])
    x, state = sequences(dtype)[:, 0], sequences(dtype)[:, 1, :UNITS]
    # Keras's layers pass a list; a state may also come alone.
    states = [state, 2 * state] if name == "lstm" else state
    received, after = cell(x, states, training=True)
    for example in range(BATCH):
        twin = plain_twin(name, cell, **options)
        matrix = matrix_of(cell.input_form, x[example], FEATURES)
        twin.kernel.assign(matrix.T @ ops.convert_to_numpy(cell.kernel))
        matrix = matrix_of(cell.state_form, state[example], UNITS)
        twin.recurrent_kernel.assign(matrix.T @ ops.convert_to_numpy(cell.recurrent_kernel))
        expected, others = twin(x, states, training=True)
        keras.tree.assert_same_structure(after, others)
        assert_close(received[example], expected[example], 10 * TOLERANCES[dtype])


def test_arguments_reach_both_similarities():
    half = keras.initializers.Identity(0.5)
    similarity = similarities.Diagonal(
        initializer=half, regularizer="l1", constraint="non_neg"
    )
    cell = made("gru", similarity=similarity)
    cell.build((None, FEATURES))
    assert len(keras.layers.RNN(cell).losses) == 2
    for part, size in ((cell.input_form, FEATURES), (cell.state_form, UNITS)):
        constraint = part.similarity_parameters.constraint
        assert isinstance(constraint, keras.constraints.NonNeg)
        assert_equal(part.similarity_matrix, 0.5 * np.eye(size))


LAYERS = {
    "simple_rnn": (layers.NeuralSimilaritySimpleRNN, keras.layers.SimpleRNN, {}),
    "gru": (layers.NeuralSimilarityGRU, keras.layers.GRU, {"reset_after": False}),
    "lstm": (layers.NeuralSimilarityLSTM, keras.layers.LSTM, {"unit_forget_bias": False}),
}
OPTIONS = {
    "return_sequences": True,
    "return_state": True,
    "go_backwards": True,
    "zero_output_for_mask": True,
    "dtype": DTYPES[0],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_fold_into_keras_layers(name):
    kind, plain, variant = LAYERS[name]
    of_cell = {**variant, "activation": keras.layers.PReLU(dtype=DTYPES[0])}
    layer = kind(UNITS, similarity="unconstrained", block_size=2, **of_cell, **OPTIONS)
    inputs, mask = sequences(DTYPES[0]), ops.convert_to_tensor(MASK)
    layer(inputs, mask=mask)
    randomize(layer.trainable_variables, 0.4)
    expected = layer(inputs, mask=mask)
    folded = layer.fold()
    assert (type(folded), folded.name) == (plain, layer.name)
    assert type(folded.cell) is layer.cell.plain
    for other in (folded, keras.layers.RNN(layer.cell, **OPTIONS)):
        for one, two in zip(other(inputs, mask=mask), expected, strict=True):
            assert_close(one, two, 10 * TOLERANCES[DTYPES[0]])


IN_CELL = "`similarity` must be one without .* in a recurrent cell.*='Diagonal'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"predictor": "cnn", "similarity": similarities.Diagonal(regularizer="l1")},
            IN_CELL,
        ),
        ({"similarity": similarities.Diagonal(shared_by=2)}, IN_CELL),
        ({"block_size": 3}, "`block_size` must be a divisor of the 4 feat.*=3"),
        (
            {"predictor": keras.layers.Dense(5)},
            r"output_shape` must be 6, the number .*None, 5",
        ),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        made("gru", **options).build((None, FEATURES))


def test_a_custom_predictor_of_both_kernels_stays_one_layer():
    predictor = keras.layers.Dense(FEATURES, kernel_initializer="zeros")
    layer = layers.NeuralSimilarityGRU(FEATURES, predictor=predictor)
    assert layer.predictor is predictor and layer.use_bias and not layer.dropout
    for count, each in ((5, layer), (10, keras.layers.Bidirectional(layer))):
        model = keras.Sequential([keras.Input((STEPS, FEATURES)), each])
        copy = keras.models.clone_model(model)
        assert len(copy.weights) == len(model.weights) == count
        copy.set_weights(model.get_weights())
        assert_equal(copy(sequences()), model(sequences()))


def test_errors_of_fold_and_of_layers():
    with pytest.raises(ValueError, match="`predictor` must be None for `fold`"):
        built("gru", predictor="cnn").fold()
    for each in (made("gru"), layers.NeuralSimilarityGRU(UNITS)):
        with pytest.raises(ValueError, match="`fold` needs a built layer"):
            each.fold()
    with pytest.raises(ValueError, match="use_cudnn"):
        layers.NeuralSimilarityGRU(UNITS, use_cudnn=True)


@pytest.mark.parametrize("name", ["LSTMCell", "Conv1D"])
def test_keras_does_not_load_the_kernels_without_their_similarity(name, tmp_path):
    def network(library, prefix=""):
        kind = getattr(library, f"{prefix}{name}")
        if name == "Conv1D":  # Else the paths differ.
            inside, shape = keras.layers.TimeDistributed(kind(4, 3)), (2, 5, 3)
        else:
            inside, shape = keras.layers.RNN(kind(4)), (5, 3)
        return keras.Sequential([keras.Input(shape), inside])

    pair = network(layers, "NeuralSimilarity"), network(keras.layers)
    for source, other in (pair, pair[::-1]):
        source.save_weights(tmp_path / "model.weights.h5")
        expected = values(source.weights)
        randomize(source.weights)
        source.load_weights(tmp_path / "model.weights.h5")
        assert_all_equal(source.weights, expected)
        with pytest.raises(ValueError, match="could not be loaded"):
            other.load_weights(tmp_path / "model.weights.h5")
