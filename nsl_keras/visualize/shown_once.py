"""The class of the figures; the one module here that needs matplotlib to be imported."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure


class ShownOnce(Figure):
    """A figure that a notebook shows once, also as the last value of a cell.

    A notebook with matplotlib's inline backend shows the figures that are open when a cell
    ends, and, if that is a figure, the cell's last value besides.
    """

    def _ipython_display_(self) -> None:
        is_inline = "inline" in str(matplotlib.get_backend())
        if is_inline and plt.fignum_exists(getattr(self, "number", -1)):
            return
        raise NotImplementedError  # IPython then shows it as any other figure.
