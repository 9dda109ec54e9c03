from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.papers import peers
from recipes.papers.experiment import section

SOLVER = "lipformer, plain, tol 1e-06"
GOOD: dict[tuple[str, str, str], Any] = {
    **{("peer", name, "version"): "1.0" for name in peers.PEERS},
    ("attention", peers.OURS, "256 tokens, time"): 0.8,
    (peers.GAIN, peers.DOT, "1000"): 5e5,
    (peers.GAIN, peers.OURS, "1000"): 2.0,
    (peers.GAIN, peers.OURS, "certificate"): 13.0,
    (peers.LINEAR, peers.TORCH, "averaged"): 5.0,
    (peers.LINEAR, "lipformer cap", "averaged"): 1.0,
    (peers.LINEAR, "lipformer normalize", "averaged"): 0.9,
    (peers.LINEAR, "lipformer cap", "time"): 7.0,
    ("inverse", SOLVER, "rotation"): 1e-7,
    ("inverse", SOLVER, "of its promise"): 0.1,
    (peers.DET, "lipformer", "eval, nats"): 0.0,
    ("tool", peers.ATTACK, "MLP"): 1.12,
    ("tool", peers.CERTIFY, "MLP"): 1.13,
    ("tool", peers.CERTIFY, "dot-product block"): None,
}


def rows() -> list[dict[str, Any]]:
    return [
        {"part": part, "name": name, "column": column, "value": v}
        for (part, name, column), v in GOOD.items()
    ]


def test_a_run_as_claimed_holds_and_has_a_table_for_each_question() -> None:
    page = section(peers, rows(), "peers.png")
    assert "\n\nHolds: norm at most 1.0000 (torch 5)" in page
    questions = ("attention", peers.GAIN, peers.LINEAR, "inverse", peers.DET, "tool")
    assert all(page.count(f"\n| {question} |") == 1 for question in questions)


@pytest.mark.parametrize(
    ("broken", "value"),
    [
        ((peers.GAIN, peers.OURS, "1000"), 13.1),
        ((peers.LINEAR, "lipformer cap", "averaged"), 1.0001),
        (("inverse", SOLVER, "of its promise"), 1.1),
        ((peers.DET, "lipformer", "eval, nats"), 1e-3),
        (("tool", peers.ATTACK, "MLP"), 1.14),
    ],
)
def test_what_is_not_as_claimed_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: tuple[str, str, str], value: float
) -> None:
    monkeypatch.setitem(GOOD, broken, value)
    assert peers.judge(rows()).holds is False


def test_a_peer_that_is_missing_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(module: str, name: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr(peers, "_peer", absent)
    sizes = (peers.LINEAR, peers.norms, (4, 1, 1, 0.0))
    found = {row["name"] for row in peers.measure(*sizes, tmp_path)}
    assert found == {name for name in peers.LINEARS if name.split()[0] in ("torch", "lipformer")}
    monkeypatch.setitem(GOOD, ("peer", "FrEIA", "version"), None)
    assert "FrEIA not installed" in peers.judge(rows()).text
