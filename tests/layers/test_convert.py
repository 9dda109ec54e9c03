"""convert_attention: what is replaced, what is kept, what is left, and how near the start is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers.convert.start import tied_projection, value_map

B, N, D, H = 2, 7, 12, 3
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


def attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(D, H, batch_first=True, **options).double()


def test_the_tied_projection_is_the_nearest_one() -> None:
    q, k = torch.randn(2, H, D, D // H, dtype=torch.float64)
    w = tied_projection(q, k)
    target = (q @ k.mT + k @ q.mT) / 2.0
    floor = 1e-2 * torch.linalg.eigvalsh(target)[..., -1:]
    distance = torch.linalg.matrix_norm(2.0 * w @ w.mT - target)
    for _ in range(20):
        other = w + 0.05 * torch.randn_like(w)
        # Raising small eigenvalues costs at most the floor in each of d directions.
        slack = floor.squeeze(-1) * math.sqrt(D // H)
        assert (torch.linalg.matrix_norm(2.0 * other @ other.mT - target) >= distance - slack).all()


def test_a_tied_kernel_is_kept_exactly() -> None:
    q = torch.linalg.qr(torch.randn(H, D, D // H, dtype=torch.float64)).Q
    w = tied_projection(q, q)
    assert (2.0 * w @ w.mT - q @ q.mT).abs().max() <= 1e-12


def test_a_head_without_a_positive_eigenvalue_starts_flat_and_finite() -> None:
    q = torch.randn(H, D, D // H, dtype=torch.float64)
    for w in (tied_projection(q, -q), tied_projection(0.0 * q, q)):
        assert bool(w.isfinite().all())
        assert bool((torch.linalg.matrix_rank(w) == D // H).all())


def test_the_value_map_is_least_squares() -> None:
    w = torch.randn(H, D, D // H, dtype=torch.float64)
    values = torch.randn(H, D, D, dtype=torch.float64)
    rest = values - w @ value_map(w, values)
    assert (w.mT @ rest).abs().max() <= 1e-10  # orthogonal to the range of W


@pytest.mark.parametrize("value_proj", [False, True])
def test_what_l2_attention_can_express_is_kept(value_proj: bool) -> None:
    """Tied weights, keys of one norm in each head, values in the range of W: the same function."""
    layer = attention()
    x = torch.randn(B, N, D, dtype=torch.float64)
    with torch.no_grad():
        q = torch.eye(D, dtype=torch.float64)
        layer.in_proj_weight.copy_(torch.cat([q, q, q]))  # values of head h: its own keys
        layer.in_proj_bias.zero_()
        layer.in_proj_bias[2 * D :].normal_()
        layer.out_proj.bias.normal_()
        x = nn.functional.normalize(x.unflatten(-1, (H, -1)), dim=-1).flatten(-2)
        expected, weights = layer(x, x, x)
        new = lf.convert_attention(layer, value_proj=value_proj).model
        out, new_weights = new(x, x, x)
    assert (new_weights - weights).abs().max() <= 1e-9
    assert (out - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("value_proj", [False, True])
@torch.no_grad()
def test_the_start_is_nearer_than_a_fresh_layer(value_proj: bool) -> None:
    layer = attention()
    layer.in_proj_weight[D : 2 * D] += layer.in_proj_weight[:D]
    x = torch.randn(8, N, D, dtype=torch.float64)
    expected = layer(x, x, x)[0]
    new = lf.convert_attention(layer, value_proj=value_proj).model
    fresh = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=value_proj).double()

    def distance(other: nn.Module) -> Tensor:
        return (other(x)[0] - expected).norm() / expected.norm()

    assert distance(new) < 0.9 * distance(fresh)


def test_encoders_at_any_depth_are_converted_and_run() -> None:
    layer = nn.TransformerEncoderLayer(D, H, 24, dropout=0.1, batch_first=True)
    model = nn.ModuleDict({"a": nn.Sequential(nn.TransformerEncoder(layer, 2)), "b": nn.Linear(D, D)})
    model.eval()
    done = lf.convert_attention(model)
    assert done.model is model
    assert list(done.converted) == ["a.0.layers.0.self_attn", "a.0.layers.1.self_attn"]
    found = [part for part in model.modules() if isinstance(part, lf.L2MultiheadAttention)]
    assert len(found) == 2
    assert not any(isinstance(part, nn.MultiheadAttention) for part in model.modules())
    assert all(part.batch_first and part.dropout == 0.1 and not part.training for part in found)
    x = torch.randn(B, N, D)
    mask = nn.Transformer.generate_square_subsequent_mask(N)
    for options in ({}, {"mask": mask, "is_causal": True}):
        out = model["a"][0](x, **options)  # type: ignore[index]
        out.square().mean().backward()
        assert out.shape == x.shape
    assert all(p.grad is not None for p in model["a"].parameters())
    assert lf.certify(model["a"], seq_len=N).bound > 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtype_and_bias_are_kept(dtype: torch.dtype) -> None:
    layer = nn.MultiheadAttention(D, H, bias=False, dtype=dtype).train()
    new = lf.convert_attention(layer, causal=True, positions="alibi").model
    assert isinstance(new, lf.L2MultiheadAttention)
    assert {p.dtype for p in new.parameters()} == {dtype}
    assert new.out_proj.bias is None
    assert not new.batch_first
    assert new.training
    assert new.positions == "alibi"


def test_a_projection_bound_is_made_up_for_by_the_temperature() -> None:
    layer = attention()
    free = lf.convert_attention(layer).model
    bounded = lf.convert_attention(layer, proj_coeff=0.5).model
    x = torch.randn(B, N, D, dtype=torch.float64)
    assert (free(x)[1] - bounded(x)[1]).abs().max() <= 1e-9
    assert lf.certify(bounded, seq_len=N).bound < lf.certify(free, seq_len=N).bound


def test_a_shared_layer_stays_shared() -> None:
    one = attention()
    model = lf.convert_attention(nn.ModuleList([one, one])).model
    assert isinstance(model, nn.ModuleList)
    assert model[0] is model[1]
    assert isinstance(model[0], lf.L2MultiheadAttention)


def test_cross_attention_is_left_and_named() -> None:
    model = nn.Transformer(D, H, 1, 2, 24, batch_first=True)
    done = lf.convert_attention(model)
    names = [f"decoder.layers.{i}.multihead_attn" for i in range(2)]
    assert done.left == dict.fromkeys(names, "cross-attention")
    assert str(done).splitlines()[:2] == [
        "3 of 5 attention layers converted",
        "encoder.layers.0.self_attn       MultiheadAttention -> L2MultiheadAttention",
    ]
    assert str(done).endswith("decoder.layers.1.multihead_attn  left: cross-attention")
    kinds = [type(part).__name__ for part in model.modules() if "Multihead" in type(part).__name__]
    assert sorted(kinds) == ["L2MultiheadAttention"] * 3 + ["MultiheadAttention"] * 2
    assert model(torch.randn(B, N, D), torch.randn(B, 4, D)).shape == (B, 4, D)


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class NewAttention(nn.Module):
    """Of a kind that nobody knows."""


def hooked() -> nn.Module:
    layer = attention()
    layer.register_forward_hook(lambda *args: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (attention(kdim=5, vdim=5), "cross-attention"),
        (attention(add_zero_attn=True), "it adds extra keys"),
        (attention(add_bias_kv=True), "it adds extra keys"),
        (OwnForward(D, H), "it overrides forward"),
        (hooked(), "it has hooks, which would be lost"),
        (NewAttention(), "NewAttention is not known"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_cannot_be_converted_is_left_and_zero_is_an_error(layer: nn.Module, reason: str) -> None:
    model = nn.ModuleDict({"odd": layer, "plain": attention()})
    before = layer.state_dict()
    done = lf.convert_attention(model)
    assert list(done.converted) == ["plain"]
    assert done.left["odd"].endswith(reason)
    assert model["odd"] is layer
    assert layer.state_dict().keys() == before.keys()
    with pytest.raises(ValueError, match=rf"no attention of .* can be converted.*\n  .*: .*{reason}"):
        lf.convert_attention(nn.ModuleDict({"odd": layer}))


def test_no_attention_at_all_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="no attention of Linear .* found no module that is called att"):
        lf.convert_attention(nn.Linear(3, 3))
    done = lf.convert_attention(nn.TransformerEncoderLayer(D, H)).model
    with pytest.raises(ValueError, match=r"Layer is already converted: 1 layers \(self_attn\)"):
        lf.convert_attention(done)


def test_a_wrong_option_changes_nothing() -> None:
    layer = nn.TransformerEncoderLayer(D, H)
    with pytest.raises(ValueError, match="num_heads is taken from each layer"):
        lf.convert_attention(layer, num_heads=2)
    with pytest.raises(ValueError, match="positions must be"):
        lf.convert_attention(layer, positions="none")
    assert isinstance(layer.self_attn, nn.MultiheadAttention)
