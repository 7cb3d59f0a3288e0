"""Meta-Neighborhoods on images: Table 1 and the appendices."""
