"""Gradient ascent in float64 that tries to pass the bounds of l2_gain, and cannot.

Every bound is attacked through the dense Jacobian of Z -> P(Z) Z. The sums inside the proofs are
attacked too: they are tight, so that a wrong step would show there first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lipformer.functional.gain import weighted as _gain_column
from lipformer.functional.gain.lambertw import lambert_w0
from lipformer.functional.gain.minimum import l2_gain
from lipformer.functional.gain.pointwise import alibi_column, pointwise
from lipformer.functional.gain.rows import log_mass
from tests.oracles import dense_jacobian, gains, l2_attention_oracle

SHAPES = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (6, 2), (9, 1), (12, 4), (16, 2), (24, 2)]
STARTS = 10


def attention_weights(z: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """P (*, N, N) and the row sums D (*, N) relative to the own key, for z (*, N, d)."""
    kernel = (b - (z[..., :, None, :] - z[..., None, :, :]).square().sum(-1)).exp()
    sums = kernel.sum(-1)
    return kernel / sums[..., None], sums


def jacobian_blocks(z: Tensor, b: Tensor) -> Tensor:
    """(*, N, N, d, d): J_ij = P_ij (I + 2 (z_j - g_i)(z_i - z_j)^T), and 2 C_i on the diagonal."""
    p, _ = attention_weights(z, b)
    n, d = z.shape[-2:]
    centred = z[..., None, :, :] - (p @ z)[..., :, None, :]
    offset = z[..., :, None, :] - z[..., None, :, :]
    blocks = torch.eye(d, dtype=z.dtype) + 2 * centred[..., :, None] * offset[..., None, :]
    spread = torch.einsum("...ij,...ija,...ijb->...iab", p, centred, centred)
    own = torch.eye(n, dtype=z.dtype)[:, :, None, None]
    return p[..., None, None] * blocks + own * 2 * spread[..., :, None, :, :]


def l2_norm(blocks: Tensor) -> Tensor:
    """The spectral norm (*) through its singular vectors, which makes the gradient cheap."""
    n, d = blocks.shape[-4], blocks.shape[-1]
    matrix = blocks.transpose(-3, -2).reshape(*blocks.shape[:-4], n * d, n * d)
    left, _, right = torch.linalg.svd(matrix.detach())
    return torch.einsum("...i,...ij,...j->...", left[..., :, 0], matrix, right[..., 0, :])


def token_norm(blocks: Tensor) -> Tensor:
    """max_i sum_j |J_ij^T a| (*) at a unit a found by fixed-point rounds: a lower bound."""
    fixed = blocks.detach()
    squares = torch.einsum("...ijab,...ijcb->...iac", fixed, fixed)
    a = torch.linalg.eigh(squares).eigenvectors[..., -1]  # (*, N, d), one a for each row
    for _ in range(6):
        pulled = torch.einsum("...ijab,...ia->...ijb", fixed, a)
        unit = pulled / pulled.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        a = torch.einsum("...ijab,...ijb->...ia", fixed, unit)
        a = a / a.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    pulled = torch.einsum("...ijab,...ia->...ijb", blocks, a)
    return (pulled.square().sum(-1) + 1e-24).sqrt().sum(-1).amax(-1) - 1e-12 * blocks.shape[-3]


def self_norm(blocks: Tensor) -> Tensor:
    """max_i ||J_ii|| (*)."""
    own = blocks.diagonal(dim1=-4, dim2=-3).movedim(-1, -3)
    top = torch.linalg.eigh(own.detach()).eigenvectors[..., -1]
    return torch.einsum("...a,...ab,...b->...", top, own, top).amax(-1)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": l2_norm,
    "token": token_norm,
    "self": self_norm,
}


def compose(norm: Callable[[Tensor], Tensor], b: Tensor) -> Callable[[Tensor], Tensor]:
    """z -> the norm of the Jacobian at z under the bias b."""
    return lambda z: norm(jacobian_blocks(z, b))


def starting_tokens(n: int, d: int, count: int) -> Tensor:
    """(count, n, d): random, clustered, star and line starts at scales from 0.01 to 1000."""
    scales = [0.3, 1.0, 1.5, 2.5, 0.8, 1.2, 1.8, 1e-2, 30.0, 1e3]
    starts = []
    for k in range(count):
        noise = torch.randn(n, d).double()
        if k % 4 == 0:
            z = noise
        elif k % 4 == 1:  # two clusters, every token near one of two points
            z = torch.randn(2, d).double()[torch.randint(0, 2, (n,))] + 0.05 * noise
        elif k % 4 == 2:  # a star: one hub, or many copies of it, and directions from it
            z = noise / noise.norm(dim=-1, keepdim=True)
            z[: 1 + (k % 3) * n // 4] *= 0.05
        else:  # a line: half at +1, half at -1, the query at 0; this is Theorem E's extreme case
            z = 0.02 * noise
            z[:, 0] += torch.arange(n) % 2 * 2.0 - 1
            z[-1] = 0.0
        starts.append(z * scales[k % len(scales)])
    return torch.stack(starts)


def ascend(z: Tensor, objective: Callable[[Tensor], Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Adam on the logarithm of each start's objective; the best value and input of each start."""
    z = z.clone().requires_grad_()
    optimiser = torch.optim.Adam([z], lr=0.05)
    best, where = torch.zeros(len(z), dtype=z.dtype), z.detach().clone()
    for _ in range(steps):
        optimiser.zero_grad()
        value = objective(z)
        better = value.detach() > best
        best = torch.where(better, value.detach(), best)
        where = torch.where(better[:, None, None], z.detach(), where)
        (-value.clamp_min(1e-9).log().sum()).backward()
        assert z.grad is not None
        z.grad.nan_to_num_(0.0, 0.0, 0.0)  # a start with equal eigenvalues has no gradient
        optimiser.step()
    return best, where


def distances(n: int) -> Tensor:
    position = torch.arange(n, dtype=torch.float64)
    return position[:, None] - position[None, :]


def alibi(n: int, slope: float = 0.0, window: int | None = None) -> Tensor:
    distance = distances(n)
    hidden = (distance < 0) | (distance >= (window or n))
    return (-slope * distance).masked_fill(hidden, -math.inf)


def masks(n: int) -> dict[str, tuple[Tensor, dict[str, object]]]:
    """Name -> the bias (n, n) that the attack uses, and the options that l2_gain gets."""
    hidden = (torch.rand(n, n) < 0.4) & ~torch.eye(n, dtype=torch.bool)
    mask = torch.zeros(n, n).double().masked_fill(hidden, -math.inf)
    bias = 1.5 * torch.randn(n, n).double()
    return {
        "none": (torch.zeros(n, n).double(), {}),
        "causal": (alibi(n), {"is_causal": True}),
        "window": (alibi(n, window=3), {"is_causal": True, "window": 3}),
        "slope 1": (alibi(n, 1.0), {"is_causal": True, "slope": 1.0}),
        "slope 1/4": (alibi(n, 0.25), {"is_causal": True, "slope": 0.25}),
        "mask": (mask, {"bias": mask}),
        "any mask": (mask, {"theorem": "C+"}),
        "bias": (bias - bias.diagonal()[:, None], {"bias": bias}),
        "causal bias": (
            bias - bias.diagonal()[:, None] + alibi(n, 0.25),
            {"bias": bias, "is_causal": True, "slope": 0.25},
        ),
    }


def test_jacobian_of_the_attack_is_the_true_one() -> None:
    z = torch.randn(5, 3).double()
    bias = torch.randn(5, 5).double().fill_diagonal_(0)
    blocks = jacobian_blocks(z, bias)
    dense = dense_jacobian(lambda y: l2_attention_oracle(y[None], bias=bias, scale=1.0)[0], z)
    assert torch.allclose(blocks.transpose(1, 2).reshape(15, 15), dense, atol=1e-12)
    expected = gains(dense, 5, 3)
    assert l2_norm(blocks).item() == pytest.approx(expected["l2"], rel=1e-12)
    assert self_norm(blocks).item() == pytest.approx(expected["self"], rel=1e-12)
    assert 0.9 * expected["token"] <= token_norm(blocks).item() <= expected["token"] * (1 + 1e-9)


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_no_attack_passes_a_bound(n: int, d: int) -> None:
    cases = masks(n)
    z = torch.cat([starting_tokens(n, d, STARTS) for _ in cases])
    b = torch.cat([bias.expand(STARTS, n, n) for bias, _ in cases.values()])
    for norm, value in NORMS.items():
        best, _ = ascend(z, compose(value, b), 45 if norm == "l2" else 20)
        reached = best.reshape(len(cases), STARTS).amax(1).tolist()
        for (name, (_, options)), top in zip(cases.items(), reached, strict=True):
            options = {k: v for k, v in options.items() if k != "theorem" or norm == "l2"}
            bound = l2_gain(n, norm=norm, **options)  # type: ignore[arg-type]
            assert top <= bound, f"{norm}, {name}: reached {top}, bound {bound}"
            assert top >= 0.99  # the attack is alive: far tokens alone give P = I, gain 1


@pytest.mark.parametrize("n", [3, 5, 9, 17, 65])
def test_tokens_on_a_line_reach_theorems_d_and_e(n: int) -> None:
    t = lambert_w0((n - 1) * math.exp(-1.5)) + 1.5
    z = torch.zeros(n, 1).double()
    z[: n - 1, 0] = math.sqrt(t) * (torch.arange(n - 1) % 2 * 2.0 - 1)
    for bias, options in [(torch.zeros(n, n).double(), {}), (alibi(n), {"is_causal": True})]:
        row = jacobian_blocks(z, bias)[-1, :, 0, 0]
        for norm, reached in [("self", row[-1].item()), ("token", row.abs().sum().item())]:
            bound = l2_gain(n, norm=norm, **options)  # type: ignore[arg-type]
            assert bound * (1 - 1e-6) <= reached <= bound


@pytest.mark.parametrize("norm", ["self", "token", "l2"])
def test_attack_breaks_a_bound_that_is_too_small(norm: str) -> None:
    # Negative control: 0.9 times the exact gain (for l2: times Theorem E's lower bound of it).
    n = 9
    exact = l2_gain(n, norm="token" if norm == "token" else "self")
    b = torch.zeros(n, n).double()
    best, where = ascend(starting_tokens(n, 2, 12), compose(NORMS[norm], b), 150)
    assert best.max() > 0.9 * exact
    witness = jacobian_blocks(where[best.argmax()], b)  # and an independent measure agrees
    dense = witness.transpose(1, 2).reshape(2 * n, 2 * n)
    assert gains(dense, n, 2)[norm] > 0.9 * exact


def column_sums(z: Tensor, b: Tensor, x: float, log_b: float, own: bool) -> Tensor:
    """max_j sum_i theta_i P_ij (1 + (4/x) s_ij^2), docs/theory A+ step 2, for each start."""
    p, sums = attention_weights(z, b)
    excess = (sums - 1).clamp_min(1e-30)
    spread = excess / sums * (log_b - excess.log())
    theta = (1.0 if own else 1 - 1 / sums) + x * spread
    weights = theta[..., None] * p
    if not own:
        weights = weights * (1 - torch.eye(z.shape[-2], dtype=z.dtype))
    offset = z[..., :, None, :] - z[..., None, :, :]
    moments = torch.einsum("rij,rija,rijb->rjab", weights, offset, offset)
    top = torch.linalg.eigh(moments.detach()).eigenvectors[..., -1]
    along = torch.einsum("rja,rjab,rjb->rj", top, moments, top)
    return (weights.sum(-2) + 4 / x * along).amax(-1)


@pytest.mark.parametrize("x", [1.2, 2.5])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (3, 3), (5, 5), (12, 8)])
def test_no_attack_passes_the_column_sums_of_the_proofs(
    n: int, d: int, x: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gain_column, "best_x", lambda objective: x)
    largest = 0.0
    for slope, is_causal in [(0.0, False), (0.0, True), (0.5, True), (1 / 16, True)]:
        log_b = log_mass(n, slope)
        b = alibi(n, slope) if is_causal else torch.zeros(n, n).double()
        q = pointwise(x, log_b)
        by_entry = alibi_column(q, n, slope) if slope else (n - 1) * q.entry(0.0)
        for own in (True, False):
            rows = n if own else n - 1
            if is_causal:
                bound = _gain_column.causal_column(rows, slope, log_b, own)
            else:
                bound = _gain_column.unmasked_column(rows, log_b, own)
            sums = functools.partial(column_sums, b=b, x=x, log_b=log_b, own=own)
            best, _ = ascend(starting_tokens(n, d, 7), sums, 60)
            reached = best.max().item()
            assert reached <= bound
            largest = max(largest, reached / bound)
            if not own:
                assert reached <= by_entry
                largest = max(largest, reached / by_entry)
    assert largest > 0.75  # the sums are nearly tight, so the attack would notice a wrong bound
