"""Rows of the papers' tables on CIFAR-10, in order of worth, under a time budget."""
