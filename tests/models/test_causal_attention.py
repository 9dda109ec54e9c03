"""The attentions to compare with, against slow float64 oracles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lipformer as lf
from lipformer.layers.attention.positions import rotary_angles, rotate
from lipformer.models import DotProductAttention, UntiedL2Attention
from lipformer.models.causal_attention import CausalAttention, alibi_slopes

B, N, D, H = 2, 9, 12, 3
KINDS = {"dot": DotProductAttention, "l2": UntiedL2Attention}


def oracle(layer: CausalAttention, x: Tensor) -> Tensor:
    """Row by row and head by head, from the definition."""
    d = D // H
    q, k, v = (part.unflatten(-1, (H, d)) for part in layer.qkv(x).chunk(3, dim=-1))
    if layer.positions == "rotary":
        angles = rotary_angles(N, d, 0, x.device)
        q, k = (rotate(part.transpose(1, 2), *angles).transpose(1, 2) for part in (q, k))
    out = torch.zeros(B, N, H, d, dtype=x.dtype)
    for b in range(B):
        for h in range(H):
            for i in range(N):
                logits = []
                for j in range(i + 1):
                    if isinstance(layer, UntiedL2Attention):
                        t = layer.log_temperature[h].exp()
                        logit = -t * (q[b, i, h] - k[b, j, h]).square().sum()
                    else:
                        logit = q[b, i, h] @ k[b, j, h] / math.sqrt(d)
                    if layer.slopes is not None:
                        logit = logit - layer.slopes[h] * (i - j)
                    logits.append(logit)
                weights = torch.stack(logits).softmax(0)
                out[b, i, h] = weights @ v[b, : i + 1, h]
    return layer.out(out.flatten(2))


@pytest.mark.parametrize("positions", ["alibi", "rotary", None])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_layer_is_its_definition(kind: str, positions: str | None) -> None:
    layer = KINDS[kind](D, H, positions=positions).double()
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(B, N, D, dtype=torch.float64)
    expected = oracle(layer, x)
    assert (layer(x) - expected).abs().max() <= 1e-12 * expected.abs().max()
    narrow = layer.float()(x.float())
    assert (narrow - expected).abs().max() <= 1e-5 * expected.abs().max()
    half = layer.bfloat16()(x.bfloat16())
    assert (half.double() - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("positions", ["alibi", "rotary", None])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_equal_the_full_pass(kind: str, positions: str | None) -> None:
    layer = KINDS[kind](D, H, positions=positions).double().eval()
    x, cache, rows = torch.randn(B, N, D, dtype=torch.float64), None, []
    for start, stop in ((0, 1), (1, 5), (5, 6), (6, 9)):
        row, cache = layer.step(x[:, start:stop], cache)
        rows.append(row)
    assert (torch.cat(rows, 1) - layer(x)).abs().max() <= 1e-12


def test_the_default_slopes() -> None:
    assert alibi_slopes(4) == (1 / 4, 1 / 16, 1 / 64, 1 / 256)
    assert DotProductAttention(8, 4).slopes == alibi_slopes(4)
    assert UntiedL2Attention(8, 1).slopes == (1 / 256,)


def test_the_gain_grows_with_the_input() -> None:
    """Why certify refuses them: where one token is zero and the rest grow, so does the gain."""
    layer = DotProductAttention(D, H, positions=None).double().requires_grad_(False)
    x = torch.randn(1, N, D, dtype=torch.float64)
    x[:, -1] = 0.0
    gains = [lf.estimate_lipschitz(layer, scale * x).value for scale in (1.0, 10.0, 100.0)]
    assert gains[1] > 5.0 * gains[0]
    assert gains[2] > 5.0 * gains[1]


@pytest.mark.parametrize("kind", KINDS)
def test_certify_refuses(kind: str) -> None:
    with pytest.raises(lf.NotCertifiable, match="no finite Lipschitz constant .*L2MultiheadAttention"):
        lf.certify(KINDS[kind](D, H))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "multiple of num_heads, .* got 12 and 5"),
        ({"positions": None, "slopes": [1.0] * 3}, "slopes need positions='alibi'"),
        ({"slopes": [1.0]}, "slopes must be 3 positive numbers"),
        ({"num_heads": 4, "positions": "rotary"}, "twice that with positions='rotary', got 12 and 4"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DotProductAttention(**{"dim": D, "num_heads": H, **options})  # type: ignore[arg-type]


def test_padding_is_refused_in_steps() -> None:
    with pytest.raises(ValueError, match="takes no padding"):
        DotProductAttention(D, H).step(torch.randn(1, 2, D), None, torch.zeros(1, 2, dtype=torch.bool))
