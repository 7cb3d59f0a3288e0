"""Pictures of what was learned.

Every function returns a matplotlib figure (install `nsl_keras[visualize]`); none shows it.
"""

from nsl_keras.visualize.features import plot_feature_map, plot_prototype_cosines
from nsl_keras.visualize.neighbors import (
    plot_adaptation,
    plot_learned_neighbors,
    plot_subcategories,
)
from nsl_keras.visualize.similarities import plot_similarities

__all__ = [
    "plot_adaptation",
    "plot_feature_map",
    "plot_learned_neighbors",
    "plot_prototype_cosines",
    "plot_similarities",
    "plot_subcategories",
]
