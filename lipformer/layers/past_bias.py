"""A shift of every token that depends on the earlier tokens."""

from __future__ import annotations

from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.torch_rules import mixed_axes
from lipformer.layers.branch import Call, call_branch
from lipformer.layers.own_token import register_own_token, unknown_parts
from lipformer.layers.residual import Residual, residual_bound
from lipformer.layers.token_window import TokenShift


class PastBias(Residual):
    r""":math:`y_i = x_i + g(x_1, \dots, x_{i-1})`: a bias of the features that depends on the past.

    g is a causal module that sees the tokens one place later, a token of zeros first. For any fixed past
    a token is translated, so that its effect on itself is the identity, of constant 1, and in a block of
    mode "causal" g needs no bound (docs/theory, section 5). In other norms the constant is 1 + Lip(g).
    It belongs before a nonlinearity, like :class:`ContextBias`: there the past chooses how the block
    stretches the token, and not only where it puts it.

    Args:
        dim: D, the number of features of a token.
        past: g, causal all the way down, which keeps the shape of its input (B, T, D).

    Example:
        >>> import torch
        >>> import lipformer as lf
        >>> shifted = nn.Sequential(lf.SpectralLinear(2, 8), PastBias(8, nn.Linear(8, 8)))
        >>> branch = nn.Sequential(shifted, lf.LipSwish(), lf.SpectralLinear(8, 2))
        >>> block = lf.InvertibleResidual(branch, coeff=0.5, mode="causal")
        >>> x = torch.randn(2, 5, 2)
        >>> bool((block.inverse(block(x)) - x).abs().max() < 1e-4)
        True
        >>> lf.certify(block.branch, norm="self").bound
        0.5
    """

    def __init__(self, dim: int, past: nn.Module) -> None:
        super().__init__(nn.Sequential(TokenShift(dim, dim), past))


def _is_shifted(module: PastBias) -> bool:
    """Whether the branch still begins with the shift of all features: parts may have been replaced."""
    branch = module.branch
    first = branch[0] if isinstance(branch, nn.Sequential) and len(branch) else None
    # A subclass that says causal=True need not shift.
    return type(first) is TokenShift and first.shifted == first.dim


@register_bound(PastBias)
def _(module: PastBias, ask: Ask) -> Bound:
    if ask.norm != "self":
        return residual_bound(module, ask)
    if not _is_shifted(module):
        raise ask.refuse(
            "its branch no longer begins with a TokenShift of all features", "PastBias as built"
        )
    ask.along(-2)
    mixed = None if ask.in_forward else mixed_axes(module.branch)
    if mixed is not None:
        raise ask.refuse(mixed, "attention with batch_first=True")
    for path, part in unknown_parts(module.branch, "branch"):
        # A part that sees later tokens would see the token itself, moved one on.
        raise ask.refuse(
            f"its {path} ({type(part).__name__}) is not known to be causal", "causal parts, causal=True"
        )
    return Bound(1.0, "translation by the past")


@register_own_token(PastBias, parts=lambda module: {"branch": module.branch}, causal=_is_shifted)
def _(module: PastBias, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return call_branch(module, x, *call.inside()), tangents
