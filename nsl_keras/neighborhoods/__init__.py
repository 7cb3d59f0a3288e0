"""Meta-Neighborhoods: heads finetuned per example on a learned dictionary."""
