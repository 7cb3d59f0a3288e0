"""The picture, from runs that are made up."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from no_harm_runs import several

from benchmarks.no_harm import comparison, picture


def test_picture_has_methods_and_cells():
    found = several("plain", [0.5]) + several("static_dns", [0.4])
    found += several("plain", [0.5], dataset="mnist_6000")
    found += several("static_uns", [0.51], dataset="mnist_6000")
    axes = picture.plot_differences(comparison.compare(found)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "static DNS",
        "static UNS",
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "digits\nnarrow CNN",
        "MNIST (6,000)\nnarrow CNN",
    ]
    assert [text.get_text() for text in axes.texts] == ["-10.0", "", "", "+1.0"]
    (image,) = axes.images
    assert image.norm.vmin == -image.norm.vmax
