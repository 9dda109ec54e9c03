"""The oracle itself: in float64 it is the module, in low precision it is near the module's own run."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.models.self_attention import DotProductSelfAttention
from tests.promises import checks, oracle, trees
from tests.promises.draw import draw

LOW = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_in_float64_the_effective_function_is_the_module(seed: int) -> None:
    checked = 0
    for case in map(draw, range(seed, seed + 20)):
        with contextlib.suppress(*checks.REFUSALS, IndexError), checks.inside(case):
            module = trees.build(case.tree, "float64")
            x = checks.structured(case)
            with torch.no_grad():
                plain = oracle.call(module, x)
            fn = oracle.Effective(module, torch.float64)
            for _ in range(2):  # recorded, and run again
                torch.testing.assert_close(fn(x), plain, rtol=1e-9, atol=1e-9 * float(plain.abs().max()))
            assert fn.claim == plain.dtype
            checked += 1
    assert checked >= 10


def layers() -> dict[str, nn.Module]:
    attention = lf.L2MultiheadAttention(4, 2, batch_first=True, causal=True, positions="alibi")
    return {
        "linear": nn.Linear(4, 6),
        "spectral linear": lf.SpectralLinear(4, 4, coeff=0.7, mode="normalize"),
        "attention": lf.L2MultiheadAttention(4, 2, batch_first=True),
        "paper's form": lf.L2MultiheadAttention(4, 2, batch_first=True, value_proj=True, proj_coeff=1.0),
        "alibi": attention,
        "rotary": lf.L2MultiheadAttention(4, 2, batch_first=True, positions="rotary"),
        "contractive": lf.Contractive(nn.Sequential(nn.Linear(4, 4), nn.GELU(), lf.MaxMin()), norm="l2"),
        "contractive attention": lf.Contractive(
            lf.L2MultiheadAttention(4, 2, batch_first=True), seq_len=5
        ),
        "norms": nn.Sequential(
            nn.LayerNorm(4), nn.RMSNorm(4, eps=1e-3), lf.CenterNorm(4), lf.BallProjection(1.0)
        ),
        "shift": lf.ConvexResidual(lf.TokenShift(4)),
        "convolution": nn.Sequential(
            lf.spectral_bound(nn.Conv1d(5, 5, 3, padding=1)), nn.BatchNorm1d(5)
        ),
        "dot product": lf.Residual(DotProductSelfAttention(4, 2, logit_coeff=1.0)),
        "torch's attention": nn.MultiheadAttention(4, 2, batch_first=True),
    }  # fmt: skip


@pytest.mark.parametrize("name", layers())
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [*((dtype, None) for dtype in LOW), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_in_low_precision_it_is_near_the_modules_own_run(
    name: str, dtype: str, autocast: str | None
) -> None:
    torch.manual_seed(1)
    module = layers()[name].eval().requires_grad_(False).to(getattr(torch, dtype))
    x = torch.randint(-8, 9, (3, 5, 4)) / 4.0  # exact in every dtype
    enabled = autocast is not None
    with torch.autocast("cpu", dtype=getattr(torch, autocast or "bfloat16"), enabled=enabled):
        own = oracle.call(module, x.to(getattr(torch, dtype)))
        fn = oracle.Effective(module, getattr(torch, dtype))
        exact = fn(x.double())
    unit = max(LOW[dtype], LOW[autocast] if enabled else 0.0)
    assert fn.claim == own.dtype
    torch.testing.assert_close(
        exact, own.double(), rtol=0.0, atol=24 * unit * float(exact.abs().max() + 1)
    )


def test_weights_are_rounded_as_the_module_rounds_them_and_activations_are_not() -> None:
    linear = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(linear.weight, 1.0)
    x = torch.full((1, 1), 1.0 + 2.0**-30, dtype=torch.float64)
    assert oracle.Effective(linear, torch.bfloat16)(x).item() == 1.0 + 2.0**-30
    third = nn.Linear(1, 1, bias=False)
    nn.init.constant_(third.weight, 1.0 / 3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = oracle.Effective(third, torch.float32)(torch.ones(1, 1)).item()
    assert out == torch.tensor(1.0 / 3.0).bfloat16().item()


def test_the_gains_are_those_of_known_matrices() -> None:
    weight = torch.tensor([[1.0, 2.0], [0.0, -3.0]], dtype=torch.float64)
    jacobian = torch.block_diag(weight, weight)[None]
    norm = torch.linalg.matrix_norm(weight, 2).item()
    for name, value in {"l2": norm, "token": norm, "self": norm, "linf": 3.0}.items():
        assert oracle.gain(jacobian, name, 2, 2).item() == pytest.approx(value, rel=1e-6)
    mixed = torch.cat([weight, weight], 1)[None]  # two tokens to one
    assert oracle.gain(mixed, "token", 2, 2).item() == pytest.approx(2 * norm, rel=1e-6)
    assert oracle.gain(mixed, "self", 2, 2) is None
