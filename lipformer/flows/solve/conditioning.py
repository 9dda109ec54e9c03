"""How much an error in y grows in the inverse, measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipformer.estimates.jacobian_products import Linearization
from lipformer.flows.invertible_residual import InvertibleResidual
from lipformer.flows.masked_branch import masked_branch
from lipformer.layers import frozen
from lipformer.layers.branch import Call


@torch.no_grad()
def estimate_inverse_gain(
    blocks: InvertibleResidual | Sequence[InvertibleResidual],
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    context: Tensor | None = None,
    *,
    steps: int = 10,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Lower estimate of the largest :math:`\|dx\|_2 / \|dy\|_2` of the inverse at forward(x).

    Power iteration on :math:`A^{-1} A^{-T}` with :math:`A = dy/dx`, for each sample. Mode "norm"
    in the l2 norm promises at most :math:`(1-c)^{-1}` for each block; no such bound is known in mode
    "causal", and for stacks the product is far too large, so it is measured.

    Args:
        blocks: one block, or the blocks of a stack in the order of forward.
        x: input (B, T, D) of the first block.
        key_padding_mask: (B, T), True at padded tokens.
        context: (B, C), for the blocks that take one.
        steps: power iterations.
        generator: of the starting vectors.

    Returns:
        (B,).

    Example:
        >>> import lipformer as lf
        >>> block = InvertibleResidual(lf.FeedForward(4, 8), coeff=0.5)
        >>> bool(estimate_inverse_gain(block, torch.randn(2, 3, 4)).max() <= 1 / (1 - 0.5))
        True
    """
    stack = [blocks] if isinstance(blocks, InvertibleResidual) else list(blocks)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}")
    maps = []
    for block in stack:
        given = None if block.context_dim is None else context
        maps.append(_Inverse(block, x, block._call(x, key_padding_mask, given)))
        x = block(x, key_padding_mask, given)
    v = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    gain = x.new_zeros(len(x))
    for _ in range(steps):
        v = v / v.norm(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        for inverse in maps:
            v = inverse(v, transpose=True)
        for inverse in reversed(maps):
            v = inverse(v)
        gain = torch.maximum(gain, v.norm(dim=(1, 2)).sqrt())
    return gain


class _Inverse:
    """The linear map v -> A^-1 v of a block at a point, and its transpose."""

    def __init__(self, block: InvertibleResidual, x: Tensor, call: Call) -> None:
        with frozen(block):
            self.product = Linearization(lambda t: masked_branch(block.branch, t, call), x)
        self.block = block
        self.norm = block.norm_in_use()
        self.shape = x

    def __call__(self, v: Tensor, *, transpose: bool = False) -> Tensor:
        multiply = self.product.vjp if transpose else self.product.jvp

        def branch(u: Tensor, index: Tensor) -> Tensor:
            full = torch.zeros_like(self.shape).index_copy(0, index, u)
            return multiply(full)[index]

        unit = v.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        return self.block._solve(branch, v / unit, self.norm, 1e-6, 1000, transpose=transpose)[0] * unit
