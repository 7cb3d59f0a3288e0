"""Regularizers: the authors' numbers, NumPy's, and finite differences."""

import keras
import numpy as np
import pytest
from conversion_harness import stack
from finite_differences import check_scalar_gradients
from golden_files import DTYPES, Golden, gradients
from helpers import IS_TENSORFLOW, assert_close, normal
from keras import ops
from similarity_layers import SIMILARITIES, randomize, static_matrix

from nsl_keras.layers import NeuralSimilarityConv2D, NeuralSimilarityDense, SphereConv2D
from nsl_keras.predictors import SimilarityPredictor
from nsl_keras.regularizers import NuclearNorm, OrthogonalityRegularizer, TowardsIdentity


@pytest.mark.parametrize("dtype", DTYPES)
def test_authors_numbers(dtype):
    golden = Golden("nsl_gns_conv")
    layer = SphereConv2D(
        6, 3, kernel_regularizer=OrthogonalityRegularizer(1e-4), dtype=dtype
    )
    layer.build(golden["in.x"].shape)
    layer.kernel.assign(golden["w.W"])
    golden.check("out64.orth_loss", layer.losses[0], dtype)
    kernel = ops.convert_to_tensor(layer.kernel)
    (gradient,) = gradients(layer.kernel_regularizer, [kernel])
    golden.check("grad64.orth_loss.W", gradient, dtype)


def test_values():
    kernel = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    matrix = kernel.reshape(6, 4)
    distance = np.sum((matrix.T @ matrix - np.eye(4)) ** 2)
    regularizer = OrthogonalityRegularizer(0.5, l2=0.25)
    np.testing.assert_allclose(
        float(regularizer(ops.convert_to_tensor(kernel))),
        0.5 * distance + 0.25 * np.sum(kernel**2),
        rtol=1e-5,
    )


def distance(matrix):
    change = matrix - np.eye(len(matrix))
    return 0.3 * np.abs(change).sum() + 0.2 * np.square(change).sum()


def nuclear_norm(matrix):
    return 0.4 * np.sqrt(np.linalg.eigvalsh(matrix.T @ matrix).clip(0)).sum()


#: Regularizers of `M`, and what they are without the package.
OF_MATRICES = {
    "toward_zero": (keras.regularizers.L1(0.3), lambda m: 0.3 * np.abs(m).sum()),
    "toward_identity": (TowardsIdentity(l1=0.3, l2=0.2), distance),
    "nuclear_norm": (NuclearNorm(0.4), nuclear_norm),
}
each_of_matrices = pytest.mark.parametrize("name", OF_MATRICES)


@each_of_matrices
def test_penalty_of_a_static_matrix_itself(name):
    """Not of the parameters, such as the Cholesky factor."""
    regularizer, expected = OF_MATRICES[name]
    for similarity in SIMILARITIES.values():
        layer = NeuralSimilarityConv2D(
            3, (2, 3), similarity=similarity, similarity_regularizer=regularizer
        )
        layer.build((None, 5, 5, 2))
        randomize(layer)
        (loss,) = layer.losses
        assert_close(loss, expected(static_matrix(layer)), 1e-4)


#: Layers with a predicted `M`, the second with one for each block of 2x2 positions.
DYNAMIC = {
    "diagonal": {"similarity": "diagonal", "predictor": "sphere", "padding": "same"},
    "positive_semidefinite": {
        "similarity": "positive_semidefinite",
        "predictor": SimilarityPredictor("cnn", downsampling=2, batch_normalization=False),
    },
    "symmetric_pooled": {
        "similarity": "symmetric",
        "predictor": SimilarityPredictor(pooled=True),
    },
}


def dynamic_layer(options, regularizer, dtype="float32"):
    layer = NeuralSimilarityConv2D(
        3, (2, 3), **options, similarity_regularizer=regularizer, dtype=dtype
    )
    layer.build((4, 5, 6, 2))
    randomize(layer)
    return layer


@each_of_matrices
@pytest.mark.parametrize("options", DYNAMIC.values(), ids=DYNAMIC)
def test_penalty_of_predicted_matrices(name, options):
    """The mean over all predicted matrices, once a call."""
    regularizer, expected = OF_MATRICES[name]
    layer = dynamic_layer(options, regularizer)
    images = normal(4, 5, 6, 2)
    for _ in range(2):
        layer(images)
    matrices = np.asarray(ops.convert_to_numpy(layer.predicted_matrices(images)), "float64")
    if getattr(options["predictor"], "downsampling", 1) == 2:
        matrices = matrices[:, ::2, ::2]
    each = [expected(matrix) for matrix in matrices.reshape(-1, 6, 6)]
    (loss,) = layer.losses
    assert_close(loss, np.mean(each), 1e-4)


@each_of_matrices
@pytest.mark.skipif(not IS_TENSORFLOW, reason="float64")
@pytest.mark.parametrize("similarity", ["unconstrained", "positive_semidefinite"])
@pytest.mark.parametrize("predictor", [None, "cnn"])
def test_gradients_of_penalties_against_finite_differences(name, similarity, predictor):
    options = {"similarity": similarity, "predictor": predictor}
    layer = dynamic_layer(options, OF_MATRICES[name][0], "float64")
    weights = layer.bilinear_form.trainable_variables
    images = ops.convert_to_tensor(normal(4, 5, 6, 2, dtype="float64"))

    def penalty(at):
        mapping = list(zip(weights, at, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            layer(images)
            return sum(layer.losses)

    points = [ops.convert_to_tensor(weight) for weight in weights]
    found = gradients(lambda *at: penalty(at), points)
    check_scalar_gradients(penalty, points, found, 1e-6, 1e-7)


def test_nuclear_norm_has_a_gradient_at_the_identity():
    matrix = ops.eye(4)
    (gradient,) = gradients(NuclearNorm(0.5), [matrix])
    assert_close(gradient, 0.5 * np.eye(4), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_training_with_a_penalty_alone(dtype, tmp_path):
    """The predicted `M` goes back to the identity, also compiled and from a file."""
    layer = NeuralSimilarityDense(
        2,
        predictor=SimilarityPredictor(batch_normalization=False),
        similarity="unconstrained",
        similarity_regularizer=TowardsIdentity(l2=1.0),
        dtype=dtype,
    )
    model = stack(layer, shape=(4,))
    model.save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    inputs = normal(16, 4)
    model.compile("adam", loss=lambda y, outputs: 0.0 * ops.mean(outputs, axis=-1))
    losses = model.fit(inputs, inputs[:, :2], epochs=4, verbose=0).history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > 0


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (OrthogonalityRegularizer, {"strength": 0.5, "l2": 0.25}),
        (NuclearNorm, {"rate": 0.1}),
        (TowardsIdentity, {"l1": 0.1, "l2": 0.0}),
    ],
)
def test_config(kind, config):
    again = keras.regularizers.get(keras.regularizers.serialize(kind(**config)))
    assert type(again) is kind
    assert again.get_config() == config


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 2, 3)])
def test_matrices_must_be_square(shape):
    for regularizer in (NuclearNorm(0.1), TowardsIdentity(l1=0.1)):
        with pytest.raises(ValueError, match=r"must be applied to square .*shape=\("):
            regularizer(ops.ones(shape))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (OrthogonalityRegularizer, {"strength": -1.0}, r"`strength` must .*strength=-1.0"),
        (OrthogonalityRegularizer, {"strength": "1"}, r"`strength` must be .*strength='1'"),
        (OrthogonalityRegularizer, {"l2": float("nan")}, r"`l2` must be .*l2=nan"),
        (TowardsIdentity, {"l1": -1.0}, r"`l1` must be .*l1=-1.0"),
        (TowardsIdentity, {"l2": None}, r"`l2` must be .*l2=None"),
        (NuclearNorm, {"rate": -1}, r"`rate` must be .*rate=-1"),
    ],
)
def test_errors(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
