"""Pictures of what a model has learned; needs matplotlib.

Each function returns a pyplot figure: save it with `figure.savefig("name.pdf")` and free it
with `plt.close(figure)`. In a notebook assign it to a variable: as the last value of a cell
it would appear twice, because a notebook shows every open figure.
"""

from nsl_keras.visualize.neighbors import (
    plot_adaptation as plot_adaptation,
    plot_neighbors as plot_neighbors,
)
from nsl_keras.visualize.similarities import (
    plot_dynamic_similarity as plot_dynamic_similarity,
    plot_similarities as plot_similarities,
)
