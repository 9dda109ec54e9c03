"""No N x N tensor is made, forward or backward, unless a dense bias is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipformer.functional import l2_attention
from tests.memory import NEEDS_PROC, memory_of

N = 2048


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.operation = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # Storage, not shape: an expanded view of one number takes no memory.
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() > 0:
                numel = leaf.untyped_storage().nbytes() // leaf.element_size()
                if numel > self.numel:
                    self.numel, self.operation = numel, str(func)
        return out


def padding() -> Tensor:
    padded = torch.zeros(1, N, dtype=torch.bool)
    padded[:, -100:] = True
    return padded


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": padding()},
    "causal padding": {"is_causal": True, "key_padding_mask": padding()},
    "alibi": {"is_causal": True, "slopes": torch.tensor([0.25])},
    "window": {"is_causal": True, "window": 32},
    "all": {
        "is_causal": True,
        "window": 32,
        "slopes": torch.tensor([0.25]),
        "key_padding_mask": padding(),
    },
}


def largest(options: dict[str, Any]) -> LargestTensor:
    """Over forward and backward."""
    y = torch.randn(1, 1, N, 8, requires_grad=True)
    with LargestTensor() as seen:
        l2_attention(y, **options).square().sum().backward()
    return seen


@pytest.mark.parametrize("name", CASES)
def test_no_quadratic_tensor(name: str) -> None:
    seen = largest(CASES[name])
    assert 0 < seen.numel < N * N // 8, seen.operation


def test_the_probe_sees_a_quadratic_tensor() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert largest({}).numel >= N * N


BEFORE = """
import sys, torch
from lipformer.functional import l2_attention
small = torch.randn(1, 2, 64, 8, requires_grad=True)
l2_attention(small, is_causal=True).sum().backward()  # what the libraries need once
"""
MEASURED = """
y = torch.randn(1, 2, 8192, 8, requires_grad=True)
l2_attention(y, is_causal=sys.argv[1] == "causal").square().sum().backward()
assert bool(torch.isfinite(y.grad).all())
"""


@NEEDS_PROC
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_8192_tokens_with_backward_stay_below_one_gigabyte(mask: str) -> None:
    """Beyond the libraries they take 100 MB; one 8192 x 8192 matrix alone is 256 MB per head."""
    before, after = memory_of(BEFORE, MEASURED, mask)
    assert after < 2**30
    assert after - before < 100 * 2**20
