"""What a reviewer once broke: each of these gave a certificate below the truth, or a wrong result."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import lipformer as lf


def norm(weight: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(weight.double(), 2).item()


def test_a_module_used_twice_counts_twice() -> None:
    linear = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    twice = nn.Sequential(linear, linear)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert lf.certify(twice).bound >= norm(linear.weight) ** 2
    torch.testing.assert_close(lf.Residual(twice)(x), x + twice(x))
    baked = lf.bake(nn.Sequential(shared := lf.SpectralLinear(4, 4).double(), shared))
    torch.testing.assert_close(baked(x), shared(shared(x)))
    assert baked[0] is baked[1]


@pytest.mark.parametrize("padded", [[0, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1]])
def test_gradients_with_few_valid_tokens(padded: list[int]) -> None:
    mask = torch.tensor([padded], dtype=torch.bool)
    y = torch.randn(1, 1, len(padded), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda z: lf.functional.l2_attention(z, is_causal=True, key_padding_mask=mask), y
    )


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


def test_a_freeze_leaves_other_modules_alone() -> None:
    frozen, other = lf.SpectralLinear(3, 3), lf.SpectralLinear(3, 3, mode="normalize")
    with lf.frozen(frozen), torch.no_grad():
        before = other.weight.clone()
        other.parametrizations.weight.original.copy_(torch.randn(3, 3))
        assert not torch.equal(other.weight, before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    modules = [
        lf.SpectralLinear(4, 4),
        lf.Contractive(nn.Linear(4, 4)),
        nn.PReLU(4),
        lf.L2MultiheadAttention(4, 2, value_proj=False, max_len=5),
    ]
    for module in modules:
        for name, parameter in module.named_parameters():
            broken = copy.deepcopy(module)
            with torch.no_grad():
                broken.get_parameter(name).view(-1)[0] = value
            with pytest.raises(lf.NotCertifiable, match=f"{name}.*not finite"):
                lf.certify(broken)
            assert parameter.isfinite().all()


def test_temperatures_out_of_range() -> None:
    layer = lf.L2MultiheadAttention(4, 2, value_proj=False, max_len=5)
    for value in (-250.0, 100.0):
        with torch.no_grad():
            layer.log_temperature.fill_(value)
        with pytest.raises(lf.NotCertifiable, match="temperatures leave the range"):
            lf.certify(layer)


def test_a_branch_that_broadcasts() -> None:
    x = torch.randn(2, 8)
    for wrapper in (lf.Residual, lf.ConvexResidual):
        with pytest.raises(ValueError, match=r"keep the shape \(2, 8\) of its input, got \(2, 1\)"):
            wrapper(nn.Linear(8, 1))(x)


def test_hooks_and_replaced_forwards() -> None:
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, given, out: 100 * out)
    with pytest.raises(lf.NotCertifiable, match="forward hook"):
        lf.certify(hooked)
    replaced = nn.Linear(2, 2)
    replaced.forward = lambda x: 100 * x
    with pytest.raises(lf.NotCertifiable, match="forward was replaced"):
        lf.certify(replaced)


def test_channels_that_become_tokens() -> None:
    attention = lf.L2MultiheadAttention(4, 1, batch_first=True, value_proj=False)
    with pytest.raises(lf.NotCertifiable, match="grows with the number of tokens"):
        lf.certify(nn.Sequential(nn.Conv1d(2, 97, 1), attention), seq_len=2)


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
        def forward(self, x: torch.Tensor) -> torch.Tensor:
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
    for coeff in (0.9, 0.77, 0.61):
        layer = lf.Contractive(nn.Identity(), coeff)
        assert layer(torch.ones(1, 1, dtype=torch.bfloat16)).item() <= coeff


def test_rms_norm_without_eps_and_softplus_with_a_low_threshold() -> None:
    assert lf.certify(nn.RMSNorm(4)).bound >= torch.finfo(torch.float64).eps ** -0.5
    with pytest.raises(lf.NotCertifiable, match="its bound is inf"):
        lf.certify(nn.Softplus(threshold=0.0))


def test_truth_values_that_are_not_bool() -> None:
    with pytest.raises(ValueError, match="causal must be True, False or None, got 1"):
        lf.L2MultiheadAttention(4, 2, causal=1)


def test_a_mask_beside_is_causal() -> None:
    x = torch.randn(1, 3, 4)
    hides = torch.zeros(3, 3, dtype=torch.bool)
    hides[2, 0] = True
    with pytest.raises(ValueError, match="neither empty nor the causal mask"):
        lf.L2MultiheadAttention(4, 2, batch_first=True)(x, attn_mask=hides, is_causal=True)
    free = lf.L2MultiheadAttention(4, 2, batch_first=True, any_mask=True, value_proj=True)
    weights = free(x, attn_mask=hides, is_causal=True)[1]
    assert weights[0, 2, 0] == 0
    assert (weights[0].triu(1) == 0).all()
