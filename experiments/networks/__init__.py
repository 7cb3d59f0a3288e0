"""Networks of the papers' tables, beside those of `nsl_keras.backbones`.

All are functional, and take `convolution=` and `batch_normalization=` as those do.
"""
