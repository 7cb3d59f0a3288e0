"""What the benchmark calls a loop over `fit` is the same computation."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

import nsl_keras
from benchmarks import few_shot


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "compile_once"),
    list(zip(few_shot.CASES, [False, True], strict=True)),
)
def test_the_loop_over_fit_is_the_finetuner(variables, compile_once):
    layer = nsl_keras.layers.NeuralSimilarityConv2D
    model = nsl_keras.backbones.cnn4((16, 16, 3), 5, layer, filters=4)
    images = np.random.default_rng(0).normal(size=(20, 16, 16, 3)).astype("float32")
    sampler = nsl_keras.few_shot.EpisodeSampler(
        images, np.arange(20) // 4, shots=2, queries=2
    )
    episodes = sampler.episodes(2)
    expected = few_shot.LoopOverFit(model, variables, 3, compile_once)(episodes)
    finetuner = nsl_keras.few_shot.Finetuner(model, 5, variables, 3, new_classifier=False)
    np.testing.assert_allclose(finetuner(episodes), expected, rtol=1e-4, atol=1e-4)
