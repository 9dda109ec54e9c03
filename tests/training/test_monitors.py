"""What the callbacks measure while a model learns."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lipformer as lf
from tests.training.tiny import LIGHTNING_WARNINGS, Losses, data, module, trainer, write_corpus
from training.monitors import (
    CertificateMonitor,
    Deadline,
    InversionMonitor,
    OutOfTime,
    TextSample,
    Throughput,
    inversion_error,
    local_gains,
)
from training.report import Report, curve, draw, summary

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)


def watched(
    folder: Path, monitors: list[Any], logger: Any = False, **options: Any
) -> tuple[Report, Any]:
    report = Report(enabled=False)
    model = module(**options)
    fit = trainer(
        max_steps=4,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        callbacks=[*monitors, report],
        logger=logger,
    )
    fit.fit(model, data(folder))
    return report, model


CERTIFICATE = {"length": 5, "steps": 1, "restarts": 2, "budget": math.inf}


@pytest.mark.parametrize("variant", ["lipschitz", "invertible", "contractive", "l2"])
def test_the_certificate_stays_above_the_attack(tmp_path: Path, variant: str) -> None:
    write_corpus(tmp_path)
    report, model = watched(tmp_path, [CertificateMonitor(**CERTIFICATE)], variant=variant, lr=0.03)
    steps, bounds = curve(report.rows, "certificate/bound")
    _, estimates = curve(report.rows, "certificate/estimate")
    assert steps == [2.0, 4.0]
    assert all(0 < low <= high for low, high in zip(estimates, bounds, strict=True))
    # Logged in float32.
    assert bounds[-1] == pytest.approx(lf.certify(model.model.eval()).bound, rel=1e-6)
    _, around = curve(report.rows, "certificate/local")
    _, gains = curve(report.rows, "certificate/local_estimate")
    ladder = zip(gains, around, bounds, strict=True)
    assert all(0 < gain <= local * (1 + 1e-6) <= bound * (1 + 2e-6) for gain, local, bound in ladder)
    if variant == "invertible":
        assert len(set(bounds)) == 2, "the weights move, and the certificate with them"
        assert all(local < bound for local, bound in zip(around, bounds, strict=True))


@pytest.mark.parametrize("options", [{"radius": 0.0}, {"norm": "token"}])
def test_the_local_certificate_can_be_left_out(tmp_path: Path, options: dict[str, Any]) -> None:
    write_corpus(tmp_path)
    report, _ = watched(tmp_path, [CertificateMonitor(**CERTIFICATE, **options)])
    assert curve(report.rows, "certificate/local") == ([], [])
    assert len(curve(report.rows, "certificate/bound")[1]) == 2


def test_the_local_certificate_belongs_to_its_ball() -> None:
    """The radius is one of embedded tokens: with a hundred times as much the bound is another."""
    model = lf.models.invertible(7, dim=16, num_heads=2, num_layers=1).eval()
    tokens = torch.randint(7, (1, 6))
    local, gain = local_gains(model, tokens, 0.01)
    x = model.embed(tokens).detach()
    length = 0.01 * x.norm(dim=-1).median().item()
    assert local == pytest.approx(lf.certify(model, at=x, radius=length).bound, rel=1e-6)
    assert gain <= local < local_gains(model, tokens, 1.0)[0]


def test_without_a_certificate_only_the_estimate_is_logged(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    monitors = [CertificateMonitor(**CERTIFICATE), InversionMonitor()]
    report, _ = watched(tmp_path, monitors, variant="dot_product")
    assert curve(report.rows, "certificate/bound") == ([], [])
    assert curve(report.rows, "inversion/error") == ([], [])
    assert len(curve(report.rows, "certificate/estimate")[1]) == 2


def test_an_invertible_model_inverts_after_training(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    report, model = watched(tmp_path, [InversionMonitor(length=16, budget=math.inf)], lr=0.03)
    _, errors = curve(report.rows, "inversion/error")
    assert len(errors) == 2
    assert all(0 < error < 1e-4 for error in errors)
    # The negative control: the error of what was not inverted.
    tokens = torch.randint(8, (1, 16))
    model.model.invert = lambda hidden: hidden
    assert inversion_error(model.model, tokens) > 1e-2


def test_what_is_cut_is_told_and_made_up_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path)
    monitors = [
        InversionMonitor(length=16, budget=0.0),
        CertificateMonitor(**CERTIFICATE | {"budget": 0.0}),
    ]
    report, model = watched(tmp_path, monitors, logger=CSVLogger(tmp_path))
    cut = ["inversion/error", "certificate/local", "certificate/local_estimate", "certificate/estimate"]
    seen = [row for row in report.rows if "certificate/bound" in row]
    assert [row["step"] for row in seen] == [2.0, 4.0, 4.0]
    for name in cut:
        assert [math.isnan(row[name]) for row in report.rows if name in row] == [True, True, False]
        assert curve(report.rows, name)[0] == [4.0]
    assert all(row["certificate/bound"] > 0 for row in seen), "the constant is never cut"
    assert seen[-1]["certificate/estimate"] <= seen[-1]["certificate/bound"]
    out = capsys.readouterr().out
    assert [out.count(f"step {step}: no inversion/error: monitors may take 0") for step in (2, 4)] == [
        1,
        1,
    ]
    assert "no certificate/local, certificate/local_estimate, certificate/estimate" in out
    text = summary(report.rows, model, math.nan, "", [])
    assert "| inversion error, largest entry: validations without, for lack of time | 2 | 2, 4 |" in text
    logged = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert f"{monitors[0].final['inversion/error']!r}" in logged


def test_monitors_share_their_time(tmp_path: Path) -> None:
    """The second gets what the first leaves; with time enough nothing is cut or measured again."""
    write_corpus(tmp_path)
    rest = {}

    class Asked(InversionMonitor):
        def measure(self, model: Any, module: Any, seconds: float) -> dict[str, float]:
            rest[self.option] = seconds
            time.sleep(0.2)
            return {"inversion/error": 0.0}

    class Second(Asked):
        option = "second"

    first, second = Asked(budget=100.0), Second(budget=100.0)
    watched(tmp_path, [first, second])
    assert rest["second"] < rest["inversion"] - 0.19
    assert not first.final


def test_a_deadline_stops_what_calls_torch() -> None:
    done = []

    def work() -> None:
        with Deadline(0.05):
            while True:
                done.append(torch.ones(2) + 1)

    with pytest.raises(OutOfTime):
        work()
    assert len(done) > 3
    with Deadline(math.inf):
        assert float(torch.ones(2).sum()) == 2.0


def test_monitors_leave_training_alone(tmp_path: Path) -> None:
    """Their draws come from generators of their own, and modes are put back."""
    write_corpus(tmp_path)
    plain, watching = Losses(), Losses()
    watched(tmp_path, [plain], dropout=0.2)
    monitors = [
        CertificateMonitor(**CERTIFICATE),
        InversionMonitor(budget=math.inf),
        TextSample(max_new=9),
        Throughput(),
    ]
    _, model = watched(tmp_path, [watching, *monitors], dropout=0.2)
    assert plain.train == watching.train
    assert model.training


def test_text_is_written_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path)
    text = TextSample(prompt="to be", max_new=12, temperature=0.0)
    watched(tmp_path, [text])
    out = capsys.readouterr().out
    assert [f"--- step {step} ---" in out for step in (2, 4)] == [True] * 2
    assert text.text.startswith("to be")
    assert len(text.text) == 17


def test_text_stays_inside_a_limited_length(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    text = TextSample(max_new=500)
    watched(tmp_path, [text], variant="dot_product", positions="sinusoidal")
    assert len(text.text) == 16


def test_throughput_counts_characters(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    speed = Throughput()
    watched(tmp_path, [speed])
    assert speed.total_symbols == 4 * 4 * 16
    assert 0 < speed.total_seconds < 100


def test_the_report_of_a_resumed_run_shows_all_of_it(tmp_path: Path) -> None:
    first, second = Report(), Report()
    first.rows = [{"step": 1.0, "val/nats": 2.0}, {"step": 2.0, "val/bits": 1.0}]
    second.load_state_dict(first.state_dict())
    assert curve(second.rows, "val/nats") == ([1.0], [2.0])
    draw([{"step": 1.0, "train/nats": math.log(2.0)}], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png"}
