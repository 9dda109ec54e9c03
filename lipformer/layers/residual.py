"""Residual connections with the constants they have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound, weighted_sum
from lipformer.certificate.torch_rules import mixed_axes
from lipformer.layers.branch import call_branch
from lipformer.layers.decoding import Cache, step_module
from lipformer.layers.one_pass import OnePass


def same_shape(x: Tensor, out: Tensor) -> Tensor:
    """Returns ``out``; raises if adding it to x would broadcast, which has another constant."""
    if out.shape != x.shape:
        raise ValueError(
            f"the branch must keep the shape {tuple(x.shape)} of its input, got {tuple(out.shape)}"
        )
    return out


def one_layout(branch: nn.Module) -> nn.Module:
    """Returns the branch; raises if it takes tokens both as (B, N, D) and as (N, B, D)."""
    mixed = mixed_axes(branch)
    if mixed is not None:
        raise ValueError(f"{mixed}; build attention with batch_first=True")
    return branch


class Residual(OnePass):
    """x + f(x), of constant at most 1 + Lip(f).

    Args:
        branch: f, any module; of a tuple it returns the first element is taken.
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = one_layout(branch)
        self.refresh()

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Shapes as the branch's; the mask is passed on to it."""
        with self.one_pass():
            return x + same_shape(x, call_branch(self.branch, x, key_padding_mask))

    def step(
        self, x: Tensor, cache: Cache = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Step-by-step decoding of a causal branch (see :func:`step_module`)."""
        out, cache = step_module(self.branch, x, cache, key_padding_mask)
        return x + same_shape(x, out), cache


class ConvexResidual(OnePass):
    """(1 - a) x + a f(x), of constant at most 1 - a + a Lip(f): 1 around a 1-Lipschitz branch.

    Args:
        branch: f.
        weight: a in [0, 1].
    """

    def __init__(self, branch: nn.Module, weight: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight must be in [0, 1], got {weight!r}")
        self.branch = one_layout(branch)
        self.weight = float(weight)
        self.refresh()

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Shapes as the branch's; the mask is passed on to it."""
        with self.one_pass():
            return self._mix(x, call_branch(self.branch, x, key_padding_mask))

    def step(
        self, x: Tensor, cache: Cache = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Step-by-step decoding of a causal branch (see :func:`step_module`)."""
        out, cache = step_module(self.branch, x, cache, key_padding_mask)
        return self._mix(x, out), cache

    def _mix(self, x: Tensor, out: Tensor) -> Tensor:
        # Not lerp, which refuses two dtypes, as autocast makes them.
        return torch.add((1.0 - self.weight) * x, same_shape(x, out), alpha=self.weight)

    def extra_repr(self) -> str:
        return f"weight={self.weight}"


@register_bound(Residual)
def _(module: Residual, ask: Ask) -> Bound:
    return weighted_sum((1.0, 1.0), (None, ask.child(module.branch, "branch")), "residual 1 + L")


@register_bound(ConvexResidual)
def _(module: ConvexResidual, ask: Ask) -> Bound:
    a = module.weight
    branch = ask.child(module.branch, "branch")
    return weighted_sum((1.0 - a, a), (None, branch), f"convex residual {1 - a:g} + {a:g} L")
