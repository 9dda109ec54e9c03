"""The recipe on mass splitting, in small."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from recipes.analysis import mass_splitting


def test_it_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "directory"
    sizes = ["--tokens", "3", "5", "--radii", "0.5", "4", "--draws", "3"]
    mass_splitting.main([*sizes, "--out", str(out)])
    printed = capsys.readouterr().out
    assert "2.398 unsplit, 2.667 split" in printed
    with (out / "mass_splitting.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 2 * 3
    for row in rows:
        assert float(row["split"]) >= float(row["unsplit"]) * (1 - 1e-12)
        assert float(row["attack"]) <= float(row["split"]) * (1 + 1e-2)
    decided = [row for row in rows if float(row["split"]) > 1.001 * float(row["unsplit"])]
    assert {(row["cloud"], row["attention"]) for row in decided} == {("centred", "dot-product")}
    assert all(float(row["attack"]) > 0.9 * float(row["split"]) for row in decided)
    assert (out / "mass_splitting.png").stat().st_size > 10_000
    assert sorted(path.name for path in out.iterdir()) == ["mass_splitting.csv", "mass_splitting.png"]
