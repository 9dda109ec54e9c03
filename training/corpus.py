"""Texts to learn from: where they come from, their split, and their characters as numbers.

Every source ends in one `datasets.DatasetDict` whose splits have a row for each line.
"""

from __future__ import annotations

import hashlib
import os
import pydoc_data.topics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from training.errors import BadInput, first_line

SPLITS = ("train", "valid", "test")
PTB = "ptb-text-only/ptb_text_only"
# `datasets` runs no loading scripts; the hub keeps this dataset's tables under a revision of its own.
REVISIONS = {PTB: "refs/convert/parquet"}
_OTHER_NAMES = {"valid": ("validation", "val"), "train": (), "test": ()}
# Columns that hold the text, most likely first.
TEXT_COLUMNS = ("text", "sentence", "content")
_MARK = "\ufeff"
# Files of rows with named columns, and what reads them.
TABLES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def embedded_text() -> str:
    """About 465 thousand characters of English that come with Python itself."""
    return "\n".join(pydoc_data.topics.topics.values())


def from_pydoc() -> datasets.DatasetDict:
    """The documentation that comes with Python, 90% to train on, 5% to validate and 5% to test."""
    return split_lines(embedded_text().splitlines())


def from_dir(path: str) -> datasets.DatasetDict:
    """Text files of a directory.

    The files ``train.txt``, ``valid.txt`` and ``test.txt``, or with a prefix as in ``ptb.train.txt``.
    Without a file for training all ``*.txt`` files are one text, in the order of their names, and its
    last tenth is held out.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(f"--data.path must be a directory with text files, got {path!r}")
    found = {split: _split_file(folder, split) for split in SPLITS}
    files = {split: [file] for split, file in found.items() if file is not None}
    if files and not files.keys() >= {"train", "valid"}:
        raise BadInput(
            f"{path} needs train.txt and valid.txt (test.txt is optional), got "
            f"{', '.join(sorted(file.name for (file,) in files.values()))}"
        )
    files = files or {"train": sorted(file for file in folder.glob("*.txt") if file.is_file())}
    if not files["train"]:
        raise BadInput(f"{path} has no text files; it needs train.txt, valid.txt, test.txt or any *.txt")
    # Not by `datasets`, which would keep a copy by path and time: the text is what the files hold now.
    lines = {split: [line for file in some for line in _lines(file)] for split, some in files.items()}
    return _rows(lines) if "valid" in files else split_lines(lines["train"])


def from_hub(name: str | None, revision: str | None = None, config: str | None = None) -> Any:
    """A text dataset of the Hugging Face hub, or a directory of tables in its layout."""
    name = PTB if name is None else name
    try:
        found = read(name, config, revision=revision or REVISIONS.get(name))
    except Exception as error:  # the hub's client raises a dozen unrelated classes
        raise BadInput(
            f"the dataset {name!r} could not be loaded from the hub ({first_line(error)}). Check name "
            "and network; or put train.txt, valid.txt and test.txt into a directory and use "
            "--data.source dir --data.path DIRECTORY"
        ) from error
    splits = {}
    for split in SPLITS:
        for key in (split, *_OTHER_NAMES[split]):
            if key in found:
                splits[split] = _text_column(found[key], name)
    if "train" not in splits:
        raise BadInput(f"the dataset {name!r} has no split to train on, only {', '.join(found)}")
    if "valid" not in splits:
        return split_lines(splits["train"]["text"])
    return datasets.DatasetDict(splits)


def read(path: str, name: str | None = None, **options: Any) -> datasets.DatasetDict:
    """`datasets.load_dataset` without progress bars: a directory, one table (a file) or the hub."""
    if Path(path).exists():
        # Its cache goes by path and time: what was rewritten in the same moment would not be read.
        options["cache_dir"] = str(Path(datasets.config.HF_DATASETS_CACHE) / _content(Path(path)))
    kind = Path(path).suffix.lower()
    if Path(path).is_file() or kind in TABLES:  # a file that is not there is not asked of the hub
        if kind not in TABLES:
            raise BadInput(f"a table must be one of {', '.join(TABLES)}, got {path!r}")
        options["data_files"], path = path, TABLES[kind]
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(path, name, **options)
    finally:
        if shown:
            datasets.enable_progress_bars()


def split_lines(lines: Iterable[str]) -> datasets.DatasetDict:
    """Lines in three parts by order: 90%, 5% and 5%."""
    rows = list(lines)
    first, second = len(rows) * 18 // 20, len(rows) * 19 // 20
    return _rows({"train": rows[:first], "valid": rows[first:second], "test": rows[second:]})


def _rows(lines: Mapping[str, list[str]]) -> datasets.DatasetDict:
    return datasets.DatasetDict(
        {split: datasets.Dataset.from_dict({"text": part}) for split, part in lines.items()}
    )


def ptb(line: str) -> str:
    """Penn Treebank's lines as characters: no space at the ends, an underscore for each inside."""
    return line.strip().replace(" ", "_")


def text_of(rows: datasets.Dataset, conversion: str) -> str:
    """The lines of a split as one text; each ends with a newline, which is a symbol like others.

    The byte-order mark that a file of the split may begin with is none.
    """
    convert = ptb if conversion == "ptb" else str
    return "".join(f"{convert(line.removeprefix(_MARK))}\n" for line in rows["text"])


def shown(characters: Iterable[str]) -> str:
    """The first ten of some characters, to be read."""
    some = [*map(repr, characters)]
    return ", ".join(some[:10]) + (", ..." if len(some) > 10 else "")


def known_text(text: str, vocabulary: str, unknown: str) -> str:
    """A text of the vocabulary's characters alone.

    Args:
        text: any.
        vocabulary: the characters that are known.
        unknown: what becomes of others: "drop", or "replace" by the replacement character, a question
            mark or a space, the first of them that is known.

    Raises:
        BadInput: none of them is.
    """
    mark = next((c for c in "\ufffd? " if c in vocabulary), None)
    if unknown == "replace" and mark is None:
        raise BadInput(
            "--data.unknown replace needs '\ufffd', '?' or ' ' in the vocabulary, which is "
            f"{vocabulary!r}; drop and extend need none"
        )
    others = set(text) - set(vocabulary)
    return text.translate(dict.fromkeys(map(ord, others), mark if unknown == "replace" else None))


def encode(text: str, vocabulary: str, what: str = "the text", instead: str = "") -> Tensor:
    """The numbers of a text's characters, (T,) int64, on the CPU whatever the default device is.

    Raises:
        BadInput: a character is not in the vocabulary; with ``instead``, what to do about it.
    """
    unknown = sorted(set(text) - set(vocabulary))
    if unknown:
        raise BadInput(
            f"{what} has {len(unknown)} characters that the model does not know: {shown(unknown)}; "
            f"its vocabulary is {vocabulary!r}{instead}"
        )
    # One table lookup for the whole text: UTF-32 has four bytes for every character.
    codes = np.frombuffer(text.encode("utf-32-le"), np.int32)
    table = np.zeros(1 + max(map(ord, vocabulary), default=0), np.int64)
    table[[ord(symbol) for symbol in vocabulary]] = range(len(vocabulary))
    return torch.from_numpy(table[codes])


def decode(codes: Tensor, vocabulary: str) -> str:
    """The text of numbers (T,)."""
    return "".join(vocabulary[i] for i in codes.tolist())


def _split_file(folder: Path, split: str) -> Path | None:
    for name in (split, *_OTHER_NAMES[split]):
        exact = folder / f"{name}.txt"
        if exact.is_file():
            return exact
        prefixed = sorted(folder.glob(f"*.{name}.txt"))
        if len(prefixed) > 1:
            raise BadInput(f"{folder} has several files *.{name}.txt: {', '.join(map(str, prefixed))}")
        if prefixed:
            return prefixed[0]
    return None


def _lines(file: Path) -> list[str]:
    """The lines of a file, which must hold some text in UTF-8."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} must be a text file in UTF-8: {first_line(error)}") from error
    if not text.removeprefix(_MARK).strip():
        raise BadInput(f"{file} is empty: it needs some text")
    return text.removesuffix("\n").split("\n")


def _content(folder: Path) -> str:
    """A digest of a file, or of all files of a directory, and of their names."""
    digest = hashlib.sha256()
    for file in sorted(file for file in (folder, *folder.rglob("*")) if file.is_file()):
        digest.update(os.fsencode(file.relative_to(folder)) + b" %d " % file.stat().st_size)
        with file.open("rb") as opened:
            for chunk in iter(lambda: opened.read(1 << 20), b""):
                digest.update(chunk)
    return digest.hexdigest()


def _text_column(rows: datasets.Dataset, name: str) -> datasets.Dataset:
    for column in TEXT_COLUMNS:
        if column in rows.column_names:
            return rows.select_columns([column]).rename_columns(
                {column: "text"} if column != "text" else {}
            )
    raise BadInput(
        f"the dataset {name!r} has no column {', '.join(TEXT_COLUMNS)}; its columns are "
        f"{', '.join(rows.column_names)}"
    )
