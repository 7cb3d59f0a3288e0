"""Few-shot learning: Table 6 of Neural Similarity Learning, and baselines."""
