"""A shift of every token by a context."""

from __future__ import annotations

from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.paths import unchanged
from lipformer.layers.branch import Call, check_context
from lipformer.layers.layer import Layer
from lipformer.layers.token_wise import register_token_wise


class ContextBias(Layer):
    r""":math:`y_i = x_i + U c`: a bias of the features that depends on a context c.

    For any fixed context it is a translation of x, so that its constant in x is 1 in every norm, and U
    needs no bound (docs/theory, section 4). It belongs before a nonlinearity: L2 attention alone does
    not see a translation of all tokens.

    Args:
        dim: D, the number of features of a token.
        context_dim: C, the number of features of a context.

    Example:
        >>> import torch
        >>> import lipformer as lf
        >>> shifted = nn.Sequential(lf.SpectralLinear(4, 8), ContextBias(8, 3))
        >>> branch = nn.Sequential(shifted, lf.LipSwish(), lf.SpectralLinear(8, 4))
        >>> block = lf.InvertibleResidual(branch, coeff=0.5)
        >>> x, c = torch.randn(2, 5, 4), 100.0 * torch.randn(2, 3)
        >>> y = block(x, context=c)
        >>> bool((block.inverse(y, context=c) - x).abs().max() < 1e-4), lf.certify(block.branch).bound
        (True, 0.5)
    """

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.context_dim = context_dim
        self.linear = nn.Linear(context_dim, dim, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Tokens (B, T, D) and contexts (B, C), one for each sample -> (B, T, D)."""
        check_context(self, context, x)
        return x + self.linear(context).unsqueeze(-2)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.context_dim}"


@register_bound(ContextBias)
def _(module: ContextBias, ask: Ask) -> Bound:
    return Bound(1.0, "translation by the context", passage=unchanged if ask.follows else None)


def _push(module: ContextBias, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return module(x, call.context), tangents


register_token_wise(ContextBias, _push)
