"""recipes/sets in small: its data, its certificate under attack, and that every YAML file runs."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import lipformer as lf
from lipformer.analysis import certified_radius
from recipes.pgd import logit_margin, pgd
from recipes.report import count
from recipes.sets.__main__ import main
from recipes.sets.data import NoisySets, noisy_sets
from recipes.sets.module import SetModule
from recipes.sets.report import FirstPoint, Report
from tests.recipes.tiny import run_small
from tests.training.tiny import LIGHTNING_WARNINGS

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "sets"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
ARMS = ("none", "global", "ball")
TINY: dict[str, object] = {
    "model.dim": 8,
    "data.points": 8,
    "data.batch_size": 4,
    "data.train_sets": 16,
    "data.val_sets": 4,
    "data.test_sets": 8,
    "trainer.max_steps": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.val_check_interval": 2,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": False,
    "report.attacked_sets": 4,
    "report.attack_steps": 2,
    "report.attack_restarts": 1,
}
run = partial(run_small, main, TINY)


def draw(seed: int, sets: int = 200, points: int = 64, **options: float) -> tuple[Tensor, Tensor]:
    return noisy_sets(sets, points, torch.Generator().manual_seed(seed), **options)


def test_sets_are_a_function_of_the_seed() -> None:
    (x, y), (again, labels), (other, _) = draw(3), draw(3), draw(4)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert not torch.equal(x, other)
    data, same = (
        NoisySets(points=8, val_sets=3, test_sets=3),
        NoisySets(points=8, val_sets=3, test_sets=3),
    )
    assert torch.equal(data.test[0], same.test[0])
    assert not torch.equal(data.val[0], data.test[0])
    torch.manual_seed(0)
    first, second = next(iter(data.train_dataloader())), next(iter(data.train_dataloader()))
    torch.manual_seed(0)
    assert torch.equal(first[0], next(iter(data.train_dataloader()))[0])
    assert not torch.equal(first[0], second[0])


def test_a_quarter_of_the_labels_is_flipped_and_clusters_share_the_true_one() -> None:
    x, y = draw(0, spread=0.0)
    assert x.shape == (200, 64, 4)
    assert torch.allclose(x[..., :3].norm(dim=-1), torch.ones(200, 64))
    assert set(x[..., 3].unique().tolist()) == {-0.5, 0.5}
    assert y.double().mean().item() == pytest.approx(0.5, abs=0.07)
    wrong = (x[..., 3] > 0) != y.bool()
    assert wrong.double().mean().item() == pytest.approx(0.25, abs=0.02)
    for points, labels in zip(x, y, strict=True):
        centres, member = points[:, :3].unique(dim=0, return_inverse=True)
        assert len(centres) == 3
        assert all(len(labels[member == k].unique()) == 1 for k in range(3))
    flips = wrong.double() - 0.25
    together = (flips.sum(1).square() - flips.square().sum(1)).mean().item() / (64 * 63)
    assert abs(together) < 0.01, "flips are independent"
    assert not ((draw(0, flip=0.0)[0][..., 3] > 0) != draw(0, flip=0.0)[1].bool()).any()
    noise = draw(0, spread=0.1)[0] - x
    assert noise[..., :3].std().item() == pytest.approx(0.1, rel=0.05)


def test_arms_have_one_constant_and_about_as_many_weights() -> None:
    """Whatever the weights are."""
    sizes = {}
    for arm in ARMS:
        module = SetModule(arm)
        for _ in range(2):
            assert lf.certify(module.model[:-1]).bound == module.measured_gain() == 1.0
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(torch.randn_like(p))
        sizes[arm] = count(module)
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes


def trained(arm: str, steps: int = 30) -> tuple[SetModule, Tensor, Tensor]:
    """A module that has learnt a little, and sets it has not seen."""
    torch.manual_seed(0)
    module = SetModule(arm, points=12, attention_weight=0.8)
    optimiser = torch.optim.Adam(module.parameters(), lr=2e-2)
    for _ in range(steps):
        logits, _, labels = module.logits([*noisy_sets(16, 12)], 0.0)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(20 * logits, labels).backward()
        optimiser.step()
    return module.eval(), *draw(9, sets=12, points=12)


@pytest.mark.parametrize("arm", ARMS)
def test_a_certified_point_keeps_its_label_under_attack(arm: str) -> None:
    module, x, y = trained(arm)
    radius = module.radii(x, y)
    assert torch.equal(radius > 0, module(x).argmax(-1) == y)
    assert (radius > 0).double().mean() > 0.6
    first = FirstPoint(module.model)
    for sample, label, r in zip(x[:6, None], y[:6, :1], radius[:6, 0].tolist(), strict=True):
        if r > 0:
            found = pgd(first, sample, label, r, steps=4, restarts=1, box=None)
            assert (found - sample).norm() <= r
            assert logit_margin(first(found), label) > 0
    report = Report(eps=[0.05, 1.0], attack_steps=4, attack_restarts=1)
    rows = report.table(module, x, y[:, 0], radius)
    assert all(row["pgd"] >= row["attacked_certified"] for row in rows), rows
    assert rows[0]["pgd"] == rows[0]["attacked_certified"]
    # The negative control: radii that are too large are found out.
    rows = report.table(module, x, y[:, 0], 20 * radius)
    assert any(row["pgd"] < row["attacked_certified"] for row in rows), rows


def test_radii_are_not_above_those_of_the_package() -> None:
    """Whose certificate around an input is at least as good; one point of each set."""
    module, x, y = trained("none")
    last = torch.nn.Sequential(*module.model[:-1], torch.nn.Flatten())
    last.append(torch.nn.Linear(12 * 16, 2))
    with torch.no_grad():
        last[-1].weight.zero_()[:, :16] = module.head.weight
        last[-1].bias.copy_(module.head.bias)
    found = certified_radius(last, x[:8], y[:8, 0], tol=1e-5)
    assert bool((module.radii(x, y)[:8, 0] <= found + 1e-5).all())
    assert torch.allclose(module.radii(x, y)[:8, 0], found, atol=1e-3)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_takes_two_steps(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    assert f"python -m recipes.sets fit --config recipes/sets/{path.name}" in text[:400]
    assert "# Expect" in text[:700]
    settings = yaml.safe_load(text)
    assert settings["model"]["attention"] == path.stem
    assert "points" not in settings["model"], "which is data.points"
    assert settings["trainer"]["accelerator"] == "auto"
    assert run("fit", tmp_path, f"--config={path}") == 0
    assert "val/margin_accuracy" in (tmp_path / "logs" / "version_0" / "metrics.csv").read_text()
    with open(tmp_path / "accuracy.csv", encoding="utf-8", newline="") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert [row["eps"] for row in rows] == [0.0, 0.01, 0.02, 0.03]
    assert all(row["pgd"] >= row["attacked_certified"] for row in rows), rows
    assert (tmp_path / "accuracy.png").stat().st_size > 5_000
    report = (tmp_path / "report.md").read_text()
    assert f"attention {path.stem}" in report
    assert "Certified constant 1 from" in report
    assert ("r = " in report) == (path.stem == "ball")
    again = SetModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.hparams["attention"] == path.stem
    assert again.hparams["points"] == 8


def test_arms_differ_in_what_their_own_settings_are() -> None:
    """Same data, budget and size in every file."""
    assert {path.stem for path in CONFIGS} == set(ARMS)
    settings = [yaml.safe_load(path.read_text()) for path in CONFIGS]
    for each in settings:
        for name in ("attention", "attention_weight", "temperature", "lr"):
            each["model"].pop(name, None)
    assert settings[0] == settings[1] == settings[2]


def test_validate_and_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", tmp_path, "--trainer.logger=false") == 0
    assert "val/margin_accuracy" in capsys.readouterr().out
    assert run("fit", tmp_path, "--model.temperature=0") == 2
    assert "--model.temperature must be positive, got 0.0" in capsys.readouterr().err
    assert run("fit", tmp_path, "--model.num_heads=3") == 2
    assert "embed_dim must be a positive multiple of num_heads" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("fit", tmp_path, "--data.flip=1.5")
    assert "data.flip" in capsys.readouterr().err
