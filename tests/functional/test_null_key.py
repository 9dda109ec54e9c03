"""functional.null_key_attention against the definition in float64, and its constant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipformer as lf
from lipformer.functional import l2_attention, l2_gain, null_key_attention

B, H, S, D, E = 2, 3, 6, 4, 5


def oracle(q: Tensor, k: Tensor, v: Tensor, scale: Any, value_scale: Any, **masks: Any) -> Tensor:
    """The definition: weights by differences, and 1 for the null key."""
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    size = (value_scale**2 * v.square().sum(-1, keepdim=True)).mT
    logits = -scale * (difference.square().sum(-1) + size)
    t, s = q.shape[-2], k.shape[-2]
    if masks.get("bias") is not None:
        logits = logits + masks["bias"]
    if masks.get("is_causal"):
        logits = logits.masked_fill(torch.ones(t, s).tril(s - t) == 0, -math.inf)
    if masks.get("key_padding_mask") is not None:
        logits = logits.masked_fill(masks["key_padding_mask"][:, None, None, :], -math.inf)
    weights = logits.exp()
    return weights @ v / (1.0 + weights.sum(-1, keepdim=True))


def operands(queries: int = S, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (queries, D), (S, D), (S, E)
    q, k, v = (torch.randn(B, H, *shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def padding() -> Tensor:
    padded = torch.zeros(B, S, dtype=torch.bool)
    padded[0, -2:] = padded[1, 0] = True
    return padded


def lowered(queries: int = S) -> Tensor:
    """At most zero, with hidden keys, a query's own among them, and one query without any."""
    bias = -torch.rand(B, H, queries, S, dtype=torch.float64)
    bias[..., 0] = bias[0, 0, 0] = -math.inf
    return bias


@pytest.mark.parametrize(
    ("dtype", "tolerance", "offset"),
    [
        (torch.float64, 1e-12, 100.0),
        (torch.float32, 2e-4, 100.0),
        (torch.float32, 2e-6, 0.0),
        (torch.bfloat16, 0.03, 0.0),
        (torch.float16, 4e-3, 0.0),
    ],
)
@pytest.mark.parametrize("queries", [S, 3, 1])
def test_it_is_its_definition(dtype: torch.dtype, tolerance: float, offset: float, queries: int) -> None:
    scale, value_scale = (torch.rand(2, H, 1, 1, dtype=torch.float64) + 0.2).float()
    q, k, v = operands(queries, dtype)
    q, k = q + offset, k + offset
    exact = [x.double() for x in (q, k, v, scale, value_scale)]
    for causal in (False, True):
        for bias in (None, lowered(queries)):
            for padded in (None, padding()):
                masks = {"is_causal": causal, "bias": bias, "key_padding_mask": padded}
                out = null_key_attention(q, k, v, scale=scale, value_scale=value_scale, **masks)
                assert out.dtype == dtype
                assert (out.double() - oracle(*exact, **masks)).abs().max() <= tolerance, masks.keys()


def test_what_stands_at_padded_tokens_counts_nothing() -> None:
    q, k, v = operands()
    padded = padding()
    expected = null_key_attention(q, k, v, key_padding_mask=padded)
    k, v = (x.masked_fill(padded[:, None, :, None], math.nan) for x in (k, v))
    for causal in (False, True):
        found = null_key_attention(q, k, v, key_padding_mask=padded, is_causal=causal)
        assert bool(found.isfinite().all())
    torch.testing.assert_close(null_key_attention(q, k, v, key_padding_mask=padded), expected)


def test_derivatives() -> None:
    inputs = [x[:1, :2].requires_grad_() for x in operands()]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return null_key_attention(q, k, v, is_causal=True, value_scale=0.5)

    assert torch.autograd.gradcheck(fn, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(fn, inputs)


def test_it_is_tied_attention_of_twice_as_many_points() -> None:
    """Theorem U's reading, which gives it its gain."""
    q, k, v = operands()
    eps, t = 0.3, 0.7
    points = torch.cat([torch.cat([q, torch.zeros_like(v)], -1), torch.cat([k, eps * v], -1)], -2)
    seen = torch.eye(2 * S, dtype=torch.bool)
    seen[:S, S:] = True
    bias = torch.zeros(2 * S, 2 * S, dtype=torch.float64).masked_fill(~seen, -math.inf)
    whole = l2_attention(points, bias=bias, scale=t)
    expected = whole[..., :S, D:] / eps
    torch.testing.assert_close(null_key_attention(q, k, v, scale=t, value_scale=eps), expected)
    assert max(seen.sum(0).max(), seen.sum(1).max()) == S + 1  # what the any-mask gain is asked for


@pytest.mark.parametrize("n", [1, 3, 8])
def test_no_attack_passes_theorem_u_and_without_the_null_key_one_does(n: int) -> None:
    eps, width = 0.5, 2

    def head(x: Tensor, null: bool = True) -> Tensor:
        q, k, v = x.unsqueeze(1).chunk(3, -1)
        if null:
            return eps * null_key_attention(q, k, v / eps, scale=1.0, value_scale=eps).squeeze(1)
        logits = -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) - v.square().sum(-1).unsqueeze(-2)
        return (logits.softmax(-1) @ v).squeeze(1)

    gain, token = l2_gain(n + 1, theorem="any mask"), l2_gain(n + 1, norm="token")
    largest = 0.0
    for size in (0.3, 1.0, 3.0):
        x = size * torch.randn(1, n, 3 * width, dtype=torch.float64)
        for norm, bound in (("l2", gain), ("token", token)):
            found = lf.attack_lipschitz(head, x, norm=norm, steps=8, restarts=2).value
            assert found <= bound
            largest = max(largest, found / bound)
    assert largest > 0.1  # or the attack would prove nothing
    if n > 1:
        # Keys far on two sides of the queries, with values as large: negative control.
        x = torch.zeros(1, n, 3 * width, dtype=torch.float64)
        x[..., ::2, width:], x[..., 1::2, width:] = 30.0, -30.0
        broken = lf.estimate_lipschitz(lambda y: head(y, null=False), x).value
        assert broken > 10.0 * gain
        assert lf.estimate_lipschitz(head, x).value <= gain


def test_bad_input_is_refused() -> None:
    q, k, v = operands()
    for wrong in ((q[..., :2], k, v), (q, k[..., :2, :], v), (q[:1], k, v)):
        with pytest.raises(ValueError, match=r"q must be \(\*, H, T, d\), k .* got"):
            null_key_attention(*wrong)
    with pytest.raises(ValueError, match="T <= S if is_causal"):
        null_key_attention(q, k[..., :2, :], v[..., :2, :], is_causal=True)
    with pytest.raises(ValueError, match="entries must be <= 0, got 0.5"):
        null_key_attention(q, k, v, bias=torch.full((S, S), 0.5))
    with pytest.raises(ValueError, match=r"broadcast to \(\*, H, T, S\) = \(2, 3, 6, 6\), got"):
        null_key_attention(q, k, v, bias=torch.zeros(S, 2))
    with pytest.raises(ValueError, match="value_scale must be positive, .* got 0.0"):
        null_key_attention(q, k, v, value_scale=0.0)
