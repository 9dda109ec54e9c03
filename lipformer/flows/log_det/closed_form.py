"""Jacobians that are known in closed form, for exact log-determinants without backward passes."""

from __future__ import annotations

from torch import Tensor, nn

from lipformer.functional.rounding import multiply_down
from lipformer.layers import Contractive, PairRadial
from lipformer.layers.layout import without_padding


def has_closed_form(branch: nn.Module) -> bool:
    """Whether :func:`closed_form_jacobian` knows a branch: PairRadial divided by its bound."""
    if type(branch) is not Contractive or type(branch.module) is not PairRadial:
        return False
    # Hooks may change what it computes.
    return not any(part._forward_hooks or part._forward_pre_hooks for part in branch.modules())


def closed_form_jacobian(branch: nn.Module, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """f(x) (B, T, D) and its Jacobian (B, T D, T D), differentiable, zero at padded tokens."""
    assert isinstance(branch, Contractive)
    assert isinstance(branch.module, PairRadial)
    out, jacobian = branch.module.forward_and_jacobian(without_padding(x, padding), padding)
    scales = branch.scales()
    return multiply_down(out, scales), multiply_down(jacobian, scales)
