"""Every function that returns a bound, over random trees of modules: it refuses, or the bound holds.

A failure prints seeds, and shrunk cases which can be pasted: ``checks.examine(trees.Case(...))``. One
seed: ``checks.examine(draw(seed))``. The second half of the slow trees is in test_more_trees.py, so that
two workers share them.
"""

from __future__ import annotations

import pytest

from tests.promises.checks import examine_seeds


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_a_bound_holds_or_is_refused(first: int) -> None:
    examine_seeds(range(first, first + 100))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 500))
def test_a_bound_holds_or_is_refused_in_more_trees(first: int) -> None:
    examine_seeds(range(first, first + 500))
