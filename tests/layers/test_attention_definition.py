"""L2MultiheadAttention computes what the paper and docs/theory define, from its weights alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lipformer as lf
from tests.layers.battery import scrambled
from tests.oracles import l2_attention_oracle, squared_distances, visible_keys

B, N, D, H = 2, 7, 12, 3
HEAD = D // H


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, N, D)), dtype=torch.float64)


def layer(**options: object) -> lf.L2MultiheadAttention:
    options = {"batch_first": True, "value_proj": True, **options}
    made = scrambled(lf.L2MultiheadAttention(D, H, dtype=torch.float64, **options))
    assert isinstance(made, lf.L2MultiheadAttention)
    return made


def paper(attention: lf.L2MultiheadAttention, x: Tensor, is_causal: bool) -> Tensor:
    """concat_h [P^h X A_h W^V_h] W^O + b with A_h = W_h W_h^T / sqrt(d), term by term."""
    heads = []
    for h in range(H):
        rows = slice(h * HEAD, (h + 1) * HEAD)
        w = attention.q_proj.weight[rows].T  # (D, d)
        v = attention.v_proj.weight[rows].T
        y = x @ w
        logits = -squared_distances(y, y) / math.sqrt(HEAD)
        p = torch.softmax(logits.masked_fill(~visible_keys(N, is_causal), -math.inf), dim=-1)
        heads.append(p @ x @ (w @ w.T / math.sqrt(HEAD)) @ v)
    return torch.cat(heads, dim=-1) @ attention.out_proj.weight.T + attention.out_proj.bias


@pytest.mark.parametrize("is_causal", [False, True])
def test_paper_form(is_causal: bool) -> None:
    attention, x = layer(), tokens()
    out, _ = attention(x, is_causal=is_causal)
    torch.testing.assert_close(out, paper(attention, x, is_causal), rtol=0, atol=1e-12)


def test_lean_form_is_the_paper_form_with_the_values_folded_in() -> None:
    full, lean = layer(), layer(value_proj=False)
    with torch.no_grad():
        lean.q_proj.weight.copy_(full.q_proj.weight)
        lean.out_proj.weight.copy_(full.output_matrix().flatten(0, 1).T)
        lean.out_proj.bias.copy_(full.out_proj.bias)
        lean.log_temperature.fill_(math.log(HEAD**-0.5))
    x = tokens()
    torch.testing.assert_close(lean(x)[0], full(x)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(full.bake()(x)[0], full(x)[0], rtol=0, atol=1e-12)
    assert lf.certify(lean, seq_len=N).bound == pytest.approx(lf.certify(full, seq_len=N).bound)


def test_lean_form_has_one_temperature_per_head() -> None:
    lean, x = layer(value_proj=False), tokens()
    y = (x @ lean.q_proj.weight.T).unflatten(-1, (H, HEAD)).transpose(1, 2)
    heads = l2_attention_oracle(y, scale=lean.log_temperature.exp()[:, None, None])
    expected = lean.out_proj(heads.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(lean(x)[0], expected, rtol=0, atol=1e-12)


def test_alibi_and_window() -> None:
    lean = layer(value_proj=False, causal=True, positions="alibi", window=4, slopes=(0.5, 0.3, 0.1))
    assert lean.slopes == tuple(float(torch.tensor(s)) for s in (0.5, 0.3, 0.1))
    x = tokens()
    y = (x @ lean.q_proj.weight.T).unflatten(-1, (H, HEAD)).transpose(1, 2)
    scale = lean.log_temperature.exp()[:, None, None]
    heads = l2_attention_oracle(y, True, 4, torch.tensor(lean.slopes), scale=scale)
    expected = lean.out_proj(heads.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(lean(x)[0], expected, rtol=0, atol=1e-12)


def test_rotary() -> None:
    """Keys rotated by their positions, outputs rotated back, as complex numbers."""
    lean = layer(value_proj=False, positions="rotary")
    x = tokens()
    y = lean.q_proj(x).unflatten(-1, (H, HEAD)).transpose(1, 2)
    rate = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(N).double()[:, None] * rate)
    z = torch.complex(*y.chunk(2, dim=-1)) * turn
    heads = l2_attention_oracle(
        torch.cat([z.real, z.imag], -1), scale=lean.log_temperature.exp()[:, None, None]
    )
    back = torch.complex(*heads.chunk(2, dim=-1)) / turn
    joined = torch.cat([back.real, back.imag], -1).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(lean(x)[0], lean.out_proj(joined), rtol=0, atol=1e-12)


def test_rotary_depends_on_distances_only() -> None:
    """Without a bias in W_Q: the same tokens later in the sequence attend as before."""
    lean = layer(value_proj=False, positions="rotary", causal=True, window=3, bias=False)
    x = tokens(1, 4, D)
    late = torch.cat([tokens(1, 5, D), x], dim=1)
    _, early_weights = lean(x)
    _, late_weights = lean(late)
    torch.testing.assert_close(late_weights[:, -1, -3:], early_weights[:, -1, -3:])


def test_weights_are_those_of_the_output() -> None:
    lean = layer(value_proj=False, causal=True, window=4)
    x = tokens()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 5:] = True
    out, weights = lean(x, key_padding_mask=padding, average_attn_weights=False)
    assert weights.shape == (B, H, N, N)
    y = lean.q_proj(x).unflatten(-1, (H, HEAD)).transpose(1, 2)
    joined = (weights @ y).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(out, lean.out_proj(joined), rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1)[1], torch.ones(H, N, dtype=torch.float64))
    assert torch.equal(weights[0, :, 5:], torch.zeros(H, 2, N, dtype=torch.float64))
    averaged = lean(x, key_padding_mask=padding)[1]
    torch.testing.assert_close(averaged, weights.mean(1))


def test_a_common_offset_moves_the_output_by_a_constant() -> None:
    lean, x = layer(value_proj=False), tokens()
    shift = torch.randn(D, dtype=torch.float64)
    moved = shift @ lean.q_proj.weight.T @ lean.out_proj.weight.T
    torch.testing.assert_close(lean(x + shift)[0], lean(x)[0] + moved, rtol=0, atol=1e-12)


def test_dropout_in_training_only() -> None:
    attention, x = layer(dropout=0.5), tokens()
    first, second = attention(x)[0], attention(x)[0]
    assert not torch.equal(first, second)
    attention.eval()
    torch.testing.assert_close(attention(x)[0], paper(attention, x, False), rtol=0, atol=1e-12)


def test_initial_weights() -> None:
    """Small W_Q in the paper's form, temperatures around 1/d in the lean form (experiments)."""
    full = lf.L2MultiheadAttention(64, 8, value_proj=True)
    assert full.q_proj.weight.abs().max().item() <= 2**-4 / 8
    lean = lf.L2MultiheadAttention(64, 8, value_proj=False)
    assert lean.log_temperature.mean().item() == pytest.approx(-math.log(8), abs=1e-5)
    assert lean.log_temperature.unique().numel() == 8
    assert lean.v_proj is None
    assert lean.q_proj.bias is None
    assert sum(p.numel() for p in lean.parameters()) == 2 * 64 * 64 + 64 + 8


def test_projections_normalised_at_every_moment() -> None:
    attention = layer(proj_coeff=0.5, causal=True)
    scrambled(attention, 5.0)
    for linear in (attention.q_proj, attention.v_proj, attention.out_proj):
        norm = torch.linalg.matrix_norm(linear.weight, 2).item()
        assert 0.49 <= norm <= 0.5


@pytest.mark.parametrize("options", [{"positions": "alibi"}, {"proj_coeff": 1.0}], ids=str)
def test_built_on_the_meta_device(options: dict[str, object]) -> None:
    """to_empty leaves everything undefined; reset_parameters makes the layer whole."""
    made = lf.L2MultiheadAttention(
        D, H, batch_first=True, causal=True, device="meta", value_proj=True, **options
    )
    made = made.to_empty(device="cpu")
    for tensor in (*made.parameters(), *made.buffers()):
        torch.nn.init.constant_(tensor, math.nan)
    made.reset_parameters()
    assert bool(torch.isfinite(made(torch.randn(B, N, D))[0]).all())
    assert lf.certify(made, seq_len=N).bound > 0
