"""Variants that the papers mention beside their equations, against NumPy."""

import keras
import numpy as np
import pytest

import nsl_keras
from experiments.neural_similarity import methods
from experiments.neural_similarity.implicit_regularization import descend, effective_rank

RNG = np.random.default_rng(7)


def randomized(layer, shape):
    layer.build(shape)
    for each in layer.variables:
        each.assign(RNG.normal(size=each.shape))
    return layer


def convolved(images, kernel):
    """A 3x3 convolution of stride 1 with zeros around the images."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    return np.einsum("nhwcij,ijco->nhwo", windows, kernel)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained", "predicted_mask"])
def test_a_global_similarity_of_positions_and_channels(similarity, data_format, tmp_path):
    """NSL Eq. (8), `M_G X_F` with an `M_G` of all inputs; Appendix B.1, a mask of each."""
    options = {"sphere": False, "data_format": data_format}
    layer = nsl_keras.layers.GlobalNeuralSimilarity2D(
        similarity, shared_by_channels=False, **options
    )
    images = RNG.normal(size=(2, 3, 4, 5)).astype("float32")
    last = data_format == "channels_last"
    given = images if last else np.moveaxis(images, -1, 1)
    randomized(layer, given.shape)
    flat = images.reshape(2, 60)
    if similarity == "predicted_mask":
        hidden, output = (
            each.kernel.numpy() for each in (layer.mask_hidden, layer.mask_output)
        )
        assert output.shape == (3, 3, 64, 5)
        mask = 1 + convolved(np.maximum(convolved(images, hidden), 0), output)
        expected = mask * images
    else:
        matrix = layer.similarity_parameters.numpy()
        matrix = np.diag(matrix) if similarity == "diagonal" else matrix
        assert matrix.shape == (60, 60)
        expected = (flat @ matrix.T).reshape(images.shape)
    expected = expected if last else np.moveaxis(expected, -1, 1)
    np.testing.assert_allclose(layer(given), expected, rtol=1e-4, atol=1e-3)
    model = keras.Sequential([keras.Input(given.shape[1:]), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(given), model(given), rtol=1e-6)


def test_a_global_similarity_of_one_position_is_a_local_one():
    """NSL Appendix B.1: both are equal on a map of one position."""
    images = RNG.normal(size=(3, 1, 1, 5)).astype("float32")
    layer = nsl_keras.layers.GlobalNeuralSimilarity2D(
        "unconstrained", shared_by_channels=False
    )
    model = keras.Sequential([layer, keras.layers.Conv2D(4, 1, use_bias=False)])
    model(images)
    layer.similarity_parameters.assign(RNG.normal(size=(5, 5)))
    local = nsl_keras.layers.NeuralSimilarityConv2D(4, 1, use_bias=False, similarity="full")
    local(images)
    local.kernel.assign(model.layers[1].kernel)
    local.bilinear_form.similarity_parameters.assign(layer.similarity_parameters)
    np.testing.assert_allclose(local(images), model(images), rtol=1e-4, atol=1e-5)


def test_attention_is_of_positions_alone():
    with pytest.raises(ValueError, match="`shared_by_channels` must be True"):
        nsl_keras.layers.GlobalNeuralSimilarity2D("attention", shared_by_channels=False)


def test_maps_of_equal_size_share_their_adaptation(tmp_path):
    """NSL 3.3.2: `M(x) = I + shared(adaptation(x))`, one adaptation a size of maps."""
    shared = nsl_keras.predictors.SharedSimilarityPredictor(
        nsl_keras.predictors.SimilarityPredictor("cnn", width=4), 3, share_adaptations=True
    )
    options = {"padding": "same", "predictor": shared}
    layers = [nsl_keras.layers.NeuralSimilarityConv2D(5, 3, **options) for _ in range(4)]
    pool = keras.layers.MaxPooling2D()
    model = keras.Sequential([keras.Input((6, 4, 5)), *layers[:2], pool, *layers[2:]])
    for each in model.variables:
        each.assign(RNG.normal(size=each.shape))
    kernels = [each.bilinear_form.network.layers[0].kernel for each in layers]
    assert kernels[0] is kernels[1] and kernels[2] is kernels[3]
    assert kernels[0] is not kernels[2]
    # Kernels and biases; two adaptations; the two kernels of the predictor.
    assert len(model.trainable_variables) == 4 * 2 + 2 + 2

    x = RNG.normal(size=(2, 6, 4, 5)).astype("float32")
    hidden, output = (each.numpy() for each in shared.trainable_variables)
    adapted = np.maximum(convolved(convolved(x, kernels[1].numpy()), hidden), 0)
    diagonal = 1 + convolved(adapted, output)
    matrices = keras.ops.convert_to_numpy(layers[1].predicted_matrices(x))
    np.testing.assert_allclose(
        matrices, diagonal[..., None] * np.eye(9), rtol=1e-4, atol=1e-3
    )

    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5)
    assert len(loaded.trainable_variables) == len(model.trainable_variables)


def test_the_effective_rank_of_equal_values_is_their_number():
    for values, rank in (([2, 2, 2, 0], 3), ([1, 1e-9], 1), ([0, 0], 0)):
        assert effective_rank(np.array(values, float)) == pytest.approx(rank, abs=1e-6)


def test_descent_on_both_factors_is_the_papers_flow():
    """NSL Eq. (6), with a small step in place of the derivative."""
    inputs, targets, start = (
        RNG.normal(size=size) for size in ((9, 20), (9, 20), (20, 20))
    )
    before, after = descend(start, 1, 0.5, inputs, targets, 1e-8, 1, 1)
    similarity, kernel = 0.5 * np.eye(20), start / 0.5
    plain = inputs.T @ (targets - inputs @ start)
    flow = similarity.T @ similarity @ plain + plain @ kernel.T @ kernel
    np.testing.assert_allclose((after - before) / 1e-8, flow, rtol=1e-4, atol=1e-4)


def test_the_row_of_table_3_with_shared_adaptations():
    counts = []
    for name in ("dynamic_dns_shared", "dynamic_dns_shared_by_size"):
        row = methods.TABLES["3"].methods[name]
        model = methods.build("cnn9", row, (8, 8, 3), 10, 0.9, filters=(4, 4, 8))
        paths = [each.path for each in model.trainable_variables]
        counts.append(sum("adaptation" in path for path in paths))
    # Of nine inputs, maps of 8x8x4, 4x4x4, 2x2x4 and 2x2x8 are of one size.
    assert counts == [9, 4]
