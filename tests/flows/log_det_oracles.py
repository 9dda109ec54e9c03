"""Slow references for log-determinants, and the branches that their tests share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipformer as lf
from lipformer.flows import LogDet, residual_log_det
from lipformer.layers.branch import call_branch
from tests.oracles import dense_jacobian


def log_det_oracle(branch: nn.Module, x: Tensor, padding: Tensor | None = None) -> Tensor:
    """log|det(I + J)| of each sample alone, over its unpadded tokens, from autograd's Jacobian."""
    values = []
    for b in range(len(x)):
        kept = torch.ones(x.shape[1], dtype=torch.bool) if padding is None else ~padding[b]
        mask = None if padding is None else padding[b : b + 1]

        def fn(valid: Tensor, b: int = b, kept: Tensor = kept, mask: Tensor | None = mask) -> Tensor:
            tokens = x[b].detach().clone().index_put((kept,), valid)
            return call_branch(branch, tokens[None], mask)[0][kept]

        with sdpa_kernel(SDPBackend.MATH):
            jacobian = dense_jacobian(fn, x[b][kept].detach())
        values.append(torch.linalg.slogdet(torch.eye(len(jacobian)) + jacobian).logabsdet)
    return torch.stack(values)


def attention(
    width: int = 4, heads: int = 2, value_proj: bool = True, **options: object
) -> lf.L2MultiheadAttention:
    """Batch-first attention with weights large enough for a Jacobian far from its diagonal."""
    layer = lf.L2MultiheadAttention(
        width,
        heads,
        batch_first=True,
        value_proj=value_proj,
        **options,  # type: ignore[arg-type]
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.7 * torch.randn_like(parameter))
    return layer


def smooth_feed_forward(width: int = 4, hidden: int = 8) -> lf.FeedForward:
    """With an activation whose second derivative is not zero."""
    return lf.FeedForward(width, hidden, activation=lf.LipSwish())


def some_padding(batch: int, tokens: int) -> Tensor:
    """(B, T): one token missing inside, several at the end, none."""
    padding = torch.zeros(batch, tokens, dtype=torch.bool)
    padding[0, tokens // 2] = True
    padding[1, -2:] = True
    return padding


def all_signs(tokens: int, width: int) -> Tensor:
    """Every Rademacher probe, (2^n, T, D): their average is the expectation itself."""
    rows = list(itertools.product((-1.0, 1.0), repeat=tokens * width))
    return torch.tensor(rows).reshape(-1, tokens, width)


def gradients(value: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Of the sum of ``value``, zeros where there is none."""
    found = torch.autograd.grad(value.sum(), inputs, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)]


def log_det(
    branch: nn.Module, x: Tensor, method: str, rate: float = 0.9, seed: int | None = None, **options: Any
) -> LogDet:
    """``residual_log_det`` without the output, with a generator of this seed."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return residual_log_det(branch, x, method=method, rate=rate, generator=generator, **options)[1]


def small_branches(coeff: float = 0.9) -> dict[str, nn.Module]:
    """Of events of three tokens of width two: 64 probes in all."""
    negated = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        negated.weight.copy_(-torch.eye(2))
    both = nn.Sequential(attention(2, 1, value_proj=False), smooth_feed_forward(2, 4))
    return {
        "attention": lf.Contractive(attention(2, 1), coeff, seq_len=3),
        "feed-forward": lf.Contractive(smooth_feed_forward(2, 4), coeff),
        "both": lf.Contractive(both, coeff, seq_len=3),
        # The worst case of bounds: every term of the series has one sign and its largest size.
        "minus the identity": lf.Contractive(negated, coeff),
        "own tokens": lf.Contractive(attention(2, 1, causal=True), coeff, norm="self", seq_len=3),
    }
