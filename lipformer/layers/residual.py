"""Residual connections with the constants they have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound, weighted_sum
from lipformer.layers.branch import Call, apart, call_branch, one_layout
from lipformer.layers.decoding import Cache, register_step, step_module
from lipformer.layers.one_pass import OnePass
from lipformer.layers.own_token import push_own, register_own_token


def same_shape(x: Tensor, out: Tensor) -> Tensor:
    """Returns ``out``; raises if adding it to x would broadcast, which has another constant."""
    if out.shape != x.shape:
        raise ValueError(
            f"the branch must keep the shape {tuple(x.shape)} of its input, got {tuple(out.shape)}"
        )
    return out


class Residual(OnePass):
    """Computes x + f(x), of constant at most 1 + Lip(f).

    Args:
        branch: f, any module; if it returns a tuple, the first element is used.
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = one_layout(branch)
        self.refresh()

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Shapes as the branch's; mask and context are passed on to it."""
        with self.one_pass():
            given = apart(x, self.branch)
            return self.mix(x, call_branch(self.branch, given, key_padding_mask, None, context))

    def mix(self, x: Tensor, out: Tensor) -> Tensor:
        """x + out."""
        return x + same_shape(x, out)


class ConvexResidual(OnePass):
    """Computes (1 - a) x + a f(x), of constant at most 1 - a + a Lip(f): 1 for a 1-Lipschitz branch.

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

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Shapes as the branch's; mask and context are passed on to it."""
        with self.one_pass():
            given = apart(x, self.branch)
            return self.mix(x, call_branch(self.branch, given, key_padding_mask, None, context))

    def mix(self, x: Tensor, out: Tensor) -> Tensor:
        """(1 - a) x + a out."""
        # Not lerp, which refuses two dtypes, as autocast makes them.
        return torch.add((1.0 - self.weight) * x, same_shape(x, out), alpha=self.weight)

    def extra_repr(self) -> str:
        return f"weight={self.weight}"


@register_bound(Residual)
def residual_bound(module: Residual, ask: Ask) -> Bound:
    """1 + L of the branch."""
    return weighted_sum((1.0, 1.0), (None, ask.child(module.branch, "branch")), "residual 1 + L")


@register_bound(ConvexResidual)
def _(module: ConvexResidual, ask: Ask) -> Bound:
    a = float(module.weight)
    branch = ask.child(module.branch, "branch")
    return weighted_sum((1.0 - a, a), (None, branch), f"convex residual {1 - a:g} + {a:g} L")


def _step(
    module: Residual | ConvexResidual, x: Tensor, cache: Cache, call: Call
) -> tuple[Tensor, Cache]:
    out, cache = step_module(module.branch, apart(x, module.branch), cache, *call.inside())
    return module.mix(x, out), cache


def _push(
    module: Residual | ConvexResidual, x: Tensor, tangents: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    out, pushed = push_own(module.branch, apart(x, module.branch), tangents, *call.inside())
    return module.mix(x, out), module.mix(tangents, pushed)


for _class in (Residual, ConvexResidual):
    register_step(_class)(_step)
    register_own_token(_class, parts=lambda module: {"branch": module.branch})(_push)
