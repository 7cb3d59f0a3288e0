"""`M` on features: einsum layers, 1x1 convolutions, int8 kernels, LoRA, orthogonal."""

import keras
import numpy as np
import pytest
from helpers import DTYPES, as_numpy, assert_close, normal, randomize, reloaded, stacked
from layer_cases import static_matrix

from nsl_keras import convert, similarities
from nsl_keras.layers import (
    NeuralSimilarityConv2D,
    NeuralSimilarityDense,
    NeuralSimilarityDepthwiseConv2D,
    NeuralSimilarityEinsumDense,
)

#: Equation, output shape and input shape, with four contracted features each.
EQUATIONS = {
    "heads": ("btd,ndh->btnh", (None, 3, 2), (2, 5, 4)),
    "output": ("btnh,nhd->btd", (5, 3), (2, 5, 2, 2)),
    "ellipsis": ("...x,xy->...y", (5,), (2, 5, 4)),
    "first": ("abc,bd->adc", (3, 5), (2, 4, 5)),
    "apart": ("abcd,bde->ace", (5, 3), (2, 2, 5, 2)),
}


def einsum(name, similarity, dtype="float32", **options):
    equation, output_shape, input_shape = EQUATIONS[name]
    layer = NeuralSimilarityEinsumDense(
        equation, output_shape, similarity=similarity, dtype=dtype, **options
    )
    layer.build((None, *input_shape[1:]))
    return randomize(layer), normal(*input_shape, dtype=dtype)


@pytest.mark.parametrize("name", EQUATIONS)
def test_einsum_formula(name):
    layer, inputs = einsum(name, "unconstrained", DTYPES[0], block_size=2)
    matrix = np.kron(np.eye(2), static_matrix(layer))
    # `M` on the features of the input, before the plain product.
    axes = [axis % inputs.ndim for axis in layer.input_axes]
    moved = np.moveaxis(inputs, axes, range(-len(axes), 0))
    rows = (moved.reshape(-1, 4) @ matrix.T).reshape(moved.shape)
    rows = np.moveaxis(rows, range(-len(axes), 0), axes)
    expected = np.einsum(layer.equation, rows, as_numpy(layer.kernel))
    assert_close(layer(inputs), expected, 1e-6)
    assert_close(layer.fold()(inputs), expected, 1e-6)


@pytest.mark.parametrize(
    "equation", ["bi,bij->bj", "ab,bb->ab", "ab,cd->abcd", "ab,bcd->ac", "abb,bc->ac"]
)
def test_equations_that_are_refused(equation):
    with pytest.raises(ValueError, match=r"`equation` must be one in which .* Received"):
        NeuralSimilarityEinsumDense(equation, (2, 2, 2))


def test_a_predictor_is_refused_in_einsum_layers():
    with pytest.raises(ValueError, match="`predictor` must be None in EinsumDense"):
        NeuralSimilarityEinsumDense("ab,bc->ac", 3, predictor="cnn")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_of_one_tap_reads_features(groups):
    images = normal(2, 5, 5, 8)
    similarity = similarities.Unconstrained(shared_by=1)
    layer = NeuralSimilarityConv2D(
        6, 1, strides=2, groups=groups, similarity=similarity, block_size=2
    )
    layer.build(images.shape)
    randomize(layer)
    blocks = static_matrix(layer)
    assert len(blocks) == 8 // groups // 2
    matrix = np.zeros((8 // groups, 8 // groups))
    for place, block in enumerate(blocks):
        matrix[2 * place :, 2 * place :][:2, :2] = block
    kernel = np.split(as_numpy(layer.kernel)[0, 0], groups, axis=-1)
    parts = np.split(images[:, ::2, ::2] @ np.kron(np.eye(groups), matrix.T), groups, -1)
    expected = [part @ each for part, each in zip(parts, kernel, strict=True)]
    expected = np.concatenate(expected, -1) + as_numpy(layer.bias)
    assert_close(layer(images), expected)
    assert_close(layer.fold()(images), expected)
    assert type(layer).from_config(layer.get_config()).block_size == 2
    for wrong in ({"kernel_size": 3}, {"kernel_size": 1, "predictor": "cnn"}):
        with pytest.raises(ValueError, match="`block_size` must be None, unless"):
            NeuralSimilarityConv2D(6, block_size=2, **wrong)
    with pytest.raises(ValueError, match="`block_size` must be None, unless"):
        NeuralSimilarityDepthwiseConv2D(1, block_size=2)


def test_large_matrices_are_refused():
    with pytest.raises(ValueError, match="`block_size` must be given, and at most 1024"):
        NeuralSimilarityDense(2, similarity="orthogonal").build((None, 1025))
    NeuralSimilarityDense(2).build((None, 1025))
    with pytest.raises(ValueError, match="is diagonal and has no regularizer"):
        penalized = similarities.Diagonal(regularizer="l2")
        NeuralSimilarityDense(2, similarity=penalized).build((None, 1025))
    NeuralSimilarityDense(2, similarity="orthogonal", block_size=5).build((None, 1025))


@pytest.mark.jax
@pytest.mark.parametrize(("kind", "shared_by"), [("dense", "layer"), ("einsum", 1)])
def test_int8_kernels(kind, shared_by, tmp_path):
    """`M` multiplies the input of a quantized kernel."""
    inputs = keras.Input((3, 8))
    part = (
        keras.layers.Dense(4, name="part")
        if kind == "dense"
        else keras.layers.EinsumDense("btd,ndh->btnh", (3, 2, 5), name="part")
    )
    plain = keras.Model(inputs, keras.layers.Dense(2)(part(inputs)))
    part.quantize("int8")
    similarity = similarities.Unconstrained(shared_by=shared_by)
    model = convert.add_similarity(plain, similarity, layers=["part"], block_size=2)
    x = normal(2, 3, 8)
    assert_close(model(x), plain(x), 1e-6)
    layer = model.get_layer("part")
    assert [each.name for each in model.trainable_variables] == ["similarity"]
    randomize(layer.bilinear_form.trainable_variables)
    matrix = static_matrix(layer)
    blocks = [matrix] * 4 if shared_by == "layer" else matrix
    rows = [x[..., 2 * n : 2 * n + 2] @ each.T for n, each in enumerate(blocks)]
    rows = np.concatenate(rows, -1)
    assert_close(model(x), plain(rows.astype("float32")), 1e-5)
    assert_close(reloaded(model, tmp_path)(x), model(x), 1e-6)
    assert not convert.summary(model).folds
    with pytest.raises(ValueError, match=r"are static, of floats, .*a quantized Neural"):
        convert.fold(model, inplace=True)
    for options in ({"learn_shape": True}, {"shared_by": "filter"}):
        refused = similarities.Diagonal(**options)
        with pytest.raises(ValueError, match="`similarity` must be without `learn_shape`"):
            convert.add_similarity(plain, refused, layers=["part"])


@pytest.mark.jax
@pytest.mark.parametrize("first", ["LoRA", "similarity"])
def test_lora_beside_a_similarity(first, tmp_path):
    """In one layer, and in another, plain one."""
    model = stacked((8,), keras.layers.Dense(6, name="part"), keras.layers.Dense(2))
    if first == "LoRA":
        model.get_layer("part").enable_lora(2)
    model = convert.add_similarity(model, "orthogonal", inplace=True)
    layer = model.get_layer("part")
    if first == "similarity":
        layer.enable_lora(2)
    names = [each.name for each in model.trainable_variables]
    assert sorted(names) == ["lora_kernel_a", "lora_kernel_b", "similarity"]
    model.layers[1].trainable = True
    model.layers[1].enable_lora(2)
    randomize(model.trainable_variables)
    x = normal(3, 8)
    expected = as_numpy(model(x))
    folded = reloaded(convert.fold(model), tmp_path)
    assert_close(folded(x), expected)
    assert type(folded.get_layer("part")) is keras.layers.Dense
    assert convert.fold(model, inplace=True) is model
    assert_close(model(x), expected)
    assert layer.lora_enabled and type(layer) is keras.layers.Dense


@pytest.mark.jax
def test_orthogonal_stays_orthogonal():
    keras.config.set_dtype_policy("mixed_float16")
    layer = NeuralSimilarityDense(6, similarity="orthogonal", block_size=16)
    model = keras.Sequential([keras.Input((32,)), layer])
    model.compile(keras.optimizers.Adam(0.3), "mse")
    model.fit(normal(16, 32), normal(16, 6, seed=1), epochs=5, verbose=0)
    matrix = as_numpy(layer.similarity_matrix).astype("float64")
    assert np.abs(matrix - np.eye(16)).max() > 0.1
    assert np.abs(matrix.T @ matrix - np.eye(16)).max() < 1e-6


def test_orthogonal_starts():
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    layer = NeuralSimilarityDense(
        2,
        similarity=similarities.Orthogonal(initializer=keras.initializers.Constant(turn)),
        block_size=2,
    )
    layer.build((None, 4))
    assert_close(layer.similarity_matrix, turn, 1e-6)
    for wrong in ("ones", keras.initializers.Constant(-np.eye(2))):
        layer = NeuralSimilarityDense(
            2, similarity=similarities.Orthogonal(initializer=wrong), block_size=2
        )
        with pytest.raises(ValueError, match="`initializer` must be one that gives an ort"):
            layer.build((None, 4))
