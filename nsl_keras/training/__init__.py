"""Parts that `fit` needs beyond Keras: data, checks, batch norms, interrupted runs."""
