"""The documentation site's pages that are made from docstrings, notebooks and results."""
