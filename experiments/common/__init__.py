"""What the examples share: images, recipes, records of runs, tables and pictures."""
