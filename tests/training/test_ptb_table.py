"""recipes.ptb.table: means over seeds, equal steps alone, and a broken certificate is told of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from recipes.ptb.table import Run, main, read_run, table
from tests.training.tiny import checkpoint
from training.checkpoints import write_checkpoint
from training.errors import BadInput

RUN = Run("l2", 10, 100, 1.5, (8.0, 9.0), (2.0, 3.0), 1000.0, None)


def write_run(folder: Path, nats: float, bound: object = 9.0, estimate: object = 3.0) -> int:
    """A finished run; returns its number of parameters."""
    saved = checkpoint("l2")
    write_checkpoint(saved, folder / "checkpoints" / "last.ckpt")
    (folder / "metrics.csv").write_text(
        "certificate/bound,certificate/estimate,step,train/characters_per_second,val/nats\n"
        f",,49,500,\n8.0,2.0,49,,2.0\n,,99,700,\n{bound},{estimate},99,,{nats}\n"
    )
    return sum(weight.numel() for weight in saved["state_dict"].values())


def test_a_run_is_read(tmp_path: Path) -> None:
    parameters = write_run(tmp_path / "l2" / "0", 1.5)
    expected = dataclasses.replace(RUN, parameters=parameters, speed=600.0)
    assert read_run(tmp_path / "l2" / "0") == expected


def test_seeds_are_averaged_and_the_gap_is_shared() -> None:
    runs = [
        RUN,
        dataclasses.replace(RUN, nats=1.7, bounds=(1.0, 20.0)),
        dataclasses.replace(RUN, variant="dot_product", nats=1.0, bounds=()),
        dataclasses.replace(RUN, variant="contractive_kim2021", nats=3.0, inversion=2e-6),
    ]
    lines = table(runs).splitlines()
    assert lines[0].startswith("100 steps")
    assert [line.split(" | ")[0] for line in lines[4:]] == [
        "| dot_product",
        "| l2",
        "| contractive_kim2021",
    ]
    assert "| none |" in lines[4]
    assert "| 2 | 1.600 (1.500 to 1.700) | 2.308 | 70% | 20 | 3 |" in lines[5]
    assert "| 0% | 9 | 3 | 2.0e-06 |" in lines[6]


def test_unequal_steps_are_refused() -> None:
    with pytest.raises(BadInput, match=r"equal numbers of steps .* got \[100, 101\]"):
        table([RUN, dataclasses.replace(RUN, steps=101)])


def test_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    write_run(tmp_path / "l2" / "0", 1.5)
    assert main([str(tmp_path)]) == 0
    assert "At each of 2 validations" in capsys.readouterr().out
    write_run(tmp_path / "l2" / "1", 1.5, bound=2.9)
    assert main([str(tmp_path)]) == 1
    told = "no certificate at or above the attack: l2 (certified 2.9, attack 3)"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bound", "estimate"), [("nan", 3.0), (9.0, "nan"), ("nan", "nan"), (9.0, ""), ("", 3.0)]
)
def test_what_is_not_a_number_is_no_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bound: object, estimate: object
) -> None:
    write_run(tmp_path / "l2" / "0", 1.5, bound, estimate)
    assert main([str(tmp_path)]) == 1
    assert "no certificate at or above the attack: l2 (" in capsys.readouterr().err


def test_attacks_that_were_cut_are_left_out_but_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "l2" / "0"
    write_run(folder, 1.5)
    head = "certificate/bound,certificate/estimate,inversion/error,step,val/nats\n"
    cut = "2.5,nan,nan,49,1.5\n"
    (folder / "metrics.csv").write_text(f"{head}{cut}2.6,2.0,1e-6,49,\n")
    run = read_run(folder)
    assert (run.bounds, run.estimates, run.inversion, run.broken) == ((2.6,), (2.0,), 1e-6, "")
    (folder / "metrics.csv").write_text(head + cut)
    assert read_run(folder).broken


def test_bounds_meet_the_attacks_of_their_own_row(tmp_path: Path) -> None:
    """The first row has no bound: the second's 2.5 is above the first attack, and below its own."""
    folder = tmp_path / "l2" / "0"
    write_run(folder, 1.5)
    (folder / "metrics.csv").write_text(
        "certificate/bound,certificate/estimate,step,val/nats\n,2.0,49,2.0\n2.5,3.0,99,1.5\n4.0,2.0,99,1.5\n"
    )
    run = read_run(folder)
    assert run.bounds[1:] == (2.5, 4.0)
    assert run.estimates == (2.0, 3.0, 2.0)
    assert dataclasses.replace(run, bounds=run.bounds[1:], estimates=run.estimates[1:]).broken
    (folder / "metrics.csv").write_text("certificate/estimate,step,val/nats\n2.0,49,2.0\n")
    assert (read_run(folder).bounds, read_run(folder).broken) == ((), "")


def test_bad_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "there are no runs" in capsys.readouterr().err
    write_run(tmp_path / "l2" / "0", 1.5)
    (tmp_path / "l2" / "0" / "metrics.csv").write_text("step,val/nats\n9,\n")
    assert main([str(tmp_path)]) == 2
    assert "it has not ended" in capsys.readouterr().err
