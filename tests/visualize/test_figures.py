"""What all figures share: how they are shown and saved, images, matrices."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from pictures import drawn

from nsl_keras.visualize import figures


def test_figures_belong_to_pyplot():
    figure = figures.new_figure(2, 1)
    assert plt.figure(figure.number) is figure


def test_error_without_matplotlib(monkeypatch):
    # An entry of None makes the import fail as if nothing were installed.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        figures.new_figure(2, 1)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_images_of_any_number_of_channels(channels):
    image = np.random.default_rng(0).random((5, 6, channels))
    axis = figures.new_figure(2, 1).subplots()
    figures.draw_image(axis, image, (0, 1), invert=channels == 1)
    if channels == 1:
        assert axis.images[0].get_cmap()(1.0)[0] == 0.0  # The brightest pixel is black.
    expected = image if channels in (3, 4) else image.mean(axis=-1)
    np.testing.assert_allclose(drawn(axis), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("stacks", "values"),
    [
        ([[0.2, 0.9]], (0, 1)),
        ([[0, 16.0]], (0, 16)),
        ([[0, 240]], (0, 255)),
        ([[0, 90]], (0, 255)),
        ([[-1.0, 1.0]], (-1, 1)),
        ([[100, 4000]], (100, 4000)),
        ([[-2.0, -2.0]], (-2, -1)),
        ([[0.5, 2.0], [-3.0, 1.0]], (-3, 2)),
    ],
    ids=str,
)
def test_values_that_are_black_and_white(stacks, values):
    assert figures.display_range(*map(np.array, stacks)) == pytest.approx(values)


@pytest.mark.parametrize(
    ("scale", "sign", "texts"),
    [
        (0.5, "", ["0.00", "-0.25"]),
        (0.004, "", ["0.0000", "-0.2513"]),
        (30, "+", ["+0.00", "-0.25"]),
    ],
)
def test_numbers_of_a_matrix(scale, sign, texts):
    axis = figures.new_figure(2, 1).subplots()
    numbers = np.array([[-1e-9, -0.25131]])
    image = figures.draw_matrix(axis, 2 * numbers, scale, numbers, sign)
    assert [text.get_text() for text in axis.texts] == texts
    assert image.get_clim() == (-scale, scale)
    np.testing.assert_array_equal(drawn(axis), 2 * numbers)
