"""The do-no-harm matrix: this package's methods, used naively, against plain networks.

One rule: methods differ in nothing but what they must. Those of a cell see the same images
in the same order, and start at the same plain weights where they have them.
"""
