"""Where things stand on a picture."""

import numpy as np
import pytest


@pytest.fixture
def check_inside():
    """A function that fails where something is drawn beyond the edge of a figure."""

    def check(figure):
        figure.canvas.draw()
        box = figure.get_tightbbox()
        # A letter may end a little before its box does.
        assert box.min.min() > -0.03, box
        assert (box.max < np.add(figure.get_size_inches(), 0.03)).all(), box

    return check
