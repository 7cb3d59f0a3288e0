"""The developer's tools."""
