"""Sums over paths (docs/theory, section 4): above the truth, below the product, refused where unsafe."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

import lipformer as lf
from lipformer.certificate import paths
from lipformer.flows import InvertibleSequential
from lipformer.layers.branch import call_branch
from lipformer.layers.scaled import Scaled
from tests.oracles import dense_jacobian

D, HIDDEN = 6, 16


def norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach().double(), 2).item()


def act_norm(dim: int = D, spread: float = 0.7) -> lf.ActNorm:
    layer = lf.ActNorm(dim)
    with torch.no_grad():
        layer.log_scale.normal_(0.0, spread)
        layer.initialized.fill_(True)
    return layer


def stack(depth: int = 3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Attention and feed-forward blocks with ActNorm between them, and a readout."""
    blocks: list[nn.Module] = []
    for _ in range(depth):
        attention = lf.L2MultiheadAttention(
            D, 2, batch_first=True, value_proj=False, causal=True, positions="alibi"
        )
        branch = nn.Sequential(lf.TokenShift(D), attention)
        blocks += [lf.InvertibleResidual(branch, 0.9, mode="causal"), act_norm()]
        thought = lf.FeedForward(D, HIDDEN, None)
        blocks += [lf.InvertibleResidual(thought, 0.9, norm="l2"), act_norm()]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(D, 5)).to(dtype).eval()


def product(certificate: lf.certificate.Certificate) -> float:
    """What composition gives without paths."""
    if certificate.kind in ("Sequential", "InvertibleSequential"):
        return math.prod(product(part) for part in certificate.parts)
    return certificate.bound


def test_a_stack_is_attacked() -> None:
    model = stack(2)
    certificate = lf.certify(model)
    assert certificate.theorem == "sum over paths"
    assert certificate.bound < 0.8 * product(certificate)
    x = torch.randn(1, 5, D, dtype=torch.float64)
    assert lf.attack_lipschitz(model, x, steps=2, restarts=1).value <= certificate.bound
    for scale in (0.1, 10.0):
        assert norm(dense_jacobian(model, scale * x)) <= certificate.bound


@pytest.mark.parametrize("aligned", [True, False])
def test_linear_branches_have_an_exact_answer(aligned: bool) -> None:
    """With all branches along one direction the sum is the truth, and leaving out a path would show."""
    blocks, truth = [], torch.eye(D, dtype=torch.float64)
    for _ in range(4):
        linear = nn.Linear(D, D, dtype=torch.float64)
        if aligned:
            nn.init.eye_(linear.weight)
        block = lf.InvertibleResidual(linear, 0.9, norm="l2")
        truth = (torch.eye(D) + block.branch.scales() * linear.weight) @ truth
        blocks.append(block)
    certificate = lf.certify(InvertibleSequential(*blocks))
    assert norm(truth) <= certificate.bound * (1 + 1e-12)
    assert certificate.bound <= product(certificate) * (1 + 1e-9)
    if aligned:
        assert certificate.bound <= norm(truth) * (1 + 1e-6)
    else:
        assert certificate.bound < 0.9 * product(certificate)


@pytest.mark.parametrize("nothing", [nn.Identity(), nn.Dropout(0.5).eval()])
def test_what_does_nothing_is_passed_through(nothing: nn.Module) -> None:
    scale, last = act_norm(), nn.Linear(D, 3)
    expected = lf.certify(nn.Sequential(scale, last)).bound
    assert lf.certify(nn.Sequential(scale, nothing, last)).bound == expected
    assert expected < 0.99 * lf.certify(scale).bound * lf.certify(last).bound
    stopped = nn.Sequential(scale, nn.ReLU(), last)  # the negative control
    assert lf.certify(stopped).bound > expected


def test_the_sum_is_that_of_the_theory() -> None:
    first, second = (
        lf.InvertibleResidual(lf.FeedForward(D, HIDDEN, None).double(), 0.9, norm="l2") for _ in range(2)
    )
    scale, last = act_norm().double(), nn.Linear(D, 3).double()
    found = lf.certify(nn.Sequential(first, scale, second, last)).bound
    s = torch.diag(scale.log_scale.exp())
    (up1, down1), (up2, down2) = (
        (f.branch.module.up.weight, f.branch.scales() * f.branch.module.down.weight)
        for f in (first, second)
    )
    one = norm(up1)
    two = norm(up2 @ s) + norm(up2 @ s @ down1) * one
    w = last.weight
    expected = norm(w @ s) + norm(w @ s @ down1) * one + norm(w @ down2) * two
    # Norms of weights themselves are up to 0.8% above.
    assert expected <= found <= 1.02 * expected


def test_act_norm_joins_the_readout_and_padded_tokens_count() -> None:
    scale, linear = act_norm(), nn.Linear(D, 4)
    with torch.no_grad():
        scale.log_scale.copy_(torch.tensor([-3.0, -3.0, -3.0, -3.0, -3.0, 1.0]))
        linear.weight[:, -1] *= 0.1
    model = nn.Sequential(scale, linear).double()
    joined = norm(linear.weight @ torch.diag(scale.log_scale.exp()))
    assert joined < 0.5 * norm(linear.weight), "else padding would not matter"
    bound = lf.certify(model).bound
    assert norm(linear.weight) <= bound <= 1.01 * norm(linear.weight)

    # A mask passes padded tokens by the scale: there the readout acts alone.
    mask = torch.tensor([[False, True]])
    x = torch.zeros(1, 2, D, dtype=torch.float64)
    gain = norm(dense_jacobian(lambda x: call_branch(model, x, mask), x))
    assert joined < gain <= bound

    # A language model takes no mask.
    language = lf.models.invertible(5, dim=D, num_heads=2, num_layers=1).double().eval()
    language.body.trunk[-1], language.body.readout[0] = scale, linear
    language.remember_parts()
    alone = lf.certify(language.body).bound
    assert lf.certify(language).bound < alone


class Rectified(nn.Module):
    """Rules may count on constants of 1 that they do not name: their parts are no linear maps."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.relu(part(x))
        return x


@lf.register_bound(Rectified)
def _(module, ask):
    if len(module.parts) == 1:
        return ask.child(module.parts[0], "0")
    return ask.in_turn(
        [lambda ask, part=part, i=i: ask.child(part, str(i)) for i, part in enumerate(module.parts)]
    )


def test_what_is_not_linear_is_not_multiplied_out() -> None:
    """relu(x) + relu(-x) = |x|, of slope 1, though the product of the two matrices is 0."""
    split, join = nn.Linear(1, 2, bias=False).double(), nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        split.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        join.weight.fill_(1.0)
    assert lf.certify(nn.Sequential(split, join)).bound < 1e-9
    for model in (
        nn.Sequential(split, nn.ReLU(), join),
        nn.Sequential(Rectified(split), join),
        Rectified(split, join),
        nn.Sequential(split, lf.layers.Residual(nn.ReLU()), join),
    ):
        assert lf.certify(model).bound >= 1.0
        x = torch.ones(1, 1, dtype=torch.float64)
        around = lf.certify(model, at=x, radius=2.0).bound
        assert around >= abs(model(-x) - model(x)).item() / 2.0
        assert around >= 0.5


class Drops(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * (torch.rand_like(weight) < 0.5)


def test_a_weight_that_changes_is_known_by_its_norm_alone() -> None:
    first, last = nn.Linear(D, D), nn.Linear(D, D)
    parametrize.register_parametrization(first, "weight", Drops())
    lf.spectral_bound(first, mode="normalize")
    assert lf.certify(nn.Sequential(first, last)).bound >= norm(last.weight)


def test_products_that_lose_digits_and_range() -> None:
    """The error of a computed product is part of the bound: cancellation, underflow, overflow."""
    row, ones = [1e16, 1.0, -1e16], [1.0, 1.0, 1.0]
    exact = abs(sum(Fraction(a) * Fraction(b) for a, b in zip(row, ones, strict=True)))

    def chain(*weights: list[list[float]]) -> nn.Sequential:
        layers = []
        for weight in weights:
            matrix = torch.tensor(weight, dtype=torch.float64)
            layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=torch.float64)
            layer.weight = nn.Parameter(matrix)
            layers.append(layer)
        return nn.Sequential(*layers)

    assert exact == 1
    assert 1.0 <= lf.certify(chain([[v] for v in ones], [row])).bound < 1e3
    tiny, large = 2.0**-664, 2.0**500  # squares of the entries leave the range
    bound = lf.certify(chain([[v * large] for v in ones], [[v * tiny for v in row]])).bound
    assert tiny * large <= bound < 1e3 * tiny * large
    assert lf.certify(chain([[1e-200]], [[1e-200]], [[1e300]])).bound >= 1e-100
    assert 1e100 <= lf.certify(chain([[1e200]], [[1e200]], [[1e-300]])).bound <= 1.01e100
    assert lf.certify(chain([[0.0]], [[1e300]])).bound == 0.0


@pytest.mark.parametrize("wrap", [Scaled, lambda module, factor: lf.Contractive(module, float(factor))])
def test_factors_that_lose_range(wrap: Callable) -> None:
    """1e-200 twice and 1e300 are 1e-100, whatever underflows on the way."""
    ones = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(3)]
    for layer, weight in zip(ones, (1.0, 1.0, 1e300), strict=True):
        nn.init.constant_(layer.weight, weight)
    factor = torch.tensor(1e-200, dtype=torch.float64)
    model = nn.Sequential(wrap(ones[0], factor), wrap(ones[1], factor), ones[2])
    around = lf.certify(model, at=torch.ones(1, 2, 1, dtype=torch.float64), radius=1.0)
    for certificate in (lf.certify(model), around):
        assert 1e-100 <= certificate.bound <= 1.01e-100


def test_rounding_errors_do_not_grow_with_depth_and_width() -> None:
    """24 scales of 64 features are their product, not that with an error that grew by 8 at each."""
    scales = [act_norm(64, 0.05) for _ in range(24)]
    model = nn.Sequential(*scales, nn.Linear(64, 3)).double()
    product = torch.stack([scale.log_scale for scale in scales]).sum(0).exp()
    weight = model[-1].weight
    assert lf.certify(model).bound <= 1.001 * max(norm(weight * product), norm(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_effective_scales_count(dtype: torch.dtype) -> None:
    model = nn.Sequential(act_norm(), nn.Linear(D, 3)).to(dtype)
    scale, linear = model[0].log_scale.detach(), model[1].weight.detach().double()
    bound = lf.certify(model).bound
    for s in (scale.exp().double(), scale.double().exp()):
        assert norm(linear @ torch.diag(s)) <= bound


def test_baked_and_deep_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(3)
    bound = lf.certify(model).bound
    assert lf.certify(lf.bake(model)).bound == pytest.approx(bound, rel=0.02)
    monkeypatch.setattr(paths, "_MOST", 2)
    fewer = lf.certify(model)
    assert bound <= fewer.bound < product(fewer)


def test_a_divided_chain_keeps_its_coefficient() -> None:
    """In float64: 0.8 in float32 is above it, and other numbers are below."""
    attention = lf.L2MultiheadAttention(D, 2, batch_first=True, causal=True, positions="alibi")
    chain = nn.Sequential(nn.Linear(D, D), attention)
    assert lf.certify(lf.Contractive(chain, 0.8, norm="l2")).bound == 0.8
    other = lf.certify(lf.Contractive(chain, 0.8, norm="self")).bound
    assert other != torch.tensor(other, dtype=torch.float32).item()


def test_other_norms_are_products() -> None:
    model = stack(1)
    for name in ("token", "linf"):
        certificate = lf.certify(model, norm=name)
        assert certificate.bound == pytest.approx(product(certificate))


def test_around_an_input_paths_count_and_hold() -> None:
    """Steps of several sizes, in the directions that matter and others, stay below the certificate."""
    model, at = stack(2), torch.randn(2, 4, D, dtype=torch.float64)
    whole = lf.certify(model).bound
    previous = 0.0
    for radius in (0.01, 0.5):
        certificate = lf.certify(model, at=at, radius=radius)
        assert certificate.theorem == "sum over paths"
        assert previous <= certificate.bound <= whole
        assert certificate.bound < 0.9 * product(certificate)
        previous = certificate.bound
        for one in at:
            jacobian = dense_jacobian(model, one[None])
            top = torch.linalg.svd(jacobian).Vh[:2].reshape(2, 1, *one.shape)
            for direction in (*top, *torch.randn(2, 1, *one.shape, dtype=torch.float64)):
                for size in (1.0, 0.3, -1.0):
                    step = size * radius * direction / direction.norm()
                    moved = (model(one[None] + step) - model(one[None])).norm().item()
                    assert moved <= certificate.bound * radius
    each = [lf.certify(model, at=one[None], radius=radius).bound for one in at]
    assert max(each) == pytest.approx(certificate.bound, rel=1e-9), "each sample is by itself"
