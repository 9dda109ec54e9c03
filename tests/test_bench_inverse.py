"""The benchmark of inverses: that it runs, and what its figures mean. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.bench.inverse import Counter, arguments, branches, main, peer_solvers

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "new" / "inverse.json"
    threads = torch.get_num_threads()
    sizes = ["--batch", "2", "--length", "6", "--dim", "8", "--heads", "2", "--scales", "1"]
    try:
        main(["--out", str(out), "--quick", "--threads", "1", *sizes])
    finally:
        torch.set_num_threads(threads)
    return json.loads(out.read_text())


def rows(document: dict[str, Any], solver: str) -> dict[str, dict[str, Any]]:
    return {row["branch"]: row for row in document["rows"] if row["solver"].startswith(solver)}


def test_every_solver_meets_every_branch(document: dict[str, Any]) -> None:
    names = {"attention, norm", "attention, causal", "feed-forward", "rotation"}
    solvers = {row["solver"] for row in document["rows"]}
    assert len(solvers) == 6
    for solver in solvers:
        assert set(rows(document, solver)) == names
    for package in ("torch", "normflows", "FrEIA"):
        assert document["environment"][package]
    assert document["settings"]["tols"] == [1e-3, 1e-6]


def test_ours_keeps_its_promise(document: dict[str, Any]) -> None:
    for row in rows(document, "lipformer").values():
        assert row["error"] <= row["promised"]
        assert row["error"] <= 1e-5
        assert row["evaluations"] >= 1


def test_freia_always_takes_its_fifty_iterations(document: dict[str, Any]) -> None:
    peer = rows(document, "FrEIA")
    assert {row["evaluations"] for row in peer.values()} == {51}
    assert peer["rotation"]["error"] > 1e-4, "which a slow contraction shows"
    assert rows(document, "lipformer, Anderson, tol 1e-06")["rotation"]["error"] < 1e-5


def test_normflows_stops_early(document: dict[str, Any]) -> None:
    assert rows(document, "normflows")["rotation"]["error"] > 5e-5


def test_peers_invert_our_branch() -> None:
    block = branches(8, 2, 6, 0.5)["attention, norm"].eval()
    counter = Counter(block.branch)
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        for inverse in peer_solvers(counter, 8).values():
            assert (inverse(block(x)) - x).abs().max() < 1e-2
    assert counter.calls > 50


def test_help_shows_defaults_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "(default: 64)",
        "(default: [1.0, 10.0])",
        "report/bench/inverse.json",
        "It takes",
    ):
        assert part in text


def test_the_default_output_is_no_tracked_file() -> None:
    ignored = (ROOT / ".gitignore").read_text().split("\n")
    assert f"{arguments([]).out.parts[0]}/" in ignored


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--heads", "7"], "--dim must be a multiple of --heads, got 64 and 7"),
        (["--coeffs", "1.0"], "each of --coeffs must lie between 0 and 1, got 1.0"),
    ],
)
def test_bad_sizes_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert message in capsys.readouterr().err
