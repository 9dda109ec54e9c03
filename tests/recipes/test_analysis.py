"""The recipes of recipes/analysis say what they do and what they cannot, before the work."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType

import pytest

from recipes.analysis import how_smooth, lofast, mass_splitting

RECIPES = [how_smooth, lofast, mass_splitting]


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_has_the_whole_header_and_the_defaults(
    recipe: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        recipe.main(["--help"])
    shown = capsys.readouterr().out
    assert (recipe.__doc__ or "").strip() in shown
    assert "(default: report/" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (how_smooth, ["--sequences", "0"], "invalid PositiveInt value: '0'"),
        (how_smooth, ["--lengths", "4", "4"], "two different lengths to fit a growth, got [4, 4]"),
        (how_smooth, ["--text", "none.txt"], "--text must be UTF-8 text, got 'none.txt'"),
        (how_smooth, ["--special"], "--special needs a tokenizer"),
        (how_smooth, ["--adversarial", "--bound", "min"], "leave out --bound, got min"),
        (lofast, ["--eps", "nan"], "invalid PositiveFloat value: 'nan'"),
        (mass_splitting, ["--tokens", "3", "4"], "--tokens must be odd numbers >= 3, got [3, 4]"),
    ],
)
def test_bad_options_end_in_one_line_and_leave_nothing(
    recipe: ModuleType,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        code = recipe.main([*arguments, "--out", str(tmp_path / "out")])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_place_that_cannot_be_written_in_is_told_before_the_work(
    recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "file"
    place.write_text("kept")
    assert recipe.main(["--out", str(place)]) == 2
    assert "--out must be a directory that can be written in" in capsys.readouterr().err
    assert place.read_text() == "kept"


def test_lofast_writes_a_table_and_a_picture(tmp_path: Path) -> None:
    sizes = ["--tokens=3", "--dim=4", "--heads=2", "--samples=3", "--steps=4", "--depth=2"]
    assert lofast.main([*sizes, "--out", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["lofast.csv", "lofast.png"]
    with (tmp_path / "new" / "lofast.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lofast.KINDS) * len(lofast.RADII) + len(lofast.RESIDUALS) * 2
    for row in rows:
        assert 0.0 < float(row["attack"]) <= float(row["refined"]) <= float(row["plain"])
    assert (tmp_path / "new" / "lofast.png").stat().st_size > 10_000
