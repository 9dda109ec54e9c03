"""The rounding error of a branch, measured by a second evaluation in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lipformer.functional.wide import DISTURBANCE, Noise, Wide, plain


@torch.no_grad()
def evaluate_widely(branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    """The branch at x in float64; None where it cannot be evaluated so.

    For x in float64 every operand is disturbed: else nothing would differ.

    Args:
        branch: f, of torch's operations; it ran in the dtype of x before.
        x: points, in any floating-point dtype.

    Returns:
        f(x) in float64, up to its rounding and the disturbances.
    """
    try:
        noise = None if torch.finfo(x.dtype).eps > DISTURBANCE else Noise(x.device)
        out = branch(Wide.of(x.detach().double(), x.dtype, noise))
    except (TypeError, RuntimeError):
        # It ran in its own precision, so that what fails is the second one: there is no promise then.
        return None
    return plain(out) if isinstance(out, Wide) else None


def rounding_of(
    branch: Callable[[Tensor], Tensor], y: Tensor, x: Tensor, image: Tensor, together: int
) -> Tensor:
    r"""How far the computed image y - f(x) may lie from the exact one, entry by entry, estimated.

    Twice what it differs by from a second evaluation in float64. In float64 itself that shows the
    disturbances, larger than its rounding by an order of magnitude, but at random: of few numbers all
    may be small, so that more is allowed for them.

    Args:
        branch: f.
        y: (B, *).
        x: point (B, *).
        image: y - f(x) as computed in their dtype (B, *).
        together: how many tokens are measured together.

    Returns:
        (B, *) in float64; infinite where the branch cannot be evaluated in float64.
    """
    wide = evaluate_widely(branch, x)
    if wide is None:
        return torch.full_like(y, torch.inf, dtype=torch.float64)
    spare = 2.0 if torch.finfo(y.dtype).eps > DISTURBANCE else 2.0 + 6.0 / max(together, 1)
    terms = y.double().abs() + x.double().abs() + image.double().abs()
    gap = spare * (image.double() - (y.double() - wide)).abs() + 2.0**-51 * terms
    return torch.where(torch.isfinite(gap), gap, torch.inf)
