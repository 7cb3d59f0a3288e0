"""Pictures of what was learned.

Every function returns a matplotlib figure (install `nsl_keras[visualize]`); none shows it.
"""

from nsl_keras.visualize.feature_maps import feature_map
from nsl_keras.visualize.nearest_examples import learned_neighbors
from nsl_keras.visualize.prototypes import prototype_cosines
from nsl_keras.visualize.retrieval import subcategories
from nsl_keras.visualize.similarity_matrices import similarities
from nsl_keras.visualize.single_example import adaptation

__all__ = [
    "adaptation",
    "feature_map",
    "learned_neighbors",
    "prototype_cosines",
    "similarities",
    "subcategories",
]
