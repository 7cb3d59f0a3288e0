"""Trainings that are killed, and must end as if nothing had happened."""
