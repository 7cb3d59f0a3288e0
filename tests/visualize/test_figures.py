"""What all figures share: how they are shown and saved, colours, images, numbers."""

import os
import pathlib
import subprocess
import sys
import warnings

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from nsl_keras.visualize import figures


def test_figures_are_those_that_show_shows():
    figure = figures.new_figure(figsize=(2, 1))
    assert plt.figure(figure.number) is figure
    assert figure.get_dpi() == 150
    plt.close(figure)
    assert not plt.fignum_exists(figure.number)


def test_what_a_notebook_has_shown_is_closed(monkeypatch):
    figure = figures.new_figure(figsize=(2, 1))
    with pytest.raises(NotImplementedError):  # IPython then takes its own way.
        figure._ipython_display_()
    assert plt.fignum_exists(figure.number)
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "module://inline")
    with pytest.raises(NotImplementedError):
        figure._ipython_display_()
    assert not plt.fignum_exists(figure.number)


# In a process of its own, where warnings of the Jupyter packages are not errors.
NOTEBOOK = """
import nbclient
import nbformat

draw = "figure = figures.new_figure(); figure.subplots()"
cells = [
    "from nsl_keras.visualize import figures; import matplotlib.pyplot as plt",
    f"{draw}; figure",
    draw,
    "figure",
    f"{draw}; plt.show()",
    f"for _ in range(2): {draw}",
]
notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
for cell in notebook.cells:
    print(sum("image/png" in output.get("data", {}) for output in cell.outputs), end=" ")
"""


@pytest.mark.long
def test_a_notebook_shows_a_figure_once():
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    root = pathlib.Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert ended.stdout.split() == ["0", "1", "1", "1", "1", "2"]


@pytest.mark.parametrize("kind", ["pdf", "svg", "png"])
def test_saved_without_a_warning(kind, tmp_path):
    figure = figures.new_figure(figsize=(2, 1))
    axis = figure.subplots()
    figures.draw_image(axis, np.eye(4)[..., None], (0, 1))
    axis.set_title("Größe ± 1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(tmp_path / f"picture.{kind}")
    assert (tmp_path / f"picture.{kind}").stat().st_size > 500


def test_ten_classes_have_ten_colours_and_ten_shapes():
    assert len(set(figures.colors_of(10))) == 10
    assert len(set(figures.markers_of(10))) == 10
    assert len({tuple(color) for color in figures.colors_of(25)}) == 25
    assert len(figures.markers_of(25)) == 25


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_images_of_any_number_of_channels(channels):
    image = np.random.default_rng(0).random((5, 6, channels))
    axis = figures.new_figure().subplots()
    figures.draw_image(axis, image, (0, 1))
    drawn = np.asarray(axis.images[0].get_array())
    expected = image if channels in (3, 4) else image.mean(axis=-1)
    np.testing.assert_allclose(drawn, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("largest", "decimals"), [(0, 2), (123, 0), (12, 1), (2.5, 2), (0.56, 2), (0.004, 4)]
)
def test_two_digits_of_the_largest_number(largest, decimals):
    assert figures.decimals_for(largest) == decimals


def test_a_change_that_rounds_to_zero_has_no_sign():
    texts = [figures.signed(value, 2) for value in (-0.001, 0.0, 0.126, -3.0)]
    assert texts == ["0", "0", "+0.13", "-3.00"]


def test_error_without_matplotlib(monkeypatch):
    # An entry of None makes the import fail as if nothing were installed.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"nsl_keras\[visualize\]"):
        figures.new_figure()


@pytest.mark.parametrize(
    ("stacks", "values"),
    [
        ([[0.2, 0.9]], (0, 1)),
        ([[0, 16.0]], (0, 16)),
        ([[0, 4.2]], (0, 4.2)),
        ([[0, 240.0]], (0, 255)),
        ([[0, 90]], (0, 255)),
        ([[0, 16]], (0, 16)),
        ([[-1.0, 1.0]], (-1, 1)),
        ([[100, 4000]], (100, 4000)),
        ([[0.5, 2.0], [-3.0, 1.0]], (-3, 2)),
    ],
    ids=str,
)
def test_values_that_are_black_and_white(stacks, values):
    found = figures.display_range(*map(np.array, stacks))
    assert found == pytest.approx(values)


@pytest.mark.parametrize(
    ("shape", "is_moved"),
    [
        ((2, 3, 8, 9), True),
        ((2, 1, 8, 9), True),
        ((2, 3, 8, 1), False),
        ((2, 8, 9, 7), False),
        ((2, 4, 4, 2), False),
    ],
    ids=str,
)
def test_channels_are_drawn_as_channels_wherever_they_are(shape, is_moved):
    images = np.random.default_rng(0).random(shape)
    expected = images.transpose(0, 2, 3, 1) if is_moved else images
    np.testing.assert_array_equal(figures.images_in(images), expected)
