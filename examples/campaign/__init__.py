"""All rows of the papers' tables, in order of worth, under a time budget."""
