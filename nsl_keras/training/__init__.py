"""What `fit` needs beyond Keras: data, checks, batch norms, devices, interrupted runs."""
