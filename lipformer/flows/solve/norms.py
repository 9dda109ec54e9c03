r"""The norms that residuals are measured in: a rate holds only in the norm it was certified for.

With tokens :math:`x_i` the norms of a sample (T, D) are :math:`\|x\|_F` ("l2"),
:math:`\max_i \|x_i\|_2` ("token") and :math:`\max_{ik} |x_{ik}|` ("linf"). A Jacobian that contracts in
one of them contracts at the same rate, transposed, in the dual one (docs/theory, section 5).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Measure = Callable[[Tensor], Tensor]


def l2_size(x: Tensor) -> Tensor:
    r""":math:`\|x\|_F` of each sample, (B, T, D) -> (B,)."""
    return x.flatten(1).norm(dim=-1)


def token_size(x: Tensor) -> Tensor:
    r""":math:`\max_i \|x_i\|_2` of each sample, (B, T, D) -> (B,)."""
    return x.norm(dim=-1).flatten(1).amax(-1)


def token_sum(x: Tensor) -> Tensor:
    r""":math:`\sum_i \|x_i\|_2`, dual to :func:`token_size`, (B, T, D) -> (B,)."""
    return x.norm(dim=-1).flatten(1).sum(-1)


def linf_size(x: Tensor) -> Tensor:
    r""":math:`\max_{ik} |x_{ik}|` of each sample, (B, T, D) -> (B,)."""
    return x.abs().flatten(1).amax(-1)


def l1_size(x: Tensor) -> Tensor:
    r""":math:`\sum_{ik} |x_{ik}|`, dual to :func:`linf_size`, (B, T, D) -> (B,)."""
    return x.abs().flatten(1).sum(-1)


MEASURES: dict[str, Measure] = {"l2": l2_size, "token": token_size, "linf": linf_size}
DUAL_MEASURES: dict[str, Measure] = {"l2": l2_size, "token": token_sum, "linf": l1_size}
