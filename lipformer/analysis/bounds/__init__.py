"""Bounds of dot-product attention on a ball, in the mean field and at one input."""
