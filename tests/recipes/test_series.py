"""recipes/series in small: its data, scores, baselines, and that its YAML file runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from recipes.series.__main__ import main
from recipes.series.data import SeriesData, regimes
from recipes.series.forecasters import FlowForecaster, GaussianAR, MaskedFlow, crps
from recipes.series.module import SeriesModule
from tests.recipes.tiny import TRAINER, run_small
from tests.training.tiny import LIGHTNING_WARNINGS

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "series"
TINY: dict[str, object] = {
    **TRAINER,
    "model.depth": 1,
    "model.width": 4,
    "model.hidden": [8],
    "data.length": 200,
    "data.past": 5,
    "data.horizon": 3,
    "data.batch_size": 16,
    "report.samples": 6,
    "report.lrs": [1e-3],
    "report.seconds": 0.05,
}


def test_the_configuration_trains_and_reports(tmp_path: Path) -> None:
    path = FOLDER / "regimes.yaml"
    assert "python -m recipes.series fit --config recipes/series/regimes.yaml" in path.read_text()[:400]
    assert "past" not in yaml.safe_load(path.read_text())["model"], "which is data.past"
    run = partial(run_small, main, TINY)
    assert run("fit", tmp_path, f"--config={path}") == 0
    text = (tmp_path / "report.md").read_text()
    rows = [line for line in text.splitlines() if " ± " in line and line.startswith("|")]
    assert len(rows) == 3
    assert "3 numbers after 5" in text
    assert "nan" not in "".join(rows)
    assert (tmp_path / "scores.csv").read_text().count("\n") == 4
    assert (tmp_path / "forecasts.png").stat().st_size > 1000
    assert run("test", tmp_path, f"--ckpt_path={tmp_path / 'last.ckpt'}") == 0


def test_a_series_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "temperatures.csv"
    path.write_text("day,low,high\n" + "".join(f"{i},{i % 7},{i % 5}\n" for i in range(100)))
    data = SeriesData(path=str(path), column="low", past=4, horizon=2)
    assert data.train.shape == (75, 6, 1)
    assert data.held_out.shape == (8, 6, 1)
    own = torch.arange(100.0) % 7
    own = (own - own[:80].mean()) / own[:80].std()
    torch.testing.assert_close(data.held_out[1, :, 0], own[82:88])
    back = data.mean + data.deviation * data.held_out[1, :, 0]
    torch.testing.assert_close(back, torch.arange(82.0, 88.0) % 7)
    with pytest.raises(ValueError, match="columns day, low, high, got column='mean'"):
        SeriesData(path=str(path), column="mean")
    with pytest.raises(ValueError, match=r"past \+ horizon = 32, got 100 numbers"):
        SeriesData(path=str(path))
    assert run_small(main, TINY, "fit", tmp_path / "out", f"--data.path={tmp_path / 'none.csv'}") == 2
    assert "none.csv" in capsys.readouterr().err


def test_crps_is_that_of_its_definition() -> None:
    """Against all pairs, and against the closed form of a Gaussian."""
    samples, truth = torch.randn(7, 2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    pairs = (samples[:, None] - samples[None]).abs().sum((0, 1)) / (7 * 6)
    expected = (samples - truth).abs().mean(0) - 0.5 * pairs
    torch.testing.assert_close(crps(samples, truth), expected)
    normal = torch.distributions.Normal(0.0, 1.0)
    y = torch.tensor([-1.0, 0.0, 2.0])
    exact = y * (2.0 * normal.cdf(y) - 1.0) + 2.0 * normal.log_prob(y).exp() - torch.pi**-0.5
    torch.testing.assert_close(crps(torch.randn(100_000, 3), y), exact, rtol=0, atol=0.02)
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        crps(samples[:1], truth)


def test_the_autoregression_finds_its_own_model_and_is_wrong_of_others() -> None:
    x, values = 0.0, []
    for e in torch.randn(4000).tolist():
        x = 0.5 + 0.8 * x + 0.3 * e
        values.append(x)
    windows = torch.tensor(values).unfold(0, 6, 1).unsqueeze(-1)
    fitted = GaussianAR(windows, 3)
    assert abs(float(fitted.sigma) - 0.3) < 0.02
    assert abs(float(fitted.weights[-1]) - 0.8) < 0.05
    ahead = fitted.sample(windows[:5], 4000)
    assert ahead.shape == (4000, 5, 3)
    # Variances of 1, 2 and 3 steps: sums of squares of 0.3 * 0.8**k.
    steps = 0.3 * torch.tensor([1.0, 1.64, 2.0496]).sqrt()
    torch.testing.assert_close(ahead.std(0).mean(0), steps, rtol=0.1, atol=0)
    entropy = 0.5 * torch.log(2.0 * torch.pi * torch.e * torch.tensor(0.09))
    assert abs(float(-fitted.log_prob(windows).mean() / 3) - float(entropy)) < 0.05
    skewed = regimes(4000).unfold(0, 6, 1).unsqueeze(-1)
    rest = skewed[:, 3, 0] - GaussianAR(skewed, 3)._mean(skewed[:, :3, 0].double())
    assert float((rest / rest.std()).pow(4).mean()) > 3.8, "3 for a Gaussian"


def test_forecasters_draw_what_they_give_densities_of() -> None:
    data = SeriesData(length=300, past=6, horizon=2)
    windows = data.held_out[:4]
    module = SeriesModule(6, depth=1, num_heads=2, width=4, hidden=8).eval()
    with torch.no_grad():
        for made in (
            FlowForecaster(module, 0, 0.0),
            MaskedFlow(data.train, 6, 0.02, 16),
            GaussianAR(data.train, 6),
        ):
            draws = made.sample(windows, 400)
            assert draws.shape == (400, 4, 2)
            # -log p in the mean over draws is the entropy, which draws of another window exceed.
            own, other = (
                -made.log_prob(torch.cat([x[:, :6].repeat(400, 1, 1), draws.view(-1, 2, 1)], 1)).mean()
                for x in (windows, windows + 20.0)
            )
            assert torch.isfinite(own)
            assert made.seconds >= 0
            if not isinstance(made, FlowForecaster):
                assert own < other
