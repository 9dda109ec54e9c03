"""Every variant: shapes, causality, size, certificate against attack, inversion, learning, copies."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from typing import Any

import pytest
import torch
from scipy.special import lambertw  # type: ignore[import-untyped]
from torch import nn

import lipformer as lf
from lipformer.flows import ActNorm, NotConverged
from lipformer.models import VARIANTS, LanguageModel
from tests.models.variants import CASES, CERTIFIED, build, fit, tokens

V, D = 11, 16
RARE = ("l2 sinusoidal", "l2 rotary", "l2 paper", "contractive l2 pre")


@pytest.mark.parametrize("case", CASES)
def test_logits_have_one_row_for_each_token(case: str) -> None:
    model, x = build(case), tokens(3, 13)
    assert model(x).shape == (3, 13, V)
    assert model.embed(x).shape == model.hidden(model.embed(x)).shape == (3, 13, D)
    # Norms of all layers at once or one by one: a factor may have another last digit.
    torch.testing.assert_close(model(x), model.body(model.embed(x)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_later_token_changes_nothing_earlier(case: str) -> None:
    model, x = build(case).double().eval(), tokens(2, 12)
    y = x.clone()
    y[:, 7] = (y[:, 7] + 1) % V
    with torch.no_grad():
        a, b = model(x), model(y)
    assert (a[:, :7] - b[:, :7]).abs().max() <= 1e-12
    assert (a[:, 7] - b[:, 7]).abs().max() > 1e-6
    assert (a[:, 8:] - b[:, 8:]).abs().max() > 1e-9  # earlier tokens are seen, not only the own one


@pytest.mark.parametrize("case", CASES)
def test_order_matters(case: str) -> None:
    model = build(case, positions=CASES[case].get("positions", "alibi")).double().eval()
    x = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    with torch.no_grad():
        logits = model(x)
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 1e-9


def test_without_positions_the_last_of_one_layer_sees_a_set() -> None:
    """The negative control of the test above."""
    model = build("l2", positions=None, token_shift=False, num_layers=1).double().eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]))
    assert (logits[0, -1] - logits[1, -1]).abs().max() <= 1e-12


def test_no_variant_has_more_parameters_than_the_baseline() -> None:
    sizes = {
        name: sum(p.numel() for p in make(50, dim=64).parameters()) for name, make in VARIANTS.items()
    }
    assert sizes["l2"] < 0.86 * sizes["dot_product"]
    for name in ("contractive", "lipschitz", "invertible"):
        assert sizes[name] <= sizes["l2"]
    assert sizes["l2_untied"] - sizes["dot_product"] == 3 * 4  # one temperature per head


@pytest.mark.parametrize(
    "case",
    # The defaults and what they do not cover; the other forms are attacked among the slow tests.
    [pytest.param(case, marks=[pytest.mark.slow] if case in RARE else []) for case in CERTIFIED],
)
def test_no_attack_exceeds_the_certificate(case: str) -> None:
    model = build(case)
    fit(model, 5, lr=3e-2)
    model.double().requires_grad_(False)
    x = model.embed(tokens(1, 6))
    with lf.frozen(model):
        found = lf.attack_lipschitz(model.body, x, steps=6, restarts=1)
    certificate = lf.certify(model, seq_len=6)
    assert 0.0 < found.value <= certificate.bound
    assert certificate.bound <= (1 + 1e-12) * lf.certify(model.body, seq_len=6).bound


@pytest.mark.parametrize("case", [name for name in CASES if name not in CERTIFIED])
def test_no_certificate_without_a_bound(case: str) -> None:
    with pytest.raises(lf.NotCertifiable, match="L2MultiheadAttention") as refusal:
        lf.certify(build(case), seq_len=8)
    assert "body.trunk.0" in str(refusal.value)


def test_the_lipschitz_model_has_one_number_at_any_length() -> None:
    model = build("lipschitz", head_coeff=4.0)
    fit(model, 10, lr=3e-2)
    certificate = lf.certify(model)
    assert certificate.bound <= 4.0 * (1.0 + 1e-12)
    assert certificate.seq_len is None
    assert lf.certify(model, norm="l2", seq_len=100_000).bound <= 4.0 * (1.0 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_embedded_symbols_have_one_length_in_any_dtype(dtype: torch.dtype) -> None:
    """In float16 a row of zeros became NaN, and a long one zero."""
    model = build("lipschitz gathered").eval()
    with torch.no_grad():
        model.embedding.weight[0] = 0.0
        model.embedding.weight[1] = 6e4
    model = model.to(dtype)
    lengths = model.embed(torch.arange(4)[None]).double().norm(dim=-1)[0]
    assert lengths.tolist() == pytest.approx([0.0, 4.0, 4.0, 4.0], rel=torch.finfo(dtype).eps)
    assert bool(torch.isfinite(model(torch.arange(4)[None])).all())


def test_a_gathering_model_has_one_number_in_the_token_norm() -> None:
    model = build("lipschitz gathered", head_coeff=2)  # a whole number is a number
    fit(model, 10, lr=3e-2)
    certificate = lf.certify(model, norm="token")
    assert certificate.seq_len is None
    assert certificate.bound <= 2.0 * (1.0 + 1e-12)
    x = model.embed(tokens(1, 9)).detach()
    torch.testing.assert_close(x.norm(dim=-1), torch.full((1, 9), math.sqrt(D)))
    with lf.frozen(model):
        found = lf.attack_lipschitz(model.body, x, norm="token", steps=6, restarts=1)
    assert 0.2 < found.value <= certificate.bound


@pytest.mark.parametrize("case", ["contractive", "contractive l2 pre", "contractive kim2021"])
def test_contractive_attention_keeps_its_coefficient(case: str) -> None:
    model = build(case)
    fit(model, 10, lr=3e-2)
    layers = [part for part in model.modules() if isinstance(part, lf.Contractive)]
    assert len(layers) == 2
    for layer in layers:
        bound = lf.certify(layer, norm=model.config.norm or "").bound
        assert bound <= (model.config.coeff or 0.0) * (1.0 + 1e-12)


def test_the_paper_s_scaling_is_the_published_one() -> None:
    """Kim et al. 2021, Theorem 3.2, written out: (4 m + 1/sqrt d) times five norms, m = W0((N-1)/e)."""
    model = build("contractive kim2021", positions="sinusoidal").double()
    layer = next(part for part in model.modules() if isinstance(part, lf.Contractive))
    inner = layer.module
    assert isinstance(inner, lf.L2MultiheadAttention)
    assert inner.v_proj is not None
    m = lambertw(23 / math.e).real

    def rows(weight: torch.Tensor) -> float:
        return weight.abs().sum(1).max().item()

    q = inner.q_proj.weight.chunk(2)
    pair = max(rows(w) * rows(w.mT) for w in q)
    values = max(rows(w) for w in inner.v_proj.weight.chunk(2))
    bound = (4.0 * m + 8**-0.5) * rows(inner.out_proj.weight) * pair * values
    assert (layer.scales() * bound).tolist() == pytest.approx([1.0, 1.0], rel=1e-6)
    with pytest.raises(ValueError, match="max_len is 24"):
        build("contractive kim2021")(tokens(1, 25))


def test_dropout_is_refused_in_training_and_not_in_eval() -> None:
    model = build("lipschitz", dropout=0.2)
    with pytest.raises(lf.NotCertifiable, match="dropout"):
        lf.certify(model.train())
    assert lf.certify(model.eval()).bound <= 32.0 * (1.0 + 1e-12)
    x = tokens(2, 9)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize("case", ["invertible", "invertible norm"])
def test_the_embedded_input_comes_back(case: str) -> None:
    model = build(case)
    fit(model, 10, lr=1e-2)
    with torch.no_grad():
        x = model.embed(tokens(4, 24))
        hidden = model.hidden(x)
        assert (hidden - x).abs().max() > 0.1
        assert (model.invert(hidden) - x).abs().max() <= 1e-4
        # The inverse solves; it does not remember.
        moved = model.invert(hidden + 0.1)
        assert (model.hidden(moved) - hidden - 0.1).abs().max() <= 1e-4


def test_a_baked_model_says_the_same_and_still_inverts() -> None:
    model = build("invertible")
    fit(model, 3)
    plain, x = model.bake(), tokens(2, 9)
    assert isinstance(plain, LanguageModel)
    with torch.no_grad():
        assert (plain(x) - model(x)).abs().max() <= 1e-5
        embedded = plain.embed(x)
        assert (plain.invert(plain.hidden(embedded)) - embedded).abs().max() <= 1e-4


def test_an_inverse_that_act_norms_spoil_is_refused() -> None:
    model = build("invertible")
    model.initialize(tokens(2, 9))
    model.eval()
    with torch.no_grad():
        next(block for block in model.trunk if isinstance(block, ActNorm)).log_scale.sub_(17.0)
        x = model.embed(tokens(2, 9))
        hidden = model.hidden(x)
        with pytest.raises(NotConverged, match="off by about .* ActNorms enlarge .* in float64 a tol"):
            model.invert(hidden)
        model.double()
        hidden = model.hidden(x.double())
        with pytest.raises(NotConverged, match="off by about"):
            model.invert(hidden)
        # What the message says helps.
        assert (model.invert(hidden, tol=1e-13) - x).abs().max() < 1e-2


def test_other_variants_have_no_inverse() -> None:
    model = build("l2")
    with pytest.raises(ValueError, match="'invertible', got 'l2'"):
        model.invert(torch.zeros(1, 3, D))


@pytest.mark.parametrize("case", CASES)
def test_every_variant_learns(case: str) -> None:
    losses = fit(build(case), 25, lr=2e-2)
    assert losses[0] == pytest.approx(2.4, abs=0.3)  # log 11
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("size", [10.0, 30.0])
def test_an_inverse_that_large_weights_spoil_is_refused(size: float) -> None:
    model = lf.models.invertible(5, dim=8, num_heads=2, num_layers=2, hidden=16)
    model.initialize(torch.randint(5, (2, 8)))
    with torch.no_grad():
        for block in model.double().eval().trunk:
            if isinstance(block, lf.InvertibleResidual):
                for weight in block.parameters():
                    weight.mul_(size)
        hidden = model.hidden(torch.randn(2, 12, 8).double())
        with pytest.raises(NotConverged, match="hidden tokens that differ"):
            model.invert(hidden)


def test_the_first_batch_sets_the_invertible_model_once() -> None:
    model, x = build("invertible").eval(), tokens(4, 20)
    with torch.no_grad():
        assert model.hidden(model.embed(x)).std((0, 1)).sub(1.0).abs().max() > 0.1
        model.initialize(x)
        hidden = model.hidden(model.embed(x))
        assert hidden.mean((0, 1)).abs().max() <= 1e-4
        assert hidden.std((0, 1), correction=0).sub(1.0).abs().max() <= 1e-4
        model.initialize(tokens(4, 20))
        assert torch.equal(model.hidden(model.embed(x)), hidden)
    assert not any(part.training for part in model.modules())


@pytest.mark.parametrize("case", ["dot_product", "l2", "invertible"])
def test_one_seed_gives_one_model_and_one_course(case: str) -> None:
    courses = []
    for _ in range(2):
        torch.manual_seed(3)
        courses.append(fit(build(case), 5))
    assert courses[0] == courses[1]
    torch.manual_seed(4)
    assert fit(build(case), 5) != courses[0]


@pytest.mark.parametrize("case", CASES)
def test_copies_are_alike_and_apart(case: str) -> None:
    model, x = build(case).eval(), tokens(2, 9)
    twin = copy.deepcopy(model)
    other = build(case).eval()
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        next(twin.body.parameters()).add_(1.0)
    assert torch.equal(other(x), model(x))
    assert not torch.equal(twin(x), model(x))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_autocast_stays_close(case: str) -> None:
    model, x = build(case).eval(), tokens(2, 20)
    with torch.no_grad():
        exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    assert (logits.float() - exact).abs().max() <= 0.05 * max(1.0, exact.abs().max().item())
    logits.float().square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_lengths() -> None:
    with torch.no_grad():
        assert build("lipschitz").eval()(tokens(1, 100)).shape == (1, 100, V)  # ALiBi takes any
    with pytest.raises(ValueError, match="max_len is 24, got 25 tokens"):
        build("l2 rotary")(tokens(1, 25))


def test_a_training_step_walks_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known when a model is built is not looked up again in every step."""
    model, x = build("invertible").train(), tokens(2, 9)
    model(x).sum().backward()
    seen: list[str] = []

    def spy(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code
            if "lipformer" in caller.co_filename:
                seen.append(f"{name} in {caller.co_filename}:{caller.co_name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    walks = ("modules", "named_modules", "children", "named_children", "parameters", "named_parameters")
    for name in walks:
        spy(nn.Module, name)
    spy(inspect, "signature")
    model(x).sum().backward()
    assert not seen
    lf.Residual(nn.Linear(4, 4))
    assert seen, "the spies see nothing"
