"""recipes/flows in small: its data, baselines, report, and that every YAML file runs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lipformer.flows import AttentionFlow
from recipes.flows.__main__ import main
from recipes.flows.baselines import SetGaussian, real_nvp, train_real_nvp
from recipes.flows.data import SHAPES, PointSets, digit_images, digit_points, moved
from recipes.flows.examples import main as examples
from recipes.flows.module import FlowModule, optimiser
from recipes.flows.pictures import inversion_errors, next_point_density
from recipes.flows.report import Report, Row, table, training_sets
from recipes.report import count
from tests.recipes.tiny import TRAINER, run_small
from tests.training.tiny import LIGHTNING_WARNINGS

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "flows"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
TINY: dict[str, object] = {
    **TRAINER,
    "model.depth": 1,
    "model.width": 4,
    "model.hidden": [8],
    "model.feed_forwards": 1,
    "data.points": 4,
    "data.train_sets": 64,
    "data.held_out_sets": 16,
    "data.batch_size": 16,
    "report.samples": 6,
    "report.cells": 4,
    "report.lrs": [1e-3],
}
run = partial(run_small, main, TINY)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_opens_with_its_command(path: Path) -> None:
    text = path.read_text()
    assert f"python -m recipes.flows fit --config recipes/flows/{path.name}" in text[:400]
    assert {path.stem for path in CONFIGS} == {*SHAPES, "digits"}
    settings = yaml.safe_load(text)
    assert settings["data"]["name"] == path.stem
    assert "points" not in settings["model"], "which is data.points"
    assert settings["trainer"]["accelerator"] == "auto"


def scores(report: Path) -> dict[str, float]:
    """Nats per point by model, from the table of a report."""
    rows = re.findall(r"\| (AttentionFlow|Gaussian|RealNVP).*\| (-?[\d.]+) ± ", report.read_text())
    return {model: float(nats) for model, nats in rows}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_trains(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    run("fit", out, f"--config={path}")
    logs = (out / "logs" / "version_0" / "metrics.csv").read_text()
    assert "val/nats_per_point" in logs.partition("\n")[0]
    assert "nan" not in logs
    assert [part.name for part in tmp_path.iterdir()] == ["out"], "all output is in one place"


def test_without_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report, the checkpoint and what can be done with it; no validation in so short a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(TINY, "trainer.val_check_interval")
    run("fit", tmp_path, "--data.points=5")
    assert "nats per point" in capsys.readouterr().out
    assert list(scores(tmp_path / "report.md")) == ["AttentionFlow", "Gaussian", "RealNVP"]
    text = (tmp_path / "report.md").read_text()
    assert f"    python -m recipes.flows fit --out={tmp_path} " in text
    assert "sets of 5 points" in text
    for name in ("samples.png", "density.png", "inversion.png"):
        assert (tmp_path / name).stat().st_size > 5_000

    last = tmp_path / "last.ckpt"
    flow = FlowModule.load_from_checkpoint(last).flow.eval()
    assert flow.sample(3).shape == (3, 5, 2)
    for command in ("validate", "test"):
        run(command, tmp_path, "--data.points=5", f"--ckpt_path={last}")
        assert "nats_per_point" in capsys.readouterr().out


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Report.on_validation_end

    def broken(*arguments: Any) -> None:
        kept(*arguments)
        raise RuntimeError("broken off")

    sizes = ("--trainer.max_steps=4",)
    with monkeypatch.context() as patch:
        patch.setattr(Report, "on_validation_end", broken)
        with pytest.raises(RuntimeError, match="broken off"):
            run("fit", tmp_path, *sizes)
    assert not (tmp_path / "report.md").exists()
    last = tmp_path / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    run("fit", tmp_path, *sizes, f"--ckpt_path={last}")
    assert torch.load(last, weights_only=True)["global_step"] == 4
    assert scores(tmp_path / "report.md")


def test_a_causal_flow_reports_sequences(tmp_path: Path) -> None:
    run("fit", tmp_path, "--model.mode=causal", "--model.log_det=causal")
    text = (tmp_path / "report.md").read_text().partition("\n\n    ")
    assert text[0] == "# moons: sequences of 4 points"
    prose = text[2].partition("\n")[2]
    assert "per sequence" in prose
    assert not re.search(r"\bsets?\b", prose)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict"], "invalid choice"),
        (["fit", "--model.points=5"], "model.points"),
        (["fit", "--trainer.default_root_dir=x"], "default_root_dir"),
        (["fit", "--data.name=spiral"], "'digits']. Got value: spiral"),
    ],
)
def test_what_cannot_be_asked_for(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(arguments[0], tmp_path, *arguments[1:])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 600])
def test_the_schedule_of_a_run_of_any_length(steps: int) -> None:
    parts = optimiser(torch.nn.Linear(1, 1), 1e-2, steps)
    rates = []
    for _ in range(steps):
        rates.append(parts["optimizer"].param_groups[0]["lr"])
        parts["optimizer"].step()
        parts["lr_scheduler"]["scheduler"].step() if len(rates) < steps else None
    assert max(rates) <= 1e-2 * (1.0 + 1e-9)
    assert steps < 10 or max(rates) > 0.8e-2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("digits", 150), ("moons", 600)])
def test_the_flow_beats_a_gaussian_and_a_real_nvp(
    name: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digits need a quarter of the recipe's updates for it, moons more than that."""
    for key in [key for key in TINY if key.startswith(("model.", "data.", "report.learning"))]:
        monkeypatch.delitem(TINY, key)
    monkeypatch.setitem(TINY, "trainer.max_steps", steps)
    monkeypatch.setitem(TINY, "trainer.val_check_interval", steps)
    run("fit", tmp_path, f"--config={FOLDER / name}.yaml")
    flow, gaussian, real_nvp = scores(tmp_path / "report.md").values()
    assert flow < gaussian - 0.03
    assert flow < real_nvp - 0.03


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_centred_and_of_unit_size(name: str) -> None:
    x = SHAPES[name](2000, 8, torch.Generator().manual_seed(0)).flatten(0, 1)
    assert x.mean(0).abs().max() < 0.05
    assert 0.6 < x.std().item() < 1.2


def test_points_of_a_set_move_together() -> None:
    shape = torch.zeros(500, 4, 2)
    shape[..., 0] = 1.0
    x = moved(shape, torch.Generator().manual_seed(0), offset=1.0, stretch=0.2, turn=30.0)
    torch.testing.assert_close(x, x[:, :1].expand_as(x))
    assert x.std(0).min() > 0.5
    still = moved(shape, torch.Generator().manual_seed(0), offset=0.0, stretch=0.0, turn=0.0)
    torch.testing.assert_close(still, shape)


def test_digit_points_lie_where_the_image_is_bright() -> None:
    image = torch.zeros(1, 8, 8)
    image[0, 0, 7] = 3.0  # the top right corner
    x = digit_points(image, 50, torch.Generator().manual_seed(0))
    assert x.shape == (1, 50, 2)
    assert x.min() >= 1.5
    assert x.max() <= 2.0


def test_held_out_digits_are_of_other_images() -> None:
    train, held_out = digit_images()
    assert len(train) + len(held_out) == 1797
    assert not {x.numpy().tobytes() for x in train} & {x.numpy().tobytes() for x in held_out}
    first = PointSets("digits", points=5, train_sets=8, held_out_sets=4, batch_size=4)
    again = PointSets("digits", points=5, train_sets=8, held_out_sets=4, batch_size=4)
    assert torch.equal(first.held_out, again.held_out)
    batches = training_sets(first)
    assert next(batches)[0].shape == (5, 2)


@pytest.mark.parametrize("name", ["moons", "digits"])
def test_points_stay_on_the_cpu_whatever_the_default_device(name: str) -> None:
    with torch.device("meta"):
        data = PointSets(name, train_sets=4, held_out_sets=4)
        seen = data.train_set.__getitems__([0]) if name == "digits" else [data.train_set[0]]
    assert {part.device.type for part in (data.held_out, *seen[0])} == {"cpu"}


def test_the_gaussian_is_the_best_exchangeable_one() -> None:
    x = 0.5 * torch.randn(4000, 3, 2) + torch.randn(4000, 1, 2)
    model = SetGaussian(x)
    truth = torch.kron(torch.eye(3), 0.25 * torch.eye(2)) + torch.kron(torch.ones(3, 3), torch.eye(2))
    torch.testing.assert_close(model.distribution.covariance_matrix, truth.double(), rtol=0, atol=0.15)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(model.log_prob(x[:5]), model.log_prob(x[:5, order]))
    plain = torch.distributions.MultivariateNormal(x.flatten(1).mean(0), x.flatten(1).T.cov())
    fresh = 0.5 * torch.randn(4000, 3, 2) + torch.randn(4000, 1, 2)
    assert model.log_prob(fresh).mean() >= plain.log_prob(fresh.flatten(1)).mean()


@pytest.mark.parametrize("budget", [4_000, 38_324])
def test_the_real_nvp_has_the_parameters_it_may_have(budget: int) -> None:
    model = real_nvp(6, 2, budget)
    assert 0.8 * budget <= count(model) <= budget
    x = torch.randn(32, 12)
    torch.testing.assert_close(model.forward(model.inverse(x)), x, rtol=0, atol=1e-4)


def test_the_real_nvp_learns() -> None:
    x = 0.3 * torch.randn(64, 4, 2) + torch.randn(64, 1, 2)
    losses = train_real_nvp(real_nvp(4, 2, 4_000), [x] * 30, 30, 1e-2)
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 0.3


def test_the_density_of_a_next_point_is_one_over_the_plane() -> None:
    def log_prob(x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(0.0, 0.5).log_prob(x).sum((1, 2))

    density = next_point_density(log_prob, torch.zeros(3, 2), 3.0, 60)
    assert density.sum().item() * (6.0 / 60) ** 2 == pytest.approx(1.0)
    line = (torch.arange(60) + 0.5) / 10 - 3.0
    expected = torch.distributions.Normal(0.0, 0.5).log_prob(line).exp()
    torch.testing.assert_close(density.float(), expected[:, None] * expected, rtol=1e-2, atol=1e-3)


def test_errors_fall_with_evaluations() -> None:
    flow = AttentionFlow(2, depth=1, num_heads=2, hidden=8, width=4, seq_len=5)
    curves = inversion_errors(flow, torch.randn(3, 5, 2), (1e-2, 1e-5, 1e-9))
    for pairs in curves.values():
        counts, errors, bounds = zip(*pairs, strict=True)
        assert list(counts) == sorted(counts)
        assert errors[2] <= 1e-9 * 10
        assert all(error <= bound for error, bound in zip(errors, bounds, strict=True))
        assert bounds[2] <= 1e-8
    assert flow.blocks[1].record is None, "the flow itself is left alone"


def test_the_module_judges_with_exact_log_dets() -> None:
    module = FlowModule(points=5, depth=1, width=4, hidden=[8], feed_forwards=1, log_det="roulette")
    x = torch.randn(4, 5, 2)
    module.flow(x)
    module.eval()
    torch.testing.assert_close(module.log_prob(x), module.flow.log_prob(x, method="exact"))
    assert torch.equal(module.log_prob(x), module.log_prob(x))


def test_the_table() -> None:
    row = Row.of("flow", torch.tensor([-10.0, -14.0]), 4, 99, 0, 1.0)
    assert "| flow | 99 | - | 1 | 3.000 ± 0.500 | 12.00 |" in table([row], 4)


def test_the_pictures_of_the_docs(tmp_path: Path) -> None:
    assert examples([f"--out={tmp_path}", "--updates", "1", "1"]) == 0
    for name in ("context", "continuation"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
