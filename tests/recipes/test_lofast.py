"""The recipe that draws LoFAST's bounds, in small."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from recipes.analysis import lofast

TINY = ["--tokens", "3", "--dim", "4", "--heads", "2", "--samples", "3", "--steps", "4", "--depth", "2"]


def test_it_writes_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lofast.main([*TINY, "--out", str(tmp_path / "new")])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["lofast.csv", "lofast.png"]
    with (tmp_path / "new" / "lofast.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lofast.KINDS) * len(lofast.RADII) + len(lofast.RESIDUALS) * 2
    for row in rows:
        assert 0.0 < float(row["attack"]) <= float(row["refined"]) <= float(row["plain"])
    assert (tmp_path / "new" / "lofast.png").stat().st_size > 10_000
    assert "movement / eps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be positive and finite, got 0"),
        (["--dim", "5"], "--dim must be a multiple of --heads, got 5 and 4"),
        (["--eps", "-1"], "--eps must be positive and finite, got -1.0"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        lofast.main(arguments)
    assert message in capsys.readouterr().err
