"""Meta-Neighborhoods for regression: Table 2."""
