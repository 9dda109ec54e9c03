"""What Contractive divides by: head by head, in the smallest norm, with gradients through it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipformer as lf
from lipformer.functional import l2_gain, spectral_norm_bound
from lipformer.functional.spectral import bound as _spectral
from tests.layers.battery import error, scrambled
from tests.oracles import dense_jacobian

D, H, N = 8, 2, 5


def attention(**options: object) -> lf.L2MultiheadAttention:
    options = {"batch_first": True, "value_proj": False, **options}
    made = scrambled(lf.L2MultiheadAttention(D, H, dtype=torch.float64, **options))
    assert isinstance(made, lf.L2MultiheadAttention)
    return made


def tokens(n: int = N) -> Tensor:
    return torch.randn(2, n, D, dtype=torch.float64)


def test_one_factor_where_the_gains_are_equal() -> None:
    """coeff / UB times the module, UB from the joint norms of docs/theory, section 2."""
    inner, x = attention(), tokens()
    layer = lf.Contractive(inner, 0.8, norm="l2", seq_len=N)
    q, m = inner.q_proj.weight, inner.output_matrix().flatten(0, 1)
    gain = max(l2_gain(N), l2_gain(N, is_causal=True))
    norms = torch.linalg.matrix_norm(q, 2) * torch.linalg.matrix_norm(m, 2)
    factor = 0.8 / (gain * norms.item())
    scales = layer.scales()
    assert scales.shape == (H,)
    torch.testing.assert_close(scales, torch.full_like(scales, factor), rtol=1e-2, atol=0)
    assert bool((scales <= factor).all())
    assert error(layer(x), scales[0] * inner(x)[0]) < 1e-12


def test_each_head_is_divided_by_its_own_gain() -> None:
    inner = attention(causal=True, positions="alibi", slopes=(2.0, 0.05))
    scales = lf.Contractive(inner, norm="l2", seq_len=200).scales()
    near, far = (l2_gain(200, is_causal=True, slope=s) for s in inner.slopes)
    assert (scales[0] / scales[1]).item() == pytest.approx(far / near)
    assert scales[0] > 2 * scales[1]


def test_the_smallest_of_the_norms() -> None:
    inner = attention(causal=True)
    free = lf.Contractive(inner, seq_len=300).scales().mean()
    each = {
        n: lf.Contractive(inner, norm=n, seq_len=300).scales().mean() for n in ("l2", "token", "linf")
    }
    assert free == max(each.values())
    assert each["token"] == free, "at 300 tokens Theorem D is smaller than B+"
    own = lf.Contractive(inner, norm="self", seq_len=300).scales().mean()
    assert own > 2 * free, "Theorem E is smaller than all of them"


def test_norms_without_a_bound_are_left_out() -> None:
    layer = lf.Contractive(nn.Sequential(lf.BallProjection(1.0), nn.Linear(D, D)))
    assert layer.norms == ("l2", "token")
    assert lf.Contractive(attention(positions="rotary"), seq_len=N).norms == ("l2", "token")


@pytest.mark.parametrize("norm", ["l2", "token", "linf"])
@pytest.mark.parametrize("value_proj", [False, True])
def test_gradients_flow_through_the_bound(norm: str, value_proj: bool) -> None:
    inner = lf.L2MultiheadAttention(4, 2, batch_first=True, value_proj=value_proj, dtype=torch.float64)
    layer = lf.Contractive(scrambled(inner, 0.5), norm=norm, seq_len=3)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(1, 3, 4, dtype=torch.float64)

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    weights = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(fn, (x.requires_grad_(), *weights))


def test_second_derivatives_through_the_bound() -> None:
    inner = lf.L2MultiheadAttention(2, 1, batch_first=True, value_proj=False, dtype=torch.float64)
    layer = lf.Contractive(scrambled(inner, 0.5), norm="l2", seq_len=3)
    x = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    weight = layer.module.q_proj.weight.detach().clone().requires_grad_()

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(layer, {"module.q_proj.weight": weight}, (x,))

    assert torch.autograd.gradgradcheck(fn, (x, weight))


def test_the_size_of_the_weights_does_not_matter() -> None:
    """Scaling M changes nothing: only its direction is left, as after any normalisation."""
    inner, x = attention(bias=False), tokens()
    layer = lf.Contractive(inner, norm="l2", seq_len=N)
    before = layer(x)
    with torch.no_grad():
        inner.out_proj.weight.mul_(37.0)
    assert error(layer(x), before) < 1e-9


def test_weights_of_zero() -> None:
    inner = attention()
    with torch.no_grad():
        inner.out_proj.weight.zero_()
    layer = lf.Contractive(inner, seq_len=N)
    # Nothing to divide by: the bias is not enlarged.
    assert bool((layer.scales() <= 0.9).all())
    out = layer(tokens())
    assert bool(torch.isfinite(out).all())
    out.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters())


def test_max_len_is_set() -> None:
    inner = attention()
    layer = lf.Contractive(nn.Sequential(lf.Residual(inner)), norm="l2", seq_len=N)
    assert inner.max_len == N
    with pytest.raises(ValueError, match=f"max_len is {N}, got {N + 1} tokens"):
        layer(tokens(N + 1))
    longer = attention(max_len=100)
    lf.Contractive(longer, seq_len=N)
    assert longer.max_len == N
    with pytest.raises(lf.NotCertifiable, match=f"seq_len={N} exceeds the layer's max_len=3"):
        lf.Contractive(attention(max_len=3), seq_len=N)
    certificate = lf.certify(layer)
    assert certificate.seq_len == N
    assert certificate.domain == f"for every input of at most {N} tokens"
    with pytest.raises(lf.NotCertifiable, match=f"seq_len=9 exceeds the {N} that it was divided for"):
        lf.certify(layer, seq_len=9)


def test_a_window_or_alibi_needs_no_length() -> None:
    for options in ({"window": 4}, {"positions": "alibi"}):
        layer = lf.Contractive(attention(causal=True, **options), norm="l2")
        assert lf.certify(layer).bound == 0.9
        assert lf.certify(layer).domain == "for every input"
        assert lf.certify(layer, seq_len=10**6).bound == 0.9


def test_dropout_counts_as_in_eval() -> None:
    """The factors are those of eval mode in either mode; in training there is no certificate."""
    for module in (attention(dropout=0.5), nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))):
        layer = lf.Contractive(module, norm="l2", seq_len=N)
        scales = layer.train().scales()
        assert torch.equal(scales, layer.eval().scales())
        assert lf.certify(layer).bound == 0.9
        with pytest.raises(lf.NotCertifiable, match="random in training mode"):
            lf.certify(layer.train())


def test_frozen_keeps_the_factors() -> None:
    layer = lf.Contractive(attention(), seq_len=N)
    with lf.frozen(layer):
        assert layer.scales() is layer.scales()
    assert layer.scales() is not layer.scales()
    twin = copy.deepcopy(layer)
    with lf.frozen(layer):
        layer.scales()
        scrambled(twin)
        assert not torch.equal(twin.scales(), layer.scales())


def test_a_scalar_parameter() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * x

    @lf.register_bound(Gain)
    def _(module: Gain, ask: lf.certificate.Ask) -> Tensor:
        return module.gain.abs()

    x = torch.randn(2, 4)
    out = lf.Contractive(Gain(), 0.5)(x)
    torch.testing.assert_close(out, 0.5 * x, rtol=1e-5, atol=0)


def test_baked_inside_a_sequence() -> None:
    """The baked model is called as the model was."""
    model = nn.Sequential(lf.Contractive(attention(), seq_len=N), nn.Linear(D, D).double())
    x = tokens()
    assert error(lf.bake(model)(x), model(x)) < 1e-12


def test_no_bound_is_computed_for_a_constant_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Contractive inside another's module counts as its coefficient: one bound a forward pass."""
    asked = []

    def counted(weight: Tensor, method: str = "cholesky") -> Tensor:
        asked.append(weight.shape)
        return spectral_norm_bound(weight)

    inner = lf.Contractive(attention(causal=True, positions="alibi"), 0.5, norm="self")
    layer = lf.Contractive(nn.Sequential(lf.TokenShift(D), inner), 0.9, norm="self")
    x = tokens()
    monkeypatch.setattr(_spectral, "spectral_norm_bound", counted)
    got = layer(x)
    assert asked == [(2, D, D)]
    assert error(got, 0.9 / 0.5 * inner(layer.module[0](x))) < 1e-14


def test_settings_changed_after_construction_are_seen() -> None:
    attention = lf.L2MultiheadAttention(
        4, 1, batch_first=True, value_proj=False, causal=False, max_len=2
    )
    layer = lf.Contractive(attention, 1.0, norm="token")
    before = layer.scales()
    attention.max_len = 128
    assert layer.scales().item() < 0.5 * before.item()


def test_copies_made_in_a_freeze_are_not_frozen() -> None:
    layer = lf.Contractive(nn.Sequential(nn.Linear(4, 4, bias=False)))
    x = torch.randn(2, 4)
    with lf.frozen(layer):
        layer(x)
        copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.module[0].weight.mul_(100.0)
    torch.testing.assert_close(copied(x), layer(x))


def test_factors_that_cancel() -> None:
    """In float32 the product of these weights is noise instead of zero."""
    a, b, order = torch.randn(64, 32), torch.randn(64, 32), torch.randperm(64)
    layer = lf.L2MultiheadAttention(
        64, 1, batch_first=True, causal=False, max_len=8, bias=False, value_proj=True
    )
    with torch.no_grad():
        layer.q_proj.weight.copy_(torch.cat([a, a], 1)[:, order])
        layer.v_proj.weight.copy_(torch.cat([b, -b], 1)[:, order])
    contractive = lf.Contractive(layer, 0.9, norm="l2")
    assert lf.estimate_lipschitz(contractive, torch.zeros(1, 8, 64)).value <= 0.9


def test_a_rule_that_depends_on_the_length() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(-2, keepdim=True).expand_as(x)

    @lf.register_bound(Mean)
    def _(module: Mean, ask: lf.certificate.Ask) -> float:
        if ask.seq_len is None:
            raise ask.refuse("it sums over tokens", "seq_len")
        return float(ask.seq_len)

    layer = lf.Contractive(Mean(), seq_len=4, norm="l2")
    assert lf.certify(layer).seq_len == 4
    with pytest.raises(lf.NotCertifiable, match="exceeds the 4 that it was divided for"):
        lf.certify(layer, seq_len=32)
    with pytest.raises(ValueError, match=r"seq_len is 4, got shape \(5, 2\)"):
        layer(torch.randn(5, 2))


def test_factors_are_rounded_down_in_the_output_dtype() -> None:
    for coeff in (0.9, 0.8, 0.6):  # bfloat16 would round the last two up
        layer = lf.Contractive(nn.Identity(), coeff)
        assert layer(torch.ones(1, 1, dtype=torch.bfloat16)).item() <= coeff


def test_a_chain_is_baked_stepped_through_and_differentiated_with_its_factors() -> None:
    attention = lf.L2MultiheadAttention(8, 2, batch_first=True, causal=True, positions="alibi")
    chain = nn.Sequential(lf.TokenShift(8), attention, nn.Linear(8, 8))
    layer = lf.Contractive(chain, 0.9, norm="self").double()
    assert layer.scales().shape == (2,)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(lf.bake(layer)(x), layer(x))
    first, cache = layer.step(x[:, :4])
    second, _ = layer.step(x[:, 4:], cache)
    torch.testing.assert_close(torch.cat([first, second], dim=1), layer(x))
    block = lf.InvertibleResidual(chain, mode="causal").double()
    causal, exact = (block.log_det(x, method=method).value for method in ("causal", "exact"))
    torch.testing.assert_close(causal, exact)


def test_two_attentions_in_a_chain_have_one_factor() -> None:
    attentions = [lf.L2MultiheadAttention(8, 2, batch_first=True, max_len=5) for _ in range(2)]
    assert lf.Contractive(nn.Sequential(*attentions)).scales().ndim == 0
    assert lf.Contractive(nn.Sequential(attentions[0], attentions[0])).scales().ndim == 0


def test_tokens_that_a_part_makes_are_counted() -> None:
    """Attention behind an Unflatten sees more tokens than the question is about."""
    attention = lf.L2MultiheadAttention(4, 2, batch_first=True, max_len=64)
    layer = lf.Contractive(nn.Sequential(nn.Unflatten(1, (-1, 4)), attention), norm="linf")
    assert lf.certify(layer, seq_len=1).bound == lf.certify(layer).bound


def test_a_rule_may_return_a_vector_of_one() -> None:
    class Stretch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.full((1,), 7.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    lf.register_bound(Stretch)(lambda module, ask: module.gain.abs())
    x = torch.ones(1, 1, 1)
    assert lf.Contractive(Stretch(), 0.9, norm="l2")(x).item() <= 0.9


class Sub(nn.Sequential):
    """A sequence with a rule of its own."""


@lf.register_bound(Sub)
def _(module: Sub, ask: lf.certificate.Ask) -> lf.certificate.Bound:
    return lf.certificate.times(*(ask.child(part, str(i)) for i, part in enumerate(module)))


def shared_chains() -> dict[str, nn.Module]:
    first, second = (lf.L2MultiheadAttention(4, 2, batch_first=True, max_len=4) for _ in range(2))
    with torch.no_grad():
        first.out_proj.weight.mul_(20)
        second.out_proj.weight.mul_(0.01)
    chain = nn.Sequential(nn.Linear(4, 4), first)
    return {
        "used again inside": lf.Contractive(nn.Sequential(first, lf.Residual(first)), norm="l2"),
        "beside a sequence of its own": lf.Contractive(nn.Sequential(Sub(first), second), norm="l2"),
        "shared": nn.Sequential(lf.Contractive(chain, 0.9), lf.Contractive(chain, 0.3), chain[0]),
    }


@pytest.mark.parametrize("name", shared_chains())
def test_a_chain_that_shares_its_attention(name: str) -> None:
    """Factors reach the attention at its place in the chain, and no other use of it."""
    module = shared_chains()[name].double().eval()
    x = torch.randn(1, 4, 4, dtype=torch.float64)
    jacobian = dense_jacobian(module, x)
    assert torch.linalg.matrix_norm(jacobian, 2) <= lf.certify(module).bound
    torch.testing.assert_close(lf.bake(module)(x), module(x))
