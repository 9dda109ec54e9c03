"""recipes/flows/particles in small: energies, the Markov chain, models and a run in parts."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recipes.flows.particles import data
from recipes.flows.particles.__main__ import main
from recipes.flows.particles.entropy import gauss_legendre, harmonic_log_z, integrate
from recipes.flows.particles.entropy import main as entropy
from recipes.flows.particles.fit import fit
from recipes.flows.particles.models import BASELINES, FLOWS, basis, build
from recipes.flows.particles.report import effective_share
from recipes.flows.particles.systems import (
    DW4,
    LJ13,
    Drawn,
    System,
    markov_chain,
    mean_free,
    moved,
    split_rhat,
)
from training.errors import BadInput

CHAINS = {"chains": 110, "draws": 20, "burn": 100, "thin": 20, "seed": 0}


def slow_energy(system: System, x: Tensor) -> float:
    total = 0.0
    for i in range(system.particles):
        for j in range(i):
            d = math.dist(x[i].tolist(), x[j].tolist())
            if system is DW4:
                total += 0.9 * (d - 4) ** 4 - 4 * (d - 4) ** 2
            else:
                total += d**-12 - 2 * d**-6
    spread = (x - x.mean(0)).square().sum().item()
    return total + (0.5 * spread if system is LJ13 else 0.0)


@cache
def drawn() -> Drawn:
    return markov_chain(DW4, **CHAINS)


@pytest.mark.parametrize("system", [DW4, LJ13], ids=lambda system: system.name)
def test_energies_and_their_symmetries(system: System) -> None:
    x = 2.0 * torch.randn(3, system.particles, system.dim, dtype=torch.float64)
    energy = system.energy(x)
    for k in range(3):
        assert energy[k].item() == pytest.approx(slow_energy(system, x[k]))
    other = moved(x + 1.0, torch.Generator().manual_seed(0))
    assert (other - x).abs().max() > 0.1
    torch.testing.assert_close(system.energy(other), energy)


def test_turns_are_uniform_and_reflect() -> None:
    x = torch.zeros(4000, 1, 2)
    x[..., 0] = 1.0
    generator = torch.Generator().manual_seed(0)
    assert moved(x, generator).mean(0).abs().max() < 0.05
    frame = torch.eye(2).expand(200, 2, 2)
    signs = torch.linalg.det(moved(frame, generator))
    assert 0.3 < (signs > 0).float().mean().item() < 0.7


def test_the_chain_has_the_energy_of_the_density() -> None:
    """Against importance sampling from a Gaussian, by which the entropy is known as well."""
    chain = drawn()
    assert chain.x.shape == (110, 20, 4, 2)
    assert chain.x.mean(2).abs().max() < 1e-12
    assert chain.rhat < 1.05
    energy = DW4.energy(chain.x).mean().item()
    generator = torch.Generator().manual_seed(0)
    noise = mean_free(torch.randn(100_000, 4, 2, generator=generator, dtype=torch.float64))
    energies = DW4.energy(2.1 * noise)
    log_prob = -0.5 * noise.square().sum((1, 2)) - 3 * math.log(2 * math.pi) - 6 * math.log(2.1)
    log_weights = -energies - log_prob
    expected = (log_weights.softmax(0) * energies).sum().item()
    assert energy == pytest.approx(expected, abs=0.3)
    entropy = log_weights.logsumexp(0).item() - math.log(len(noise)) + energy
    assert entropy == pytest.approx(DW4.entropy, abs=0.25)


def test_chains_that_disagree_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10, 100)
    assert split_rhat(values) < 1.05
    assert split_rhat(values + torch.arange(10.0)[:, None]) > 2.0
    assert split_rhat(values + torch.linspace(0, 5, 100)) > 1.2
    bad = drawn()._replace(rhat=1.2)
    monkeypatch.setattr(data, "markov_chain", lambda *_, **__: bad)
    with pytest.raises(BadInput, match=r"R-hat of the energy is 1\.200"):
        data.samples(DW4, 10, 0, tmp_path)


def test_samples_are_kept_and_held_out_ones_are_of_other_chains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "markov_chain", lambda *_, **__: drawn())
    first = data.samples(DW4, 50, 0, tmp_path, **CHAINS)
    monkeypatch.setattr(data, "markov_chain", None)
    again = data.samples(DW4, 50, 1, tmp_path, **CHAINS)
    assert torch.equal(first.held_out, again.held_out)
    assert torch.equal(first.held_out, drawn().x[:10].flatten(0, 1).float())
    assert not torch.equal(first.train, again.train)
    with pytest.raises(BadInput, match="from 5 to the 2000"):
        data.samples(DW4, 2001, 0, tmp_path, **CHAINS)


@pytest.mark.parametrize("name", [*FLOWS, *BASELINES])
@pytest.mark.filterwarnings("ignore::UserWarning:zuko")
def test_models_are_densities_in_the_mean_free_subspace(name: str) -> None:
    """Their mean likelihood ratio to a Gaussian of known constant is 1, over samples of the Gaussian."""
    system = System("two", 2, 2, DW4.pair, 0.0, (1.0,), 0.0)
    models = pytest.importorskip("recipes.flows.particles.models")
    models.DEPTH["two"] = (1, 2)
    noise = mean_free(torch.randn(5_000, 2, 2))
    log_prob = -0.5 * noise.square().sum((1, 2)) - math.log(2 * math.pi)
    x, log_prob = 1.5 * noise, log_prob - 2 * math.log(1.5)
    model = build(name, system, x[:1000] * 0.8).eval()
    with torch.no_grad():
        ratio = (model.log_prob(x) - log_prob).exp()
        assert model.sample(3).mean(1).abs().max() < 1e-5
    assert ratio.mean().item() == pytest.approx(1.0, abs=4 * ratio.std().item() / math.sqrt(len(x)))
    assert ratio.std() > 0.05


def test_the_basis_is_orthonormal() -> None:
    columns = basis(13)
    torch.testing.assert_close(columns.T @ columns, torch.eye(12), rtol=0, atol=1e-5)
    assert columns.sum(0).abs().max() < 1e-5


@pytest.mark.parametrize("trap", [0.0, 1.0])
def test_the_entropy_of_particles_on_springs(trap: float) -> None:
    """Springs between all pairs are one harmonic well: sum_{i<j} d^2 = N sum_i |x_i - mean|^2."""
    springs = System("springs", 3, 2, lambda squared: 0.3 * squared, trap, (0.7, 2.0), 0.0)
    found = integrate(springs, 6, chains=100, draws=10, burn=30, thin=5, seed=0)
    expected = {"log Z": harmonic_log_z(4, trap + 1.8), "mean energy": 2.0}
    expected["entropy"] = sum(expected.values())
    for name, (value, error) in found.items():
        assert 0.0 < error < 0.2
        assert value == pytest.approx(expected[name], abs=4.0 * error)


def test_quadrature_of_a_polynomial() -> None:
    nodes, weights = gauss_legendre(3)
    assert (weights * nodes**5).sum().item() == pytest.approx(1 / 6)


def test_the_command_of_the_entropy(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--points=2", "--chains=4", "--draws=4", "--burn=2"]
    assert entropy(["--system=dw4", "--pairs=0", "--trap=1", *small]) == 0
    table = capsys.readouterr().out
    assert "5.514" in table  # log Z of the well alone: 3 log 2 pi, whatever the chains do


class Forgetful(torch.nn.Module):
    """Worse with every update: log p is -t, for a t that counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("t", torch.zeros(()))

    def log_prob(self, x: Tensor) -> Tensor:
        if self.training:
            self.t += 1.0
        return self.weight.expand(len(x)) - self.t


def test_the_weights_are_those_that_do_best_on_samples_kept_back(tmp_path: Path) -> None:
    model = Forgetful()
    options = {
        "seconds": 0.3,
        "lr": 1e-9,
        "batch": 4,
        "turn": False,
        "seed": 0,
        "path": tmp_path / "x.pt",
    }
    spent = fit(model, torch.randn(20, 4, 2), **options)
    assert 0 < spent["chosen"] < spent["updates"] / 4
    assert 0.0 < model.t.item() == pytest.approx(spent["least"], rel=1e-3)
    for other in ({"seed": 1}, {"seconds": 0.4}, {"lr": 1e-8}, {"batch": 5}):
        with pytest.raises(BadInput, match=r"x\.pt is of a run with .* give another --out"):
            fit(Forgetful(), torch.randn(20, 4, 2), **{**options, **other})
    with pytest.raises(BadInput, match="x.pt is of a run with"):
        fit(Forgetful(), torch.randn(20, 13, 3), **options)


def test_a_real_nvp_with_bounded_scales() -> None:
    system = System("two", 2, 2, DW4.pair, 0.0, (1.0,), 0.0)
    model = build("realnvp", system, torch.randn(50, 2, 2))
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 50.0)
    scales = [part.s(100.0 * torch.randn(9, 2)) for part in model.model.flows if hasattr(part, "b")]
    assert len(scales) == 8
    assert max(scale.abs().max().item() for scale in scales) == 2.0


def test_effective_samples() -> None:
    assert effective_share(torch.zeros(10)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([0.0, -math.inf])) == pytest.approx(0.5)


def test_a_run_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "CHAINS", CHAINS)
    monkeypatch.setattr(data, "markov_chain", lambda *_, **__: drawn())
    arguments = ["--samples=500", "--batch=64", "--draws=20", "--seconds=0.4", "--models", "pairs"]
    arguments = [f"--data={tmp_path}/data", f"--out={tmp_path}/out", *arguments]
    assert main([*arguments[:2], "--stop=0.1", *arguments[2:]]) == 0
    assert "give the same command to go on" in capsys.readouterr().out
    assert not (tmp_path / "out" / "report.md").exists()
    before = torch.load(tmp_path / "out" / "pairs.pt", weights_only=True)["updates"]
    assert main(arguments) == 0
    (row,) = json.loads((tmp_path / "out" / "scores.json").read_text())["models"]
    assert row["updates"] > before
    assert DW4.entropy < row["nats"] < 15.0
    assert 0.0 < row["effective samples, %"] <= 100.0
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"    python -m recipes.flows.particles --data={tmp_path}/data" in text
    assert (tmp_path / "out" / "scores.csv").read_text().startswith("model,parameters")
    assert (tmp_path / "out" / "energies.png").stat().st_size > 2_000
    # What is done is not done again.
    assert main(arguments) == 0
    assert (
        json.loads((tmp_path / "out" / "scores.json").read_text())["models"][0]["updates"]
        == row["updates"]
    )
