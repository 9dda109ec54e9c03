"""The recipes of recipes/analysis say what they do, and their tables fit a narrow terminal."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import pytest
from rich.console import Console

from recipes.analysis import how_smooth, lofast, mass_splitting


@pytest.mark.parametrize("recipe", [how_smooth, lofast, mass_splitting])
def test_help_has_the_whole_header_and_each_default_once(
    recipe: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        recipe.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert (recipe.__doc__ or "").strip() in shown
    options = [line for line in shown.splitlines() if re.match(r"  (-h, )?--", line)]
    assert len(options) > 5
    text = " ".join(shown.partition("options:")[2].split())
    for option in text.split(" --")[2:]:
        assert option.count("(default") == 1, option


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (how_smooth, ["--sequences", "0"], "--sequences must be positive and finite, got 0"),
        (how_smooth, ["--depth", "0"], "--depth must be positive and finite, got 0"),
        (how_smooth, ["--tol", "0"], "--tol must be positive and finite, got 0.0"),
        (how_smooth, ["--heads", "3", "--width", "16"], "a multiple of --heads, got 16 and 3"),
        (lofast, ["--eps", "nan"], "--eps must be positive and finite, got nan"),
        (mass_splitting, ["--radii", "1", "inf"], "--radii must be positive and finite, got [1.0, inf]"),
        (mass_splitting, ["--step", "nan"], "--step must be positive and finite, got nan"),
        (mass_splitting, ["--tokens", "4099"], "at most 4096, got [4099] and 2"),
    ],
)
def test_bad_options_end_in_one_line_and_leave_nothing(
    recipe: ModuleType,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        recipe.main([*arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", [how_smooth, lofast, mass_splitting])
def test_a_place_that_cannot_be_written_in_is_told_before_the_work(
    recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "file"
    place.write_text("kept")
    with pytest.raises(SystemExit) as stop:
        recipe.main(["--out", str(place)])
    assert stop.value.code == 2
    assert "--out must be a directory that can be written in" in capsys.readouterr().err
    assert place.read_text() == "kept"


def test_the_table_of_splits_fits_80_columns() -> None:
    rows = [
        mass_splitting.Row(cloud, attention, 2, 25, 8.0, draw, 12.345, 23.456, 0.1, 23.4)
        for cloud in ("random", "centred")
        for attention in ("dot-product", "L2")
        for draw in range(30)
    ]
    shown = StringIO()
    mass_splitting.show(rows, Console(file=shown, width=80))
    assert "dot-product" in shown.getvalue()
    assert "30 of 30" in shown.getvalue()
    assert all(name in shown.getvalue() for name in ("attention", "decides", "unsplit", "attack"))


def test_the_depth_axis_counts_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    rows: list[lofast.Row] = [
        {
            "experiment": what,
            "kind": kind,
            "depth": i,
            "eps": 0.1 * i,
            "attack": 1,
            "refined": 2,
            "plain": 3,
        }
        for what, kinds in (("eps", lofast.KINDS), ("depth", lofast.RESIDUALS))
        for kind in kinds
        for i in (1, 2, 3)
    ]
    monkeypatch.setattr(plt, "close", lambda figure: None)
    lofast.draw(rows, tmp_path / "lofast.png")  # type: ignore[operator]
    axis = plt.gcf().axes[2]
    assert axis.get_xlabel() == "depth"
    assert all(tick == round(tick) for tick in axis.get_xticks())
    monkeypatch.undo()
    plt.close("all")
