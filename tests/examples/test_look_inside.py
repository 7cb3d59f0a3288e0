"""The pictures of the inside of a model, after hardly any training."""

import numpy as np
from absl.testing import flagsaver

from examples import image_data, look_inside

NAMES = (
    "adaptation",
    "feature_map",
    "feature_map_tsne",
    "prototype_cosines",
    "subcategories",
    "subcategories_without",
)


def run(folder, *arguments):
    with flagsaver.flagsaver():
        look_inside.FLAGS.unparse_flags()
        look_inside.FLAGS(["test", f"--output_dir={folder}", *arguments])
        look_inside.main(["test"])


def test_pictures(tmp_path, capsys, one_thread):
    run(tmp_path, "--epochs=1", "--train_examples=120", "--num_neighbors=30")
    paths = [tmp_path / f"digits_{name}.png" for name in NAMES]
    assert sorted(tmp_path.iterdir()) == paths
    written = capsys.readouterr().out
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
