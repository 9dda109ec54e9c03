"""The function that is bounded is the function that runs: cases that a breaker found, stranger ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import (
    certified_radius,
    lofast_bound,
    perturbation_bound,
)
from lipformer.layers.attention.positions import rotary_angles
from lipformer.models import DotProductSelfAttention
from lipformer.models.vision_transformer import PixelNorm
from tests.promises.test_found import LoudCall, hooked, number, with_attention


class Reordered(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return iter([])


@pytest.mark.parametrize("change", ["hook", "forward", "__iter__", "in place", "input", "batch"])
def test_a_radius_is_of_the_whole_model(change: str) -> None:
    class Whole(nn.Module):
        def __init__(self, body: nn.Sequential) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            if change == "in place":
                return self.body(x).mul_(-1)
            if change == "batch":
                return self.body(x - x.mean(0) if len(x) > 1 else x)
            return self.body(x.neg_() if change == "input" else x)

    kind = Reordered if change == "__iter__" else nn.Sequential
    body = kind(nn.Flatten(), nn.Linear(2, 2, bias=False))
    nn.init.eye_(body[1].weight)
    if change == "hook":
        body.register_forward_hook(lambda module, args, out: -out)
    if change == "forward":
        body.forward = lambda x: -x
    model = body if change in ("hook", "forward", "__iter__") else Whole(body)
    x, label = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0])
    with pytest.raises((lf.NotCertifiable, ValueError), match=r"hook|replaced|overrides|something else"):
        certified_radius(model, x, label)


def test_values_are_those_of_the_dtype_that_runs() -> None:
    """Whatever a forward derives for itself: factors, eps, exponentials, rotations."""
    torch.manual_seed(3)
    shifted = lf.ActNorm(8)
    nn.init.normal_(shifted.log_scale)
    rotary = lf.L2MultiheadAttention(8, 2, batch_first=True, positions="rotary", max_len=4)
    for module in (
        lf.Contractive(nn.Linear(8, 8), 1.0),
        nn.RMSNorm(8),
        shifted,
        lf.flows.InvertibleLinear(8),
        lf.Contractive(rotary, 1.0, norm="l2"),
        lf.FeedForward(8, 16),
    ):
        model = copy.deepcopy(module).eval().bfloat16()
        x = torch.randn(2, 4, 8).bfloat16()
        with torch.no_grad():
            runs = model(x)
        y, moved = perturbation_bound(model, x.double(), 0.01)
        # Rounded once each, activations of bfloat16 are off by 2^-9; derived anew, weights would be too.
        torch.testing.assert_close(y, runs.double(), rtol=0.02, atol=0.02)
        assert torch.isfinite(moved).all()
    scaled = lf.Contractive(number(1.0, torch.bfloat16), 1.0)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    assert perturbation_bound(scaled, one.double(), 0.0)[0].item() == pytest.approx(0.9921875, rel=1e-5)
    assert scaled(one).item() == 0.9921875
    tiny = nn.Sequential(nn.RMSNorm(2, elementwise_affine=False), nn.Linear(2, 1, bias=False))
    x = torch.tensor([[1e-4, 0.0]])
    torch.testing.assert_close(perturbation_bound(tiny, x, 0.0)[0], tiny(x).detach())


def test_parts_of_attention_that_its_maps_would_not_see() -> None:
    for change in ("hook", "forward"):
        layer = DotProductSelfAttention(4, 2)
        if change == "hook":
            hooked(layer.v_proj)
        else:
            layer.v_proj = LoudCall(4, 4)
        with pytest.raises(lf.NotCertifiable, match=r"hook|overrides"):
            lofast_bound(layer, torch.randn(2, 4, 4), 0.1)
    layer.num_heads = 4
    assert layer.head_dim == 1


@pytest.mark.parametrize("part", ["linear2", "dropout2", "norm1", "out_proj", "nested"])
def test_encoder_layers_whose_branches_broadcast(part: str) -> None:
    layer = with_attention(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    narrow = nn.Linear(8 if part in ("linear2", "nested") else 4, 1)
    if part == "out_proj":
        layer.self_attn.out_proj = narrow
    elif part == "nested":
        layer.linear2 = nn.Sequential(narrow, nn.ReLU())
    else:
        setattr(layer, part, narrow)
    with pytest.raises(lf.NotCertifiable, match="1 outputs for tokens of width 4"):
        lf.certify(layer, seq_len=3)


def test_encoders_with_tokens_in_two_places() -> None:
    layer = with_attention(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    stack.layers[1].self_attn.batch_first = False
    with pytest.raises(lf.NotCertifiable, match="would mix samples"):
        lf.certify(stack.eval(), seq_len=3)


def test_branches_that_overwrite_their_input() -> None:
    linear = nn.Linear(2, 2, bias=False)
    nn.init.eye_(linear.weight)
    x = torch.randn(3, 2, 2)
    for block in (lf.Residual, lf.ConvexResidual):
        for first in (nn.LeakyReLU(10.0, True), nn.Sequential(nn.Identity(), nn.LeakyReLU(10.0, True))):
            given = x.clone()
            torch.testing.assert_close(
                block(nn.Sequential(first, linear))(given),
                block(nn.Sequential(nn.LeakyReLU(10.0), linear))(x),
            )
            assert torch.equal(given, x)
            wide = x.double()
            perturbation_bound(nn.Sequential(first), wide, 0.1)
            assert torch.equal(wide, x.double())
    block = lf.InvertibleResidual(nn.Sequential(nn.ReLU(), linear), 0.5)
    before = block(x)
    block.branch.module[0].inplace = True
    assert torch.equal(block(x.clone()), before)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_settings_read_as_forward_reads_them() -> None:
    norm = lf.CenterNorm(4, elementwise_affine=True)
    nn.init.constant_(norm.weight, 0.1)
    norm.bias = None
    assert norm(torch.randn(2, 4)).abs().max() < 0.6
    conv = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")
    assert lf.certify(conv).bound > 0
    conv.padding = (0,)
    assert lf.certify(conv).bound > 0
    conv._reversed_padding_repeated_twice = [2, 2]
    with pytest.raises(lf.NotCertifiable, match="repeats pixels"):
        lf.certify(conv)
    with pytest.raises(lf.NotCertifiable, match="bound is inf"):
        lf.certify(nn.Softplus(beta=1e-9))
    called = nn.Linear(2, 2)
    called._call_impl = lambda x: 10 * x
    with pytest.raises(lf.NotCertifiable, match="_call_impl"):
        lf.certify(called)
    images = torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match="3 channels"):
        PixelNorm((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))(images)
    assert torch.isfinite(perturbation_bound(nn.Softmax(), torch.randn(3, 4), 0.1)[1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_of_low_precision_are_in_the_bound(dtype: torch.dtype) -> None:
    norm = lf.ActNorm(4).to(dtype)
    nn.init.constant_(norm.log_scale, 1.39)
    assert lf.certify(norm).bound >= norm.log_scale.exp().double().max()
    rotary = lf.L2MultiheadAttention(4, 1, positions="rotary", causal=True, window=1, batch_first=True)
    for linear in (rotary.q_proj, rotary.out_proj):
        nn.init.eye_(linear.weight)
    rotary = rotary.to(dtype)
    # Each token sees itself: turned there and back by rounded cosines and sines.
    cos, sin = (part.to(dtype).double() for part in rotary_angles(9, 4, 0, torch.device("cpu")))
    gain = (cos.square() + sin.square()).max()
    assert gain > 1.0
    assert gain <= lf.certify(rotary, seq_len=9).bound
