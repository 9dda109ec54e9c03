"""Certified, differentiable upper bounds on the spectral norm."""
