"""The pictures of the inside of a model, after hardly any training."""

import os
import pathlib
import subprocess
import sys

import pytest

NAMES = (
    "adaptation",
    "feature_map",
    "feature_map_tsne",
    "prototype_cosines",
    "subcategories",
    "subcategories_without",
)


ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.long
def test_pictures(tmp_path):
    arguments = ["--epochs=1", "--train_examples=120", "--num_neighbors=30"]
    command = [sys.executable, "-m", "examples.demo.look_inside", *arguments]
    written = subprocess.run(
        [*command, f"--output_dir={tmp_path}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        # More threads of scikit-learn's t-SNE would wait for each other most of the time.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    figures = tmp_path / "results" / "figures"
    paths = [figures / f"digits_{name}.png" for name in NAMES]
    assert sorted(figures.iterdir()) == paths
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"Wrote {path}" in written
