"""Random attention maps and their dense Jacobians, shared by the tests of bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lipformer.analysis import AttentionMaps


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def random_maps(
    heads: int, dim: int, out: int, *, bias: bool = False, causal: bool = False, scale: float = 1.0
) -> AttentionMaps:
    offset = scale * normal(heads, dim) if bias else None
    logits, values = scale * normal(heads, dim, dim) / dim**0.5, normal(heads, dim, out) / dim**0.5
    return AttentionMaps(logits, values, offset, None, causal)


def one_head(logit: float, dim: int = 1, *, causal: bool = False) -> AttentionMaps:
    """A = logit I, W = I."""
    eye = torch.eye(dim, dtype=torch.float64)[None]
    return AttentionMaps(logit * eye, eye, causal=causal)


def random_groups(count: int, largest: int = 16) -> Iterator[tuple[AttentionMaps, int]]:
    """Maps of 1 to 4 heads and a number of tokens; every second is causal, every third has a bias."""
    for k in range(count):
        n, dim, out = (int(torch.randint(1, largest + 1, ())) for _ in range(3))
        scale = 10 ** float(torch.rand(()) * 2 - 1)
        yield random_maps(1 + k % 4, dim, out, bias=k % 3 == 0, causal=k // 4 % 2 == 1, scale=scale), n


def in_ball(tokens: Tensor, radius: float) -> Tensor:
    """Tokens projected to a ball, differentiable."""
    return tokens / (torch.linalg.vector_norm(tokens, dim=-1, keepdim=True) / radius).clamp_min(1)


def gains(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Norm of the dense Jacobian of fn at each of the inputs x (B, N, D): (B,), differentiable."""
    jacobian = torch.func.vmap(torch.func.jacrev(fn))(x)
    matrix = jacobian.flatten(3).flatten(1, 2)
    # The top eigenvalue of the Gram matrix is exact to some 1e-14, and quicker than an SVD.
    return torch.linalg.eigvalsh(matrix.mT @ matrix)[:, -1].sqrt()


class Attention(nn.Module):
    """Dot-product attention that says which maps it is made of."""

    def __init__(self, maps: AttentionMaps) -> None:
        super().__init__()
        self.logits, self.values = nn.Parameter(maps.logits), nn.Parameter(maps.values)

    def attention_maps(self) -> AttentionMaps:
        return AttentionMaps(self.logits, self.values)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention_maps()(x)
