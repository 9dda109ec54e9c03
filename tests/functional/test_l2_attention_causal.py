"""Rows of causal attention do not depend on later tokens, not even in their rounding (1e-6)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lipformer.functional import l2_attention

B, H, N, D = 2, 2, 60, 8
CUTS = (0, 1, 3, 4, 5, 50)


def left_padding() -> Tensor:
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[0, :2] = padded[1, 4:9] = True
    return padded


def bias() -> Tensor:
    made = torch.randn(H, N, N)
    own = torch.eye(N, dtype=torch.bool)
    return made.masked_fill((torch.rand(H, N, N) < 0.3) & ~own, -math.inf).masked_fill(own, 0.0)


def cases() -> dict[str, dict[str, Any]]:
    slopes = torch.tensor([0.5, 0.07])
    return {
        "causal": {},
        "padding": {"key_padding_mask": left_padding()},
        "alibi": {"slopes": slopes},
        "window": {"window": 7},
        "window of one": {"window": 1},
        "bias": {"bias": bias()},
        "alibi, window, padding": {
            "slopes": slopes,
            "window": 9,
            "key_padding_mask": left_padding(),
        },
        "bias, padding": {"bias": bias(), "key_padding_mask": left_padding()},
    }


@pytest.mark.parametrize("later", ["1e4 randn", "1e4 away", "zero"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("name", cases())
def test_float32_rows_do_not_see_later_tokens(name: str, offset: float, later: str) -> None:
    y = torch.randn(B, H, N, D) + offset
    options = {"is_causal": True, **cases()[name]}
    before = l2_attention(y, **options)
    for cut in CUTS:
        changed = y.clone()
        rest = changed[..., cut + 1 :, :]
        if later == "zero":
            rest.zero_()
        else:
            rest.copy_(1e4 * torch.randn_like(rest) if later == "1e4 randn" else rest + 1e4)
        after = l2_attention(changed, **options)
        kept = (after - before)[..., : cut + 1, :].abs().max().item()
        assert kept <= 1e-6 * max(1.0, offset), cut


@pytest.mark.parametrize("name", cases())
def test_a_shorter_sequence_gives_the_same_rows(name: str) -> None:
    y = torch.randn(B, H, N, D)
    options = {"is_causal": True, **cases()[name]}
    full = l2_attention(y, **options)
    for cut in CUTS:
        n = cut + 1
        short = dict(options)
        if "bias" in short:
            short["bias"] = short["bias"][..., :n, :n]
        if "key_padding_mask" in short:
            short["key_padding_mask"] = short["key_padding_mask"][:, :n]
        rows = l2_attention(y[..., :n, :], **short)
        assert (rows - full[..., :n, :]).abs().max().item() <= 1e-6, cut


@pytest.mark.parametrize("name", cases())
def test_no_gradient_flows_back_in_time(name: str) -> None:
    y = torch.randn(B, H, N, D, requires_grad=True)
    out = l2_attention(y, is_causal=True, **cases()[name])
    for cut in CUTS:
        (gradient,) = torch.autograd.grad(out[..., cut, :].sum(), y, retain_graph=True)
        assert torch.equal(gradient[..., cut + 1 :, :], torch.zeros_like(gradient[..., cut + 1 :, :]))
        if "window" in cases()[name]:
            first = cut + 1 - cases()[name]["window"]
            gone = gradient[..., : max(first, 0), :]
            assert torch.equal(gone, torch.zeros_like(gone))


@pytest.mark.parametrize("content", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_tokens_are_never_read(is_causal: bool, content: float) -> None:
    """Nor are they in the gradient: it is what it was, and zero at padded tokens."""
    y = torch.randn(B, H, N, D)
    padded = left_padding()
    results = []
    for value in (0.0, content):
        filled = y.masked_fill(padded[:, None, :, None], value).requires_grad_()
        out = l2_attention(filled, is_causal=is_causal, key_padding_mask=padded)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), filled)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
        assert torch.equal(
            dirty.transpose(1, 2)[padded], torch.zeros_like(dirty.transpose(1, 2)[padded])
        )
