"""Every function that returns a bound, over random trees of modules: it refuses, or the bound holds.

A failure prints seeds, and shrunk cases which can be pasted: ``checks.examine(trees.Case(...))``. One
seed: ``checks.examine(draw(seed))``. The second half of the slow trees is in test_more_trees.py, so that
two workers share them.
"""

from __future__ import annotations

import dataclasses

import pytest

import lipformer as lf
from lipformer.certificate import Certificate
from tests.promises.checks import examine, examine_seeds
from tests.promises.draw import draw
from tests.promises.trees import is_local, planted


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_a_bound_holds_or_is_refused(first: int) -> None:
    examine_seeds(range(first, first + 100))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 500))
def test_a_bound_holds_or_is_refused_in_more_trees(first: int) -> None:
    examine_seeds(range(first, first + 500))


def test_bounds_too_small_by_a_tenth_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    certify = lf.certify
    monkeypatch.setattr(
        lf, "certify", lambda *args, **kwargs: _smaller(certify(*args, **kwargs), factor=0.9)
    )
    cases = [case for case in map(draw, range(60)) if not planted(case) and not is_local(case)]
    outcomes = [examine(case, ("certify",)) for case in cases]
    bounded = [outcome for outcome in outcomes if outcome.bounds and outcome.runs]
    noticed = [outcome for outcome in bounded if outcome.failure is not None]
    assert len(noticed) >= 0.4 * len(bounded) > 0, f"{len(noticed)} of {len(bounded)}"


def _smaller(certificate: Certificate, factor: float) -> Certificate:
    return dataclasses.replace(certificate, bound=certificate.bound * factor)
