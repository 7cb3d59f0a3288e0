"""Neural Similarity Learning: Tables 1 to 5 and 8, and its analyses."""
