"""What docs/hooks.py does to the pages of the site; `make docs` builds them strictly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


@pytest.mark.parametrize(
    ("html", "fetched"),
    [
        ('<script src="https://a.example/b.js"></script>', 1),
        ("<link rel=stylesheet href=//a.example/b.css>", 1),
        ('<img alt="x" src="http://a.example/b.png">', 1),
        ('<script src="../assets/tex-svg.js"></script><a href="https://a.example">x</a>', 0),
    ],
)
def test_a_page_that_fetches_is_a_warning(
    hooks: Any, html: str, fetched: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert hooks.on_post_page(html, page("a.md"), None) == html
    assert len(caplog.records) == fetched


def test_no_page_has_the_paths_of_a_server(hooks: Any) -> None:
    config = SimpleNamespace(theme=SimpleNamespace(static_templates={"404.html", "sitemap.xml"}))
    assert hooks.on_config(config).theme.static_templates == {"sitemap.xml"}


def test_results_are_a_page_with_its_pictures(hooks: Any) -> None:
    text = hooks.on_page_markdown("", page("results.md"), SimpleNamespace(docs_dir=DOCS), None)
    assert "](results/divergence.png)" in text
    assert "](recipes/" not in text
    assert "`recipes/vision/README.md`" in text


def test_an_option_is_one_piece(hooks: Any) -> None:
    html = hooks.on_page_content("a--b <code>fit --a.b_c X</code> <em>--d</em>", None, None, None)
    piece = '<span class="option">--a.b_c</span>'
    assert html == f"a--b <code>fit {piece} X</code> <em>--d</em>"


def test_docstrings_become_markdown(hooks: Any) -> None:
    text = "A (*, N) :math:`x\n  y`, :class:`~a.B`.\n\n.. math:: a +\n    b\n\n>>> 1 + 1\n2"
    assert hooks.as_markdown(text) == (
        "A (\\*, N) $x y$, `a.B`.\n\n$$\na + b\n$$\n\n\n```pycon\n>>> 1 + 1\n2\n```\n"
    )


def test_a_formula_does_not_end_its_item(hooks: Any) -> None:
    text = "* one:\n\n  .. math:: a\n    + b\n\n  of c.\n* two"
    assert hooks.as_markdown(text) == "* one:\n  $\\displaystyle a + b$\n  of c.\n* two"
