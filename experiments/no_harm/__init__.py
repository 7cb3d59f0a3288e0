"""This package's methods, used naively, against plain networks."""
