"""Parts that `fit` needs beyond Keras: data, checks, interrupted runs."""
