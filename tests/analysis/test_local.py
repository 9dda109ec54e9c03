"""Bounds at one input hold against Jacobians and ascent, and are below the published formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lipformer.analysis import AttentionMaps, attention_maps, jasmin_loss, local_bound
from lipformer.analysis.bounds import local
from tests.analysis.jacobians import gains, normal, one_head, random_groups, random_maps
from tests.functional.test_gain_attack import ascend


def random_mask(n: int) -> Tensor:
    return (torch.rand(n, n) < 0.5) | torch.eye(n, dtype=torch.bool)


def norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, ord=2)


def covariances(maps: AttentionMaps, x: Tensor) -> tuple[Tensor, Tensor]:
    """P and C_i of one head at one input, as the notes define them: (N, N) and (N, D, D)."""
    weights = maps.weights(x)[0]
    centred = x - (weights @ x)[:, None]
    return weights, torch.einsum("ij,ijd,ije->ide", weights, centred, centred)


def test_no_jacobian_passes_a_bound() -> None:
    cases, ratios = 0, []
    for k, (maps, n) in enumerate(random_groups(40)):
        mask = random_mask(n) if k % 5 == 0 else None
        x = normal(8, n, maps.logits.shape[-1])
        gain = gains(lambda y, maps=maps, mask=mask: maps(y, mask), x)
        sharp, jasmin = (local_bound(maps, x, mask, method=name) for name in ("sharp", "jasmin"))
        assert (gain <= sharp).all()
        assert (gain <= jasmin).all()
        cases += len(x)
        ratios.append(gain / torch.minimum(sharp, jasmin))
    assert cases >= 300
    assert float(torch.cat(ratios).median()) > 0.4, "the bounds have become loose"


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_no_ascent_of_the_ratio_passes_one(heads: int, causal: bool) -> None:
    maps = random_maps(heads, 2, 2, bias=True, causal=causal, scale=2.0)
    for method in ("sharp", "jasmin"):
        best, _ = ascend(
            normal(4, 3, 2),
            lambda z, method=method: gains(maps, z) / local_bound(maps, z, method=method),
            steps=20,
        )
        assert 0.3 < float(best.max()) <= 1.0


def test_below_the_published_formulas() -> None:
    for _ in range(10):
        maps, x = random_maps(1, 4, 3), normal(6, 4)
        weights, spread = covariances(maps, x)
        a, value, rows = norm(maps.logits[0]), norm(maps.values[0]), (x @ maps.logits[0]).norm(dim=-1)
        own = norm(maps.logits[0] @ spread).max()
        feedback = (weights * (rows.square() * norm(spread))[:, None]).sum(0).max().sqrt()
        sharp = value * (norm(weights) + own + feedback)
        assert local_bound(maps, x, method="sharp") <= sharp * (1 + 1e-6)
        softmax = norm(torch.diag_embed(weights) - weights[:, :, None] * weights[:, None]).max()
        top = weights.topk(2).values
        estimate = (top[:, 0] * (1 - top[:, 0] + top[:, 1])).max()
        assert softmax <= estimate * (1 + 1e-12)
        jasmin = value * (norm(weights) + 2 * norm(x).square() * a * estimate)
        assert local_bound(maps, x, method="jasmin") <= jasmin * (1 + 1e-6)


def test_equality_where_all_tokens_are_equal() -> None:
    for heads in (1, 3):
        maps = random_maps(heads, 4, 3, bias=True)
        x = normal(1, 4).expand(5, 4)
        gain = float(gains(maps, x[None]))
        for method in local.METHODS:
            # Jacobian P (x) sum_h W_h: the covariances are zero.
            assert local_bound(maps, x, method=method).item() == pytest.approx(
                gain, rel=1e-6 if heads == 1 or method != "jasmin" else 1.0
            )


def test_equality_of_second_and_third_term() -> None:
    """A gain of 2 a where the bound is 1 + 2 a: both terms are reached at once."""
    a = 1e7
    cross = torch.tensor([[[0.0, a], [a, 0.0]]], dtype=torch.float64)
    maps = AttentionMaps(cross, torch.eye(2, dtype=torch.float64)[None])
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    bound = local_bound(maps, x, method="sharp").item() - local._slack(maps, x).item()
    assert float(gains(maps, x[None])) == pytest.approx(bound, rel=1e-6)


def test_each_term_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the search above finds an input that passes each formula less a term."""
    maps, x = one_head(-1.0, 2), 2.0 * normal(64, 3, 2)
    gain = gains(maps, x)
    norms = norm(maps.values)
    mixing = local._mixing(maps.weights(x), maps.values, norms)
    rest = local._own_and_feedback(maps, x, maps.weights(x), norms)
    assert (gain <= mixing + rest).all()
    assert (gain > rest).any()
    assert (gain > mixing).any()
    assert (gain > mixing + rest / 2).any()
    monkeypatch.setattr(local, "_softmax_gain", lambda p: (p * (1 - p)).amax(-1) / 2)
    assert (gain > local_bound(maps, x, method="jasmin")).any()


def test_the_bias_and_the_mask_count() -> None:
    maps = random_maps(2, 3, 3, bias=True, scale=3.0)
    x, mask = normal(40, 4, 3), torch.eye(4, dtype=torch.bool)
    assert (gains(maps, x) > local_bound(maps, x, mask)).any()
    without = AttentionMaps(maps.logits, maps.values)
    assert (gains(maps, x) > local_bound(without, x)).any()


def test_batches_chunks_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    maps, x = random_maps(2, 3, 5, bias=True, causal=True), normal(2, 3, 6, 3)
    whole = local_bound(maps, x)
    assert whole.shape == (2, 3)
    torch.testing.assert_close(whole[1, 2], local_bound(maps, x[1, 2]))
    monkeypatch.setattr(local, "_CHUNK", 1)
    torch.testing.assert_close(local_bound(maps, x), whole, rtol=1e-7, atol=0)
    single = local_bound(maps, x.float())
    assert single.dtype == torch.float32
    assert (single.double() >= local_bound(maps, x.float().double())).all()
    assert local_bound(maps, x.bfloat16()).dtype == torch.float32
    assert torch.equal(local_bound(maps, x.requires_grad_()).detach(), local_bound(maps, x.detach()))


def test_one_token() -> None:
    maps = random_maps(2, 3, 3)
    x = normal(1, 3).requires_grad_()
    bound = local_bound(maps, x)
    bound.backward()
    gain = float(norm(maps.values.sum(0)))
    assert gain <= bound.item()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert jasmin_loss(maps, x).isfinite()


@pytest.mark.parametrize("method", ["sharp", "jasmin"])
def test_gradients(method: str) -> None:
    logits, values, offset = normal(2, 2, 2), normal(2, 2, 3), normal(2, 2)
    x = normal(3, 2)

    def bound(x: Tensor, logits: Tensor, values: Tensor, offset: Tensor) -> Tensor:
        return local_bound(AttentionMaps(logits, values, offset, causal=True), x, method=method)

    inputs = [part.requires_grad_() for part in (x, logits, values, offset)]
    assert torch.autograd.gradcheck(bound, inputs, eps=1e-6, atol=1e-4, rtol=1e-4)


def test_gradients_of_the_loss() -> None:
    def loss(x: Tensor, logits: Tensor) -> Tensor:
        return jasmin_loss(AttentionMaps(logits, torch.ones(2, 2, 1, dtype=x.dtype)), x)

    inputs = [normal(2, 4, 2).requires_grad_(), normal(2, 2, 2).requires_grad_()]
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_the_loss_lowers_the_gain() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.mul_(3.0)
    x = torch.randn(4, 6, 8)
    first = gains(attention_maps(layer), x.double()).mean().item()
    optimiser = torch.optim.Adam([layer.in_proj_weight], lr=1e-2)
    start = jasmin_loss(layer, x).mean().item()
    for _ in range(30):
        optimiser.zero_grad()
        jasmin_loss(layer, x).mean().backward()
        optimiser.step()
    assert jasmin_loss(layer, x).mean().item() < start - 0.3
    assert gains(attention_maps(layer), x.double()).mean().item() < 0.9 * first
