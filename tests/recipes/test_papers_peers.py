from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recipes.papers import peers
from recipes.papers.experiment import section

GOOD: dict[tuple[str, str, str], Any] = {
    **{("peer", name, "version"): "1.0" for name in peers.PEERS},
    ("attention", peers.OURS, "256 tokens, time"): 0.8,
    (peers.GAIN, peers.DOT, "1000"): 5e5,
    (peers.GAIN, peers.OURS, "1000"): 2.0,
    (peers.GAIN, peers.OURS, "certificate"): 13.0,
    ("linear layer", peers.TORCH, "averaged"): 5.0,
    ("linear layer", "lipformer cap", "averaged"): 1.0,
    ("linear layer", "lipformer cap", "time"): 7.0,
    ("inverse", "lipformer, plain, tol 1e-06", "rotation"): 1e-7,
    ("inverse", "lipformer, plain, tol 1e-06", "of its promise"): 0.1,
    ("log-determinant", "lipformer", "eval, nats"): 0.0,
    ("tool", peers.BELOW, "linear map"): 1.12,
    ("tool", peers.POWER, "linear map"): 1.10,
    ("tool", peers.ABOVE, "linear map"): 1.13,
    ("tool", peers.ABOVE, "dot-product block"): None,
}


def rows() -> list[dict[str, Any]]:
    return [
        row for (part, name, column), v in GOOD.items() for row in peers._rows(part, name, {column: v})
    ]


def test_a_run_as_claimed_holds_and_has_a_table_for_each_question() -> None:
    page = section(peers.EXPERIMENT, rows())
    assert "\n\nHolds: norm at most 1.0000 (torch 5)" in page
    assert page.count("|---") == sum(2 + extra for extra in (0, 0, 1, 1, 1, 0, 1))
    assert "Not installed" not in page


@pytest.mark.parametrize(
    ("broken", "value"),
    [
        ((peers.GAIN, peers.OURS, "1000"), 13.1),
        (("linear layer", "lipformer cap", "averaged"), 1.0001),
        (("inverse", "lipformer, plain, tol 1e-06", "of its promise"), 1.1),
        (("log-determinant", "lipformer", "eval, nats"), 1e-3),
        (("tool", peers.BELOW, "linear map"), 1.14),
    ],
)
def test_what_is_not_as_claimed_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: tuple[str, str, str], value: float
) -> None:
    monkeypatch.setitem(GOOD, broken, value)
    assert peers.EXPERIMENT.judge(rows()).holds is False


def test_a_peer_that_is_missing_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent = partial(peers._peer, "no_such_module", "Linear")
    monkeypatch.setattr(peers, "LINEAR", {peers.TORCH: peers._torch, "absent": absent})
    assert {row["name"] for row in peers.norms(4, 1, 1, 0.0, tmp_path)} == {peers.TORCH}
    monkeypatch.setitem(GOOD, ("peer", "FrEIA", "version"), None)
    assert peers.EXPERIMENT.judge(rows()).text.endswith("Not installed and left out: FrEIA.")
