"""The second half of the slow trees: see test_trees.py."""

from __future__ import annotations

import pytest

from tests.promises.checks import examine_seeds


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6000, 11000, 500))
def test_a_bound_holds_or_is_refused_in_still_more_trees(first: int) -> None:
    examine_seeds(range(first, first + 500))
