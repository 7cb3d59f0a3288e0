"""A trained model answers requests where TensorFlow alone is installed."""
