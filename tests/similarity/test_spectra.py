"""Singular values against NumPy's, on every kind of layer, and in the logs."""

import keras
import numpy as np
import pytest
from conversion_harness import stack
from helpers import as_numpy, assert_close, normal, randomize

from nsl_keras import callbacks, layers
from nsl_keras.convert import spectra

SHAPE = (6, 6, 4)


def check(found, matrix):
    matrix = as_numpy(matrix).astype("float64")
    values = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(found.values, values, rtol=1e-6)
    shares = values[values > 1e-6] / values.sum()
    expected = values.sum(), np.exp(-np.sum(shares * np.log(shares)))
    assert_close((found.nuclear_norm, found.effective_rank), expected, 1e-5)


def test_every_kernel_has_three_matrices():
    plain = {"kernel_size": 3, "padding": "same", "similarity": "unconstrained"}
    parts = [
        layers.NeuralSimilarityConv2D(6, groups=2, learn_shape=True, name="conv", **plain),
        layers.NeuralSimilarityConv2D(5, 3, predictor="sphere", name="dynamic"),
        layers.NeuralSimilarityDepthwiseConv2D(**plain, name="depthwise"),
    ]
    nested = stack(*parts, shape=SHAPE)
    dense = layers.NeuralSimilarityDense(3, block_size=5, name="dense")
    model = stack(nested, dense, shape=SHAPE)
    found = spectra(model)
    names = [each.layer.rpartition("/")[2] for each in found]
    assert names == [name for name in ("conv", "depthwise", "dense") for _ in range(3)]
    assert [each.matrix for each in found] == ["W", "M", "M^T W"] * 3
    for index, (part, rows) in enumerate(
        zip([parts[0], parts[2], dense], (18, 9, 5), strict=True)
    ):
        kernels = (part.kernel, part.similarity_matrix, part.equivalent_kernel)
        for each, matrix in zip(found[3 * index : 3 * index + 3], kernels, strict=True):
            is_m = each.matrix == "M"
            check(each, matrix if is_m else np.reshape(as_numpy(matrix), (rows, -1)))
    assert str(found).splitlines()[0].split("  ")[0] == "Layer"
    assert len(str(found).splitlines()) == 2 + len(found)


def test_layers_of_the_same_name():
    layer, inputs = layers.NeuralSimilarityDense, keras.Input((4,))
    twins = [keras.Model(inputs, layer(3, name="same")(inputs)) for _ in range(2)]
    model = keras.Model(inputs, [twin(inputs) for twin in twins])
    randomize(model)
    found = spectra(model)
    assert [each.layer for each in found[::3]] == ["same", "same_1"]
    check(found[3], twins[1].get_layer("same").kernel)


def test_columns_are_filters():
    layer = layers.NeuralSimilarityConv2DTranspose(5, 3, similarity="unconstrained")
    found = spectra(stack(layer, shape=(6, 6, 2)))
    kernel = as_numpy(layer.equivalent_kernel)  # Its filters are the third axis.
    check(found[2], np.swapaxes(kernel, -1, -2).reshape(18, 5))


def test_recurrent_cells():
    cell = layers.NeuralSimilarityGRUCell(5, name="cell", recurrent_similarity="symmetric")
    model = stack(keras.layers.RNN(cell, name="rnn"), shape=(7, 4))
    found = spectra(model)
    names = ["rnn/cell/similarity", "rnn/cell/recurrent_similarity"]
    assert [each.layer for each in found[::3]] == names
    check(found[3], cell.recurrent_kernel)
    check(found[4], cell.state_form.similarity_matrix)
    check(found[5], cell.state_form.equivalent_kernel(cell.recurrent_kernel.value))


def test_zeros_and_numbers_that_are_not_finite():
    layer = layers.NeuralSimilarityDense(3)
    model = stack(layer, shape=(4,))
    layer.kernel.assign(np.zeros((4, 3)))
    assert [spectra(model)[0].effective_rank, spectra(model)[0].nuclear_norm] == [0, 0]
    layer.kernel.assign(np.full((4, 3), np.nan))
    assert np.isnan(
        [spectra(model)[0].effective_rank, spectra(model)[2].nuclear_norm]
    ).all()
    assert spectra(model)[1].nuclear_norm > 0


def test_logs():
    model = stack(layers.NeuralSimilarityDense(2, name="dense"), shape=(4,))
    model.compile("sgd", "mse")
    inputs = normal(8, 4)
    options = {"epochs": 2, "verbose": 0, "callbacks": [callbacks.SimilaritySpectra()]}
    history = model.fit(inputs, inputs[:, :2], **options).history
    after = spectra(model)[2]
    assert history["dense_nuclear_norm"][1] == after.nuclear_norm
    assert history["dense_effective_rank"][1] == after.effective_rank
    assert len(history["dense_effective_rank"]) == 2


def test_errors(tmp_path):
    model = stack(keras.layers.Dense(2), shape=(4,))
    with pytest.raises(ValueError, match=r"`model` must have static .*Received: model='"):
        spectra(model)
    with pytest.raises(ValueError, match="`spectra` needs a built layer"):
        spectra(keras.Sequential([layers.NeuralSimilarityDense(2)]))
    model.compile("sgd", "mse")
    backup = callbacks.TrainingBackup(tmp_path)
    order = [backup, callbacks.SimilaritySpectra()]
    with pytest.raises(ValueError, match="`callbacks` must have `TrainingBackup` after"):
        model.fit(normal(8, 4), normal(8, 2), callbacks=order, verbose=0)
