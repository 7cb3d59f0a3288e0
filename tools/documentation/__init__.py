"""The documentation site's pages: docs/, results, docstrings and notebooks."""
