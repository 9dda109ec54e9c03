"""L2MultiheadAttention is called as nn.MultiheadAttention is, and keeps padded tokens out."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.functional.attention import checks as _checks
from lipformer.layers.attention import masks as _attention_masks
from tests.layers.battery import error

B, N, D, H = 2, 6, 8, 2
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)  # True hides


def pair(batch_first: bool, **options: object) -> tuple[nn.MultiheadAttention, lf.L2MultiheadAttention]:
    return (
        nn.MultiheadAttention(D, H, batch_first=batch_first),
        lf.L2MultiheadAttention(D, H, batch_first=batch_first, value_proj=True, **options),
    )


def test_signature() -> None:
    """Every argument of nn.MultiheadAttention, in its order and with its default."""
    theirs = inspect.signature(nn.MultiheadAttention.forward).parameters
    ours = inspect.signature(lf.L2MultiheadAttention.forward).parameters
    assert list(ours) == list(theirs)
    for name in ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"):
        assert ours[name].default == theirs[name].default
        assert ours[name].kind == theirs[name].kind
    first = list(inspect.signature(nn.MultiheadAttention).parameters)[:4]
    assert list(inspect.signature(lf.L2MultiheadAttention).parameters)[:4] == first
    assert "batch_first" in inspect.signature(lf.L2MultiheadAttention).parameters


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("batch_first", "shape"), [(True, (B, N, D)), (False, (N, B, D)), (True, (N, D)), (False, (N, D))]
)
def test_shapes(shape: tuple[int, ...], batch_first: bool, average: bool, need_weights: bool) -> None:
    x = torch.randn(shape)
    results = [
        attention(x, x, x, need_weights=need_weights, average_attn_weights=average)
        for attention in pair(batch_first)
    ]
    (their_out, their_weights), (out, weights) = results
    assert out.shape == their_out.shape
    if need_weights:
        assert weights.shape == their_weights.shape
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    else:
        assert weights is None


def test_layouts_agree() -> None:
    first, second = (
        lf.L2MultiheadAttention(D, H, batch_first=b, value_proj=True) for b in (True, False)
    )
    second.load_state_dict(first.state_dict())
    x = torch.randn(B, N, D)
    assert error(second(x.transpose(0, 1))[0].transpose(0, 1), first(x)[0]) < 1e-6
    assert error(first(x[0])[0], first(x)[0][0]) < 1e-6
    assert error(second(x[0])[0], first(x)[0][0]) < 1e-6


def test_key_and_value_may_be_left_out() -> None:
    attention, x = lf.L2MultiheadAttention(D, H, value_proj=True), torch.randn(N, B, D)
    assert torch.equal(attention(x)[0], attention(x, x, x)[0])
    assert torch.equal(attention(x, need_weights=False)[0], attention(x)[0])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(N, N), (B * H, N, N)])
def test_causal_mask(kind: str, shape: tuple[int, ...]) -> None:
    """As a mask of either kind, as a hint with a mask, as a flag, and built in: all the same."""
    attention, x = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=True), torch.randn(B, N, D)
    mask = CAUSAL.expand(shape)
    if kind == "float":
        mask = torch.zeros(shape).masked_fill(mask, -math.inf)
    flag = attention(x, is_causal=True)[0]
    assert torch.equal(attention(x, attn_mask=mask)[0], flag)
    assert torch.equal(attention(x, attn_mask=mask, is_causal=True)[0], flag)
    built_in = lf.L2MultiheadAttention(D, H, batch_first=True, causal=True, value_proj=True)
    built_in.load_state_dict(attention.state_dict())
    assert torch.equal(built_in(x)[0], flag)
    assert torch.equal(built_in(x, attn_mask=mask)[0], flag)
    assert not torch.equal(attention(x)[0], flag)


def test_an_empty_mask_is_no_mask() -> None:
    for causal in (None, False):
        attention = lf.L2MultiheadAttention(D, H, batch_first=True, causal=causal, value_proj=True)
        x = torch.randn(B, N, D)
        for mask in (torch.zeros(N, N), torch.zeros(N, N, dtype=torch.bool)):
            assert torch.equal(attention(x, attn_mask=mask)[0], attention(x)[0])


def test_any_mask_hides_what_it_says() -> None:
    """A hidden key has no influence; a mask per sample and head is laid out as in torch."""
    attention = lf.L2MultiheadAttention(D, H, batch_first=True, any_mask=True, value_proj=True)
    x = torch.randn(B, N, D)
    masks = (torch.rand(B * H, N, N) < 0.5) & ~torch.eye(N, dtype=torch.bool)
    _, weights = attention(x, attn_mask=masks, average_attn_weights=False)
    assert torch.equal(weights == 0, masks.unflatten(0, (B, H)))
    _, theirs = nn.MultiheadAttention(D, H, batch_first=True)(
        x, x, x, attn_mask=masks, average_attn_weights=False
    )
    assert torch.equal(weights == 0, theirs == 0)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where reading a mask's values would wait for the device."""
    for module in (_attention_masks, _checks):
        monkeypatch.setattr(module, "values_readable", lambda _: False)


MASKED: dict[str, tuple[dict[str, bool], Tensor, bool]] = {
    "empty": ({}, torch.zeros(N, N), True),
    "causal": ({}, CAUSAL, True),
    "causal, built in": ({"causal": True}, CAUSAL, True),
    "causal, but never": ({"causal": False}, CAUSAL, False),
    "banded": ({}, CAUSAL.triu(2), False),
    "raised": ({}, torch.zeros(N, N).fill_diagonal_(0.5), False),
    "any": ({"any_mask": True}, CAUSAL.triu(2), True),
    "any, own key hidden": ({"any_mask": True}, torch.eye(N, dtype=torch.bool), False),
    "any, no key at all": ({"any_mask": True}, torch.full((N, N), -math.inf), False),
    "any, own key lowered": ({"any_mask": True}, -torch.eye(N), False),
    "any, NaN": ({"any_mask": True}, torch.zeros(N, N).index_fill(1, torch.tensor(2), math.nan), False),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_is_not_read_is_obeyed_or_gives_nan(
    name: str, request: pytest.FixtureRequest
) -> None:
    options, mask, covered = MASKED[name]
    attention = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=True, **options)
    x = torch.randn(B, N, D)
    if covered:
        expected = attention(x, attn_mask=mask)
        request.getfixturevalue("unread")
        for got, want in zip(attention(x, attn_mask=mask), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    else:
        with pytest.raises(ValueError, match="attn_mask"):
            attention(x, attn_mask=mask)
        request.getfixturevalue("unread")
        assert bool(attention(x, attn_mask=mask)[0].isnan().any(-1).any(-1).all())


def test_a_hint_stands_for_a_mask_that_is_not_read(unread: None) -> None:
    attention, x = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=True), torch.randn(B, N, D)
    out = attention(x, attn_mask=CAUSAL, is_causal=True)[0]
    assert torch.equal(out, attention(x, is_causal=True)[0])


@pytest.mark.parametrize("name", ["causal", "banded", "any", "any, own key hidden"])
def test_a_compiled_layer_obeys_a_mask_or_gives_nan(name: str) -> None:
    options, mask, covered = MASKED[name]
    attention = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=True, **options)
    x = torch.randn(B, N, D)
    torch._dynamo.reset()
    out = torch.compile(attention, fullgraph=True, backend="aot_eager")(x, attn_mask=mask)[0]
    if covered:
        torch.testing.assert_close(out, attention(x, attn_mask=mask)[0], rtol=0, atol=1e-6)
    else:
        assert bool(out.isnan().any())


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_of_either_kind(batch_first: bool) -> None:
    attention = lf.L2MultiheadAttention(D, H, batch_first=batch_first, value_proj=True)
    x = torch.randn(B, N, D)
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[0, 4:] = True

    def run(x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        out = attention(x, x, x, key_padding_mask=mask)[0]
        return out if batch_first else out.transpose(0, 1)

    out = run(x, padded)
    assert torch.equal(run(x, torch.zeros(B, N).masked_fill(padded, -math.inf)), out)
    assert error(out[:1, :4], run(x[:1, :4])) < 1e-6  # as if the padded tokens were not there
    assert error(out[1], run(x)[1]) < 1e-6
    assert torch.equal(out[0, 4:], attention.out_proj.bias.expand(2, D))
    assert error(attention(x[0], key_padding_mask=padded[0])[0], out[0]) < 1e-6  # without a batch


@pytest.mark.parametrize("content", [math.nan, math.inf, -math.inf, 1e30, 3e38])
@pytest.mark.parametrize(
    "options",
    [
        {"value_proj": False},
        {"causal": True, "value_proj": True},
        {"causal": True, "positions": "alibi", "value_proj": False},
        {"causal": True, "window": 2, "value_proj": True},
        {"positions": "rotary", "value_proj": True},
    ],
    ids=str,
)
def test_content_of_padded_tokens_is_never_read(options: dict[str, object], content: float) -> None:
    """Anywhere: first, in the middle, last, and a sample with no valid token at all."""
    attention = lf.L2MultiheadAttention(D, H, batch_first=True, **options)
    x = torch.randn(4, N, D)
    padded = torch.zeros(4, N, dtype=torch.bool)
    padded[0, :2] = padded[1, 2:4] = padded[2, 5:] = padded[3] = True
    clean = attention(x.masked_fill(padded[..., None], 0.0), key_padding_mask=padded)
    dirty = attention(x.masked_fill(padded[..., None], content), key_padding_mask=padded)
    for want, got in zip(clean, dirty, strict=True):
        assert torch.equal(got, want)
    contractive = lf.Contractive(attention, seq_len=N)
    want, got = (
        contractive(x.masked_fill(padded[..., None], c), key_padding_mask=padded) for c in (0.0, content)
    )
    assert torch.equal(got, want)


def test_gradients_with_padding_are_finite() -> None:
    """Whatever stands at the padded tokens."""
    attention = lf.L2MultiheadAttention(D, H, batch_first=True, causal=True, value_proj=True)
    padded = torch.zeros(3, N, dtype=torch.bool)
    padded[0, :4] = padded[1] = True
    x = torch.randn(3, N, D).masked_fill(padded[..., None], math.nan).requires_grad_()
    out, weights = attention(x, key_padding_mask=padded)
    (out.square().sum() + weights.square().sum()).backward()
    assert bool(torch.isfinite(x.grad).all())
    assert torch.equal(x.grad[padded], torch.zeros_like(x.grad[padded]))
    assert all(bool(torch.isfinite(p.grad).all()) for p in attention.parameters())


def test_wrappers_pass_the_padding_on() -> None:
    """Through Residual, ConvexResidual, Contractive and nn.Sequential, to attention alone."""
    inner = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=False)
    x = torch.randn(B, N, D)
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[:, 4:] = True
    want = inner(x, key_padding_mask=padded)[0]
    assert not torch.allclose(want, inner(x)[0])
    branch = nn.Sequential(nn.Identity(), inner)
    assert torch.equal(lf.Residual(branch)(x, padded), x + want)
    assert error(lf.ConvexResidual(branch, 0.25)(x, padded), 0.75 * x + 0.25 * want) < 1e-6
    contractive = lf.Contractive(branch, 1.0, norm="l2", seq_len=N)
    scaled = contractive(x, padded)
    torch.testing.assert_close(scaled, want * contractive.scales().mean().float())
    token_wise = nn.Linear(D, D)
    assert torch.equal(lf.Residual(token_wise)(x, padded), x + token_wise(x))


def test_wrappers_pass_the_padding_on_to_torchs_layers() -> None:
    """Torch calls it src_key_padding_mask: dropping it would let padded tokens in."""
    inner = nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, batch_first=True)
    inner.self_attn = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=True)
    nn.init.normal_(inner.self_attn.q_proj.weight)
    x = torch.randn(B, N, D)
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[:, 4:] = True
    assert torch.equal(lf.Residual(inner)(x, padded), x + inner(x, src_key_padding_mask=padded))


def test_a_mask_beside_is_causal() -> None:
    x, hides = torch.randn(1, N, D), torch.zeros(N, N, dtype=torch.bool)
    hides[2, 0] = True
    with pytest.raises(ValueError, match="neither empty nor the causal mask"):
        lf.L2MultiheadAttention(D, H, batch_first=True)(x, attn_mask=hides, is_causal=True)
    free = lf.L2MultiheadAttention(D, H, batch_first=True, any_mask=True, value_proj=True)
    weights = free(x, attn_mask=hides, is_causal=True)[1]
    assert weights[0, 2, 0] == 0
    assert (weights[0].triu(1) == 0).all()
