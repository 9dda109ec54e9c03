"""Learning rates over the steps of a run, as factors of the optimiser's rate."""

from __future__ import annotations

import math


def cosine(step: int, *, warmup: int, total: int, final: float) -> float:
    r"""A linear rise over `warmup` steps, then half a cosine down to `final`.

    .. math:: \min(1, \tfrac{t}{w})\,\bigl(f + (1-f)\tfrac{1+\cos(\pi u)}{2}\bigr),\quad
        u = \tfrac{t-w}{T-w} \in [0, 1]

    Args:
        step: steps done, t - 1.
        warmup: w.
        total: T.
        final: f, what is left at the end.
    """
    t = step + 1
    if t <= warmup:
        return t / warmup
    u = min(1.0, (t - warmup) / max(1, total - warmup))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * u))


def noam(step: int, *, warmup: int, dim: int) -> float:
    r""":math:`D^{-1/2} \min(t^{-1/2}, t\,w^{-3/2})`; the optimiser's rate is their factor g.

    Source: Vaswani et al. 2017, used by Kim, Papamakarios, Mnih 2021.

    Args:
        step: steps done, t - 1.
        warmup: w.
        dim: D, the width of a token.
    """
    t = step + 1
    return dim**-0.5 * min(t**-0.5, t * max(1, warmup) ** -1.5)


def constant(step: int, *, warmup: int) -> float:
    """A linear rise, then one."""
    return min(1.0, (step + 1) / max(1, warmup))
