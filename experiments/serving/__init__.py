"""A server under load, and the models in saved_models/."""
