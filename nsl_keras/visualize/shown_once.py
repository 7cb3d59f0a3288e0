"""The class of the figures; the one module here that needs matplotlib to be imported."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure


class ShownOnce(Figure):
    """A figure that a notebook shows once, also as the last value of a cell.

    With matplotlib's inline backend a notebook shows a cell's last value, and then the
    figures that are open: the same figure twice, were it not closed when it is shown.
    """

    def _ipython_display_(self) -> None:
        if "inline" in str(matplotlib.get_backend()):
            plt.close(self)
        raise NotImplementedError  # IPython goes on as with any other figure.
