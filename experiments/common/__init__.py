"""What the experiments share: images, recipes, records of runs, tables and pictures."""
