"""The battery for L2MultiheadAttention, in every form that it has."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.functional import row_spread
from lipformer.layers.attention.bound import effective_weights, linf_bound_lean
from tests.layers.battery import (
    CertifiedLayer,
    dense_jacobians,
    error,
    largest_gain,
    slow_compile,
    starting_inputs,
)

EVERY_NORM = (("l2", "plain"), ("token", "plain"), ("linf", "plain"))


class AttentionBattery(CertifiedLayer):
    """Calls with padding, causal and other masks; inputs that one head does not see."""

    norms = ("l2", "token", "linf")
    variants = ("plain", "padded")
    options: ClassVar[dict[str, Any]] = {"value_proj": True}

    def make(self) -> nn.Module:
        return lf.L2MultiheadAttention(8, 2, batch_first=True, **self.options)

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        masks: dict[str, Any] = {}
        n = x.shape[1]
        if "padded" in variant:
            masks["key_padding_mask"] = torch.arange(n).eq(1).expand(x.shape[:2])
        if "causal" in variant:
            masks["is_causal"] = True
        if "hidden" in variant:
            hidden = torch.rand(n, n, generator=torch.Generator().manual_seed(3)) < 0.6
            masks["attn_mask"] = hidden & ~torch.eye(n, dtype=torch.bool)
        if "lowered" in variant:
            place = torch.arange(n, dtype=x.dtype)
            masks["attn_mask"] = -0.3 * (place[:, None] - place).abs()
        return module(x, need_weights=False, **masks)[0]

    def starts(self, module: nn.Module) -> Tensor:
        """Also tokens that differ by 1 where head 0 looks and by 1000 where it does not."""
        n, d = self.tokens
        noise = torch.randn(n, d, dtype=torch.float64)
        head = module.q_proj.weight.detach().double()[: module.head_dim]
        seen = torch.linalg.qr(head.T).Q
        inside = noise @ seen @ seen.T
        unseen = inside + 1e3 * (noise - inside)
        return torch.cat([starting_inputs(n, d), unseen[None]])


class TestPaper(AttentionBattery):
    variants = ("plain", "padded", "causal", "padded causal")
    attacked = (*EVERY_NORM, ("l2", "causal"))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # as inductor is imported
    def test_inductor(self) -> None:
        module, x = self.made(), self.inputs()
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: self.call(module, x), fullgraph=True)
        assert error(compiled(x), self.call(module, x)) <= 1e-5


class TestPaperCausal(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": True, "causal": True, "bias": False}
    norms = ("l2", "token", "linf", "self")
    attacked = (("l2", "plain"),)
    test_compile = slow_compile


class TestPaperUnmasked(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": True, "causal": False}
    test_compile = slow_compile


class TestLean(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": False}
    variants = ("plain", "padded", "causal", "padded causal")
    attacked = (*EVERY_NORM, ("l2", "causal"))
    test_compile = slow_compile


class TestWindow(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": False, "causal": True, "window": 3}
    norms = ("l2", "token", "linf", "self")


class TestAlibi(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": False, "causal": True, "positions": "alibi"}
    norms = ("l2", "token", "linf", "self")
    attacked = (("l2", "plain"), ("self", "plain"))


class TestRotary(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": True, "positions": "rotary", "causal": True}
    norms = ("l2", "token", "self")
    attacked = (("token", "plain"),)
    test_compile = slow_compile


class TestAnyMask(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": False, "any_mask": True}
    variants = ("plain", "padded", "causal", "hidden", "lowered", "padded hidden")
    attacked = (("l2", "hidden"), ("token", "lowered"))
    test_compile = slow_compile


class TestNormalisedProjections(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"value_proj": True, "proj_coeff": 0.7, "causal": True}
    norms = ("l2", "token", "linf", "self")
    test_compile = slow_compile


class TestKeyRadius(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {"key_radius": 1.0, "any_mask": True}
    norms = ("l2", "token")
    variants = ("plain", "padded", "causal", "padded causal", "hidden", "lowered")
    attacked = (("l2", "plain"), ("token", "plain"), ("l2", "hidden"))
    test_compile = slow_compile


class TestSmoothKeyRadius(AttentionBattery):
    options: ClassVar[dict[str, Any]] = {
        "key_radius": 1.0, "smooth_radius": True, "causal": True, "positions": "alibi",
        "proj_coeff": 1.0,
    }  # fmt: skip
    norms = ("l2", "token", "self")
    attacked = (("l2", "plain"), ("self", "plain"))


@pytest.mark.parametrize("seed", range(3))
def test_heads_of_very_different_size(seed: int) -> None:
    """One head reads or writes a hundred times more than another: the smallest way of writing wins."""
    torch.manual_seed(seed)
    heads, width, n = 3, 1 + seed % 3, 5
    layer = lf.L2MultiheadAttention(
        heads * width,
        heads,
        batch_first=True,
        value_proj=seed % 2 == 0,
        causal=True,
        dtype=torch.float64,
    )
    with torch.no_grad():
        layer.q_proj.weight.normal_()
        reads, writes = (10 ** torch.randn(heads).repeat_interleave(width) for _ in range(2))
        layer.q_proj.weight.mul_(reads[:, None])
        layer.out_proj.weight.mul_(writes)
    contractive = lf.Contractive(layer, 0.9, norm="l2", seq_len=n)
    x = torch.randn(1, n, heads * width, dtype=torch.float64)
    attack = lf.attack_lipschitz(lambda x: layer(x, need_weights=False)[0], x, steps=4, restarts=4)
    for norm in ("l2", "token", "self"):
        for module, options in ((layer, {"need_weights": False}), (contractive, {})):
            found = lf.estimate_lipschitz(partial(module, **options), attack.input, norm=norm).value
            assert found <= lf.certify(module, seq_len=n, norm=norm).bound * (1 + 1e-9), norm


def test_a_forward_pass_bounds_each_projection_once() -> None:
    """Each look at a bounded weight costs some ten milliseconds at full size."""
    layer = lf.L2MultiheadAttention(8, 2, value_proj=False, proj_coeff=1.0)
    looks = []

    def counted(weight: Tensor) -> Tensor:
        looks.append(weight)
        return lf.functional.spectral_norm_bound(weight)

    for projection in (layer.q_proj, layer.out_proj):
        projection.get_submodule("parametrizations.weight.0").measure = counted
    layer(torch.randn(3, 2, 8), need_weights=False)
    assert len(looks) == 2


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_linf_bound_through_the_token_norm(heads: int, orthogonal: bool) -> None:
    """Smaller than the published argument, and not passed: a tenth of it would be."""
    layer = lf.L2MultiheadAttention(8, heads, batch_first=True, max_len=5, value_proj=False).double()
    if orthogonal:
        nn.init.orthogonal_(layer.q_proj.weight)
        nn.init.orthogonal_(layer.out_proj.weight)
    bound = lf.certify(layer, norm="linf").bound
    q, m = effective_weights(layer)
    assert bound < 0.75 * linf_bound_lean(q, m, torch.full((heads,), row_spread(5)).double()).item()
    x = starting_inputs(5, 8)
    found = dense_jacobians(layer(x.requires_grad_(), need_weights=False)[0], x)
    attack = lf.attack_lipschitz(lambda x: layer(x)[0], x[1:2].detach(), norm="linf", steps=20)
    assert 0.1 * bound < max(attack.value, largest_gain(found, "linf", 5)) <= bound
