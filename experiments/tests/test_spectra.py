"""Singular values against NumPy's, on every kind of layer, in the logs and in a picture."""

import numpy as np
from conversion_harness import stack
from helpers import as_numpy, assert_close, normal, randomize

from experiments.neural_similarity.spectra import (
    SimilaritySpectra,
    effective_rank,
    plot_spectra,
    spectra,
)
from nsl_keras import layers, similarities


def check(found, matrix):
    values = np.linalg.svd(as_numpy(matrix).astype("float64"), compute_uv=False)
    np.testing.assert_allclose(found, values, rtol=1e-6)
    shares = values[values > 1e-6] / values.sum()
    assert_close(effective_rank(found), np.exp(-np.sum(shares * np.log(shares))), 1e-5)


def test_every_kernel_has_three_matrices():
    shaped = similarities.Unconstrained(learn_shape=True)
    plain = {"kernel_size": 3, "padding": "same", "similarity": shaped}
    parts = [
        layers.NeuralSimilarityConv2D(6, groups=2, name="conv", **plain),
        layers.NeuralSimilarityConv2D(5, 3, predictor="sphere", name="dynamic"),
        layers.NeuralSimilarityDepthwiseConv2D(**plain, name="depthwise"),
    ]
    dense = layers.NeuralSimilarityDense(3, block_size=5, name="dense")
    model = stack(stack(*parts, shape=(6, 6, 4)), dense, shape=(6, 6, 4))
    randomize(model)
    found = spectra(model)
    names = [name.rpartition("/")[2] for name in found]
    assert names == ["conv", "depthwise", "dense"]
    for part, rows, of_layer in zip(
        (parts[0], parts[2], dense), (18, 9, 5), found.values(), strict=True
    ):
        check(of_layer["W"], as_numpy(part.kernel).reshape(rows, -1))
        check(of_layer["M"], part.similarity_matrix)
        check(of_layer["M^T W"], as_numpy(part.equivalent_kernel).reshape(rows, -1))


def test_columns_are_filters():
    layer = layers.NeuralSimilarityConv2DTranspose(5, 3, similarity="unconstrained")
    (found,) = spectra(stack(layer, shape=(6, 6, 2))).values()
    kernel = as_numpy(layer.equivalent_kernel)  # Its filters are the third axis.
    check(found["M^T W"], np.swapaxes(kernel, -1, -2).reshape(18, 5))


def test_logs_and_picture(tmp_path):
    model = stack(layers.NeuralSimilarityDense(2, name="dense"), shape=(4,))
    model.compile("sgd", "mse")
    inputs = normal(8, 4)
    options = {"epochs": 2, "verbose": 0, "callbacks": [SimilaritySpectra()]}
    history = model.fit(inputs, inputs[:, :2], **options).history
    values = spectra(model)["dense"]["M^T W"]
    assert history["dense_nuclear_norm"][1] == values.sum()
    assert history["dense_effective_rank"][1] == effective_rank(values)

    figure = plot_spectra(model)
    figure.savefig(tmp_path / "figure.png")
    (axis,) = (axis for axis in figure.axes if axis.lines)
    for line, (name, values) in zip(
        axis.lines, spectra(model)["dense"].items(), strict=True
    ):
        np.testing.assert_allclose(line.get_ydata() * values[0], values)
        assert line.get_label() == f"{name}: {effective_rank(values):.1f}"


def test_no_rank_of_nothing():
    assert effective_rank(np.zeros(3)) == 0
