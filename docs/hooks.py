"""What the site needs beyond the plugins of mkdocs.yml."""

from __future__ import annotations

import logging
import os
import re
import textwrap
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
# What a browser fetches by itself.
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'>\s]*)"""
)
CODE = re.compile(r"<code>[^<]*</code>")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
MATHJAX = "sphinx-mathjax-offline/static/mathjax/tex-svg.js"


def on_config(config: Any) -> Any:
    """Leaves out 404.html: its paths are those of a server."""
    config.theme.static_templates.discard("404.html")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds MathJax, which is one file and needs no fonts."""
    path = distribution("sphinx-mathjax-offline").locate_file(MATHJAX)
    files.append(File.generated(config, "assets/tex-svg.js", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Shows RESULTS.md as a page; where the repository links to files outside docs/, it names them."""
    docs = Path(config.docs_dir).resolve()
    here = docs / page.file.src_uri
    start = here.parent
    if page.file.src_uri == "results.md":
        markdown, start = (ROOT / "RESULTS.md").read_text(encoding="utf-8"), ROOT

    def replace(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups()
        path = (start / target).resolve()
        if path.is_relative_to(docs):
            return f"{image}[{text}]({os.path.relpath(path, here.parent)}{anchor or ''})"
        name = f"`{path.relative_to(ROOT)}`"
        return name if text.strip("`") in name else f"{text} ({name})"

    return LINK.sub(replace, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Options of commands are not broken behind a dash."""
    return CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """A strict build fails where a page would fetch something from the network."""
    for address in FETCHED.findall(output):
        logging.getLogger("mkdocs.hooks").warning("%s fetches %s", page.file.src_uri, address)
    return output


class Roles(griffe.Extension):
    """Docstrings have Sphinx's roles and bare examples; mkdocstrings takes Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    def display(found: re.Match[str]) -> str:
        indent, first, rest = found.groups()
        formula = " ".join([first, *rest.split()])
        # Markdown takes no display that is indented, and ends a list's item at an empty line.
        return f"\n{indent}$\\displaystyle {formula}$\n" if indent else f"\n\n$$\n{formula}\n$$\n\n"

    def example(found: re.Match[str]) -> str:
        return f"\n```pycon\n{textwrap.dedent(found[0])}\n```\n"

    text = re.sub(r"(?m)\n*^( *)\.\. math:: *(.*)((?:\n\1 +\S.*)*)\n*", display, text)
    text = re.sub(r"(?m)^( *)>>> .*(?:\n\1 *\S.*)*", example, text)
    text = re.sub(r":math:`([^`]*)`", lambda found: f"${' '.join(found[1].split())}$", text)
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return re.sub(r"(`[^`]*`)|\(\*,", lambda found: found[1] or r"(\*,", text)
