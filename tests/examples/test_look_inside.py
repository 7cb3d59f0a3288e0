"""The pictures of the inside of a model, after hardly any training."""

import os
import pathlib
import subprocess
import sys

import numpy as np

from examples import image_data, look_inside

NAMES = (
    "adaptation",
    "feature_map",
    "feature_map_tsne",
    "prototype_cosines",
    "subcategories",
    "subcategories_without",
)


ROOT = pathlib.Path(__file__).parents[2]


def test_pictures(tmp_path):
    arguments = ["--epochs=1", "--train_examples=120", "--num_neighbors=30"]
    command = [sys.executable, "-m", "examples.look_inside", *arguments]
    written = subprocess.run(
        [*command, f"--output_dir={tmp_path}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        # More threads of scikit-learn's t-SNE would wait for each other most of the time.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    paths = [tmp_path / f"digits_{name}.png" for name in NAMES]
    assert sorted(tmp_path.iterdir()) == paths
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"Wrote {path}" in written


def test_the_example_taken_apart_is_one_put_right():
    """Example 2 has the largest change, example 1 alone is wrong before, right after."""

    class Model:
        def __call__(self, images, adapt):
            before = [[3.0, 0.0], [3.0, 1.0], [0.0, 3.0]]
            after = [[3.0, 0.0], [1.0, 3.0], [0.0, 9.0]]
            return np.array(after if adapt else before, "float32")

    split = image_data.Split(np.zeros((3, 8, 8, 1), "float32"), np.array([0, 1, 1]))
    assert look_inside.most_changed(Model(), split) == 1
