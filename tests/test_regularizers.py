"""Penalties on similarities: NumPy's numbers, and training."""

import numpy as np
import pytest
from helpers import assert_close, normal, randomize, refusing, reloaded
from keras import ops
from layer_cases import SIMILARITIES, static_matrix, with_arguments
from layer_harness import stack

from nsl_keras.layers import NeuralSimilarityConv2D, NeuralSimilarityDense
from nsl_keras.predictors import SimilarityPredictor
from nsl_keras.regularizers import TowardsIdentity
from nsl_keras.similarities import Unconstrained

REGULARIZER = TowardsIdentity(l1=0.3, l2=0.2)


def distance(matrix):
    change = matrix - np.eye(len(matrix))
    return 0.3 * np.abs(change).sum() + 0.2 * np.square(change).sum()


@pytest.mark.parametrize("similarity", SIMILARITIES.values(), ids=SIMILARITIES)
def test_penalty_of_a_static_matrix_itself(similarity):
    """Not of the parameters, such as the Cholesky factor."""
    layer = NeuralSimilarityConv2D(
        3, (2, 3), similarity=with_arguments(similarity, regularizer=REGULARIZER)
    )
    layer.build((None, 5, 5, 2))
    randomize(layer)
    (loss,) = layer.losses
    assert_close(loss, distance(static_matrix(layer)), 1e-4)


#: Layers with a predicted `M`, the second with one for each block of 2x2 positions.
DYNAMIC = {
    "diagonal": {"similarity": "diagonal", "predictor": "sphere", "padding": "same"},
    "positive_semidefinite": {
        "similarity": "positive_semidefinite",
        "predictor": SimilarityPredictor("cnn", downsampling=2, batch_normalization=False),
    },
}


@pytest.mark.parametrize("options", DYNAMIC.values(), ids=DYNAMIC)
def test_penalty_of_predicted_matrices(options):
    """The mean over all predicted matrices, once a call."""
    similarity = with_arguments(options["similarity"], regularizer=REGULARIZER)
    layer = NeuralSimilarityConv2D(3, (2, 3), **{**options, "similarity": similarity})
    layer.build((4, 5, 6, 2))
    randomize(layer)
    images = normal(4, 5, 6, 2)
    for _ in range(2):
        layer(images)
    matrices = np.asarray(ops.convert_to_numpy(layer.predicted_matrices(images)), "float64")
    if getattr(options["predictor"], "downsampling", 1) == 2:
        matrices = matrices[:, ::2, ::2]
    each = [distance(matrix) for matrix in matrices.reshape(-1, 6, 6)]
    (loss,) = layer.losses
    assert_close(loss, np.mean(each), 1e-4)


def test_training_with_a_penalty_alone(tmp_path):
    """The predicted `M` goes back to the identity, also compiled and from a file."""
    layer = NeuralSimilarityDense(
        2,
        predictor=SimilarityPredictor(batch_normalization=False),
        similarity=Unconstrained(regularizer=TowardsIdentity(l2=1.0)),
        dtype="mixed_float16",
    )
    model = stack(layer, shape=(4,))
    model = reloaded(model, tmp_path)
    inputs = normal(16, 4)
    model.compile("adam", loss=lambda y, outputs: 0.0 * ops.mean(outputs, axis=-1))
    losses = model.fit(inputs, inputs[:, :2], epochs=4, verbose=0).history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > 0


test_errors = refusing(
    (lambda: TowardsIdentity(l1=-1.0), "`l1` must be .*l1=-1.0"),
    (lambda: TowardsIdentity(l2=None), "`l2` must be .*l2=None"),
    *((lambda n=n: TowardsIdentity()(ops.ones(n)), ".* square .*") for n in (4, (3, 2, 3))),
)
