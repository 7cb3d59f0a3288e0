"""Times of this package's layers and models as ratios to plain Keras.

Run `python -m benchmarks.run` from the repository's root.
"""
