"""Solutions of x + f(x) = y with an error bound, and gradients through them."""
