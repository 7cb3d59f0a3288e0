"""Pictures of what was learned.

Every function returns a matplotlib figure (install `nsl_keras[visualize]`) of 150 dots per
inch. It is one of pyplot's: `plt.show()` shows it, in a notebook it appears by itself, and
`plt.close(figure)` frees it. `figure.savefig("name.pdf")` writes letters and lines as
vectors. Grey images are drawn as they are, or with `invert=True` as negatives.
"""

from nsl_keras.visualize.adaptation import plot_adaptation
from nsl_keras.visualize.curves import plot_costs, plot_training_curves
from nsl_keras.visualize.dynamic import plot_dynamic_similarity
from nsl_keras.visualize.entries import plot_learned_neighbors
from nsl_keras.visualize.features import plot_feature_map, plot_prototype_cosines
from nsl_keras.visualize.similarities import plot_similarities
from nsl_keras.visualize.subcategories import plot_subcategories

__all__ = [
    "plot_adaptation",
    "plot_costs",
    "plot_dynamic_similarity",
    "plot_feature_map",
    "plot_learned_neighbors",
    "plot_prototype_cosines",
    "plot_similarities",
    "plot_subcategories",
    "plot_training_curves",
]
