"""Serving under load and kills, and the models in saved_models/."""
