"""L2MultiheadAttention with keys in a ball: what it computes, its certificate, and what knows it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lipformer as lf
from lipformer.functional import l2_gain
from lipformer.layers.attention import key_ball
from lipformer.layers.attention.key_ball import bounded, push_bounded
from tests.layers.battery import scrambled
from tests.oracles import dense_jacobian, l2_attention_oracle

B, N, D, H = 2, 6, 8, 2
SMOOTH = pytest.mark.parametrize("smooth", [False, True])
MASKS: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": True},
    {"causal": True, "positions": "alibi"},
    {"causal": True, "positions": "rotary"},
    {"causal": True, "window": 3, "value_proj": True},
    {"any_mask": True},
]


def layer(smooth: bool = False, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    options = {"key_radius": 1.2, "smooth_radius": smooth, "max_len": N, **options}
    return scrambled(lf.L2MultiheadAttention(D, H, batch_first=True, dtype=dtype, **options))


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, N, D, dtype=dtype)


def parameters(module: nn.Module) -> list[nn.Parameter]:
    return [module.log_key_radius, module.log_temperature]


@SMOOTH
def test_it_is_attention_on_bounded_keys(smooth: bool) -> None:
    attention, x = layer(smooth, causal=False), 0.5 * tokens()
    radius = attention.log_key_radius.exp()[:, None, None]
    y = attention.q_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)
    length = y.norm(dim=-1, keepdim=True)
    y = y / (1 + (length / radius).square()).sqrt() if smooth else y * (radius / length).clamp(max=1.0)
    heads = l2_attention_oracle(y, scale=attention.log_temperature.exp()[:, None, None])
    expected = attention.out_proj(heads.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(attention(x)[0], expected, rtol=0, atol=1e-12)
    assert (y.norm(dim=-1, keepdim=True) <= radius * (1 + 1e-12)).all()
    assert (length > radius).any()
    assert smooth or (length < radius).any()


@SMOOTH
def test_derivatives_of_the_projection(smooth: bool) -> None:
    y = torch.randn(5, H, 3, dtype=torch.float64, requires_grad=True)
    curb = torch.tensor([[2.0], [0.4]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, c: bounded(y, c, smooth), (y, curb))
    assert torch.autograd.gradgradcheck(lambda y, c: bounded(y, c, smooth), (y, curb))
    tangents = torch.randn(2, 5, H, 3, dtype=torch.float64)
    for tangent, pushed in zip(tangents, push_bounded(y, curb, smooth, tangents), strict=True):
        expected = torch.func.jvp(lambda y: bounded(y, curb, smooth), (y,), (tangent,))[1]
        torch.testing.assert_close(pushed, expected, rtol=0, atol=1e-12)
    zero = torch.zeros(1, H, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda y: bounded(y, curb, smooth), zero)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_the_certificate_falls_with_the_radius_and_is_that_of_the_theorem(
    options: dict[str, Any],
) -> None:
    attention = layer(**options)
    norms = ["l2", "token", *(["self"] if options.get("causal") else [])]
    plain = copy.deepcopy(attention)
    plain.log_key_radius = None
    for norm in norms:
        last = 0.0
        for size in (-4.0, -1.0, 0.0, 0.7, 6.0):
            with torch.no_grad():
                attention.log_key_radius.fill_(size)
            bound = lf.certify(attention, norm=norm).bound
            assert last <= bound <= lf.certify(plain, norm=norm).bound
            last = bound
        assert last == pytest.approx(lf.certify(plain, norm=norm).bound, rel=1e-12)
    assert "Theorem F" in str(lf.certify(attention))


def test_gains_of_the_heads_are_near_theorem_f() -> None:
    """W = M = I: the certificate is the larger gain of the two heads."""
    attention = lf.L2MultiheadAttention(2, 2, key_radius=1.0, causal=False, dtype=torch.float64)
    with torch.no_grad():
        for weight in (attention.q_proj.weight, attention.out_proj.weight):
            weight.copy_(torch.eye(2))
        attention.log_temperature.copy_(torch.tensor([0.7, 0.2]).square().log())
    bound = lf.certify(attention).bound  # for any number of tokens
    assert l2_gain(math.inf, radius=0.7) <= bound <= 1.025 * l2_gain(math.inf, radius=0.7)
    assert lf.certify(attention, seq_len=10).bound == bound
    with torch.no_grad():
        attention.log_temperature.fill_(9.0)
    assert lf.certify(attention, seq_len=10).bound == pytest.approx(l2_gain(10), rel=1e-6)
    with pytest.raises(lf.NotCertifiable, match=r"(?s)too large .* any number of tokens.*max_len=N"):
        lf.certify(attention)


def test_what_has_no_proof_is_refused() -> None:
    attention = layer(causal=False)
    with pytest.raises(lf.NotCertifiable, match="linf"):
        lf.certify(attention, norm="linf")
    with pytest.raises(lf.NotCertifiable, match="linf"):
        lf.Contractive(attention, norm="linf")
    assert lf.Contractive(attention).norms == ("l2", "token")
    for options in ({"causal": True}, {"causal": False, "any_mask": True}):
        with pytest.raises(lf.NotCertifiable, match="grows with the number of tokens"):
            lf.certify(layer(max_len=None, **options))
    for radius in (0.0, -1.0, math.inf, math.nan, "1"):
        with pytest.raises(ValueError, match="key_radius must be None or positive and finite"):
            lf.L2MultiheadAttention(D, H, key_radius=radius)


@pytest.mark.parametrize(("smooth", "options"), [(i % 2 == 0, m) for i, m in enumerate(MASKS)], ids=str)
def test_contractive_divides_by_it_and_bakes_it(smooth: bool, options: dict[str, Any]) -> None:
    for norm in ["l2", "token", *(["self"] if options.get("causal") else [])]:
        module = lf.Contractive(layer(smooth, torch.float32, **options), 0.9, norm=norm)
        x = tokens(torch.float32)
        assert lf.certify(module, norm=norm).bound == 0.9
        module(x).square().sum().backward()
        for parameter in parameters(module.module):
            assert parameter is None or bool(
                parameter.grad.isfinite().all() & (parameter.grad != 0).any()
            )
        baked = lf.bake(module)
        assert torch.equal(baked(x), module(x))
        assert lf.certify(baked, norm=norm).bound <= 0.9 * (1 + 1e-5)
        found = dense_jacobian(copy.deepcopy(baked).double(), x[:1].double())
        assert torch.linalg.matrix_norm(found, 2) <= lf.certify(baked).bound


def test_training_trades_sharpness_for_strength() -> None:
    """The factors of Contractive fall with temperature and radius, and know it by their gradient."""
    module = lf.Contractive(layer(causal=False, key_radius=0.7), 0.9, norm="l2")
    scales = module.scales()
    for parameter in parameters(module.module):
        slope = torch.autograd.grad(scales.sum(), parameter, retain_graph=True)[0]
        assert (slope < 0).all()
        with torch.no_grad():
            parameter.add_(1e-6)
            moved = (module.scales().sum() - scales.sum()) / 1e-6
            parameter.sub_(1e-6)
        assert moved.item() == pytest.approx(slope.sum().item(), rel=1e-3)


@SMOOTH
def test_steps_are_the_full_pass(smooth: bool) -> None:
    for options in ({"positions": "alibi"}, {"positions": "rotary"}, {"window": 2}):
        attention, x = layer(smooth, causal=True, **options), tokens()
        full, cache, parts = attention(x)[0], None, []
        for start in range(0, N, 2):
            out, cache = attention.step(x[:, start : start + 2], cache)
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["norm", "causal"])
@SMOOTH
def test_invertible_blocks(smooth: bool, mode: str) -> None:
    causal = mode == "causal"
    positions = "rotary" if causal else None
    block = lf.InvertibleResidual(
        layer(smooth, causal=causal, positions=positions), 0.9, mode, seq_len=N
    )
    x = tokens()
    y, log_det = block.eval().forward_and_log_det(x)
    torch.testing.assert_close(block.inverse(y, tol=1e-10), x, rtol=0, atol=1e-8)
    for sample in range(B):
        jacobian = dense_jacobian(block, x[sample : sample + 1])
        assert log_det[sample].item() == pytest.approx(
            torch.linalg.slogdet(jacobian)[1].item(), abs=1e-8
        )
    log_det.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in block.parameters() if p.grad is not None)


def test_what_belongs_to_a_radius_needs_one() -> None:
    with pytest.raises(ValueError, match="smooth_radius=True needs a key_radius, got key_radius=None"):
        lf.L2MultiheadAttention(8, 2, smooth_radius=True)


def test_any_number_of_tokens_without_a_mask_alone() -> None:
    """Under a causal mask the gain on a ball grows without end, and causal=None allows one."""
    assert l2_gain(math.inf, is_causal=True, radius=0.5) == math.inf
    assert l2_gain(math.inf, radius=0.5) < 1.5
    for norm, causal in (("l2", False), ("token", None), ("token", False)):
        lf.Contractive(lf.L2MultiheadAttention(8, 2, causal=causal, key_radius=0.5), norm=norm)
    with pytest.raises(lf.NotCertifiable, match="under a causal mask, which causal=None allows, grows"):
        lf.Contractive(lf.L2MultiheadAttention(8, 2, key_radius=0.5), norm="l2")


def test_flows_and_models_have_it() -> None:
    flow = lf.flows.AttentionFlow(2, depth=1, num_heads=2, width=8, hidden=8, seq_len=4, key_radius=2.0)
    attention = next(m for m in flow.modules() if isinstance(m, lf.L2MultiheadAttention))
    assert attention.smooth_radius
    x = torch.randn(3, 4, 2)
    flow.log_prob(x).sum().backward()
    assert attention.log_key_radius.grad is not None
    for name in ("l2", "contractive", "lipschitz", "invertible"):
        model = lf.models.VARIANTS[name](11, dim=8, num_heads=2, num_layers=1, max_len=8, key_radius=2.0)
        layers = [m for m in model.modules() if isinstance(m, lf.L2MultiheadAttention)]
        assert layers[0].smooth_radius == (name == "invertible")
        assert layers[0].bounds_keys
        model(torch.randint(0, 11, (2, 8))).sum().backward()
        assert layers[0].log_key_radius.grad.abs().sum() > 0
    config = lf.models.VisionTransformerConfig("l2", 8, 1, 4, 3, dim=8, num_heads=2, key_radius=2.0)
    images = lf.models.VisionTransformer(config)
    assert math.isfinite(lf.certify(images).bound)
    with pytest.raises(ValueError, match="key_radius"):
        lf.models.VARIANTS["dot_product"](11, key_radius=2.0)
    with pytest.raises(ValueError, match="key_radius has no bound in the linf norm"):
        lf.models.VARIANTS["contractive"](11, key_radius=2.0, norm="linf")


def test_conversion_and_measures() -> None:
    torch.manual_seed(0)
    converted = lf.convert_attention(nn.MultiheadAttention(D, H, batch_first=True), key_radius=3.0)
    assert converted.model.bounds_keys
    attention = layer(causal=False, dtype=torch.float64)
    x = tokens()[0]
    found = lf.analysis.measure_attention(attention, x, torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(found, attention(x[None])[0][0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@SMOOTH
def test_rounded_keys_stay_in_the_certified_ball(smooth: bool, dtype: torch.dtype) -> None:
    attention = layer(smooth, dtype, causal=True, positions="rotary")
    keys = attention._keys(100 * tokens(dtype), 0).y.double()
    radius = attention.log_radius().double().exp()[:, None, None]
    assert (
        keys.norm(dim=-1, keepdim=True) <= radius * (1 + 1e-6) * (1 + torch.finfo(dtype).eps) ** 2
    ).all()


def test_extreme_radii_and_temperatures_stay_finite() -> None:
    for size in (-200.0, -60.0, 60.0, 200.0):
        attention = layer(dtype=torch.float32, causal=False)
        with torch.no_grad():
            attention.log_key_radius.fill_(size)
        out = attention(tokens(torch.float32), need_weights=False)[0]
        out.sum().backward()
        assert bool(out.isfinite().all())
        assert math.isfinite(lf.certify(attention).bound)
        assert all(bool(p.grad.isfinite().all()) for p in attention.parameters())


@pytest.mark.parametrize("size", [math.nan, math.inf])
def test_a_radius_that_is_no_number_is_seen_and_not_certified(size: float) -> None:
    module = lf.Contractive(layer(causal=False), norm="l2")
    with torch.no_grad():
        module.module.log_key_radius.fill_(size)
    assert bool(module(tokens()).isnan().any())
    with pytest.raises(lf.NotCertifiable, match="log_key_radius.* not finite"):
        lf.certify(module)


def test_a_baked_layer_is_one_of_its_kind_and_keeps_its_ball_in_half_precision() -> None:
    x = tokens(torch.float16)
    x[:, 0] = 0.0
    for size in (-8.0, 0.0, 12.0):
        attention = layer(dtype=torch.float32, causal=False)
        with torch.no_grad():
            attention.log_key_radius.fill_(size)
        baked = lf.bake(attention)
        other = layer(dtype=torch.float32, causal=False)
        other.load_state_dict(baked.state_dict())
        assert torch.equal(other(x.float())[0], attention(x.float())[0])
        half = copy.deepcopy(baked).half()
        assert bool(half(x)[0].isfinite().all())
        assert lf.certify(half).bound == pytest.approx(lf.certify(attention).bound, rel=0.02)


def test_a_trace_leaves_no_stand_ins_behind() -> None:
    heads = (((("l2", 5.0, "causal", 0.0),), 2.0),)
    key_ball._lines(heads, 1.0)  # as building Contractive does
    with FakeTensorMode():  # what torch.export runs a module in
        assert type(key_ball._line_tensor(heads, 1.0, "cpu")) is not Tensor
    assert type(key_ball._line_tensor(heads, 1.0, "cpu")) is Tensor
    module, x = lf.Contractive(layer(causal=True, max_len=7), norm="l2"), tokens()
    torch.func.jvp(module, (x,), (x,))
    assert bool(module(x).isfinite().all())
