"""Where on a segment a function changes most: a search that needs no derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from lipformer.certificate._dual_steps import group_norms
from lipformer.certificate._independent_calls import Map
from lipformer.certificate._jacobian_products import detached_output


def steepest_point(fn: Map, a: Tensor, b: Tensor, norm: str, rounds: int = 40) -> Tensor:
    """The midpoint of the steepest part, found by halving, of each segment from a to b.

    Of the two halves of a segment the one with the larger |fn(end) - fn(end')| / |end - end'|
    is kept. By the triangle inequality that quotient never falls, so it ends at a point whose
    local gain is at least the quotient of the whole. Where fn almost jumps (a softmax between
    two far keys) derivatives vanish on either side and this still finds the place.

    Args:
        fn: (R, *shape) -> (R, *output shape), each input for itself.
        a: (R, *shape).
        b: (R, *shape).
        norm: The norm of the quotient: "l2", "token", "self" (taken as "token") or "linf".
        rounds: Number of halvings.

    Returns:
        (R, *shape).
    """
    f_a, f_b = detached_output(fn, a), detached_output(fn, b)
    for _ in range(rounds):
        middle = (a + b) / 2
        f_middle = detached_output(fn, middle)
        rise_a = group_norms(f_middle - f_a, norm).amax(dim=1)
        rise_b = group_norms(f_b - f_middle, norm).amax(dim=1)
        first = rise_a >= rise_b
        wide = first.reshape(-1, *[1] * (a.ndim - 1))
        tall = first.reshape(-1, *[1] * (f_a.ndim - 1))
        a, b = torch.where(wide, a, middle), torch.where(wide, middle, b)
        f_a, f_b = torch.where(tall, f_a, f_middle), torch.where(tall, f_middle, f_b)
    return (a + b) / 2
