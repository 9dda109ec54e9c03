"""log|det(I + J)| of a residual block, exactly or by unbiased estimates."""
