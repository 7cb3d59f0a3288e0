"""What this package's layers and models cost, and whether they do harm.

Run `python -m experiments.speed` from the repository's root for times as ratios to plain
Keras, `python -m experiments.no_harm` for accuracies beside those of plain networks.
"""
