"""Certified, differentiable upper bounds of the spectral norm."""
