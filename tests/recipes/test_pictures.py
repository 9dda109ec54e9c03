"""The pictures of docs/pictures.md."""

from __future__ import annotations

from pathlib import Path

from recipes.pictures import main


def test_the_pictures_of_the_docs(tmp_path: Path) -> None:
    assert main([f"--out={tmp_path}", "--steps=1"]) == 0
    for name in ("certificate", "gain"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
