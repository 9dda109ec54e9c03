"""A branch as a map of the unpadded tokens alone."""

from __future__ import annotations

from torch import Tensor, nn

from lipformer.layers.branch import call_branch
from lipformer.layers.layout import without_padding
from lipformer.layers.residual import same_shape


def masked_branch(branch: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
    """The branch as a map of the unpadded tokens alone, (B, T, D) -> (B, T, D).

    Padded tokens enter as zeros and leave as zeros, so that the Jacobian has zero rows and columns
    there, I + J is the identity there, and not even a NaN in them reaches a gradient.
    """
    out = call_branch(branch, without_padding(x, padding), padding)
    return without_padding(same_shape(x, out), padding)
