"""Corpora, windows and batches."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest
import torch

from tests.training.tiny import data, write_corpus
from training import corpus
from training.batches import EvaluationBatches, TrainingBatches
from training.data import CharacterData
from training.errors import BadInput
from training.windows import IGNORE_INDEX, Windows, sentences, stream, whole_stream

PTB = Path("/work/shared/data/ptb")


def test_ptb_lines_become_characters() -> None:
    assert corpus.ptb("  no it was n't black monday \r") == "no_it_was_n't_black_monday"


def test_numbers_lead_back_to_the_text() -> None:
    text = "to be, or not: ß 🙂\n"
    vocabulary = "".join(sorted(set(text)))
    codes = corpus.encode(text, vocabulary)
    assert corpus.decode(codes, vocabulary) == text
    assert int(codes.max()) == len(vocabulary) - 1
    with pytest.raises(BadInput, match=r"--prompt has 2 characters .* 'X', 'Y'; its vocabulary is"):
        corpus.encode("to X Y", vocabulary, "--prompt")


def test_unknown_characters_are_dropped_or_replaced() -> None:
    assert corpus.known_text("Zoë, ok", "ok ", "drop") == "o ok"
    assert corpus.known_text("Zoë, ok", "ok ", "replace") == " o   ok"
    assert corpus.known_text("Zoë, ok", "ok ?", "replace") == "?o?? ok"
    with pytest.raises(BadInput, match=r"replace needs .* in the vocabulary, which is 'ok'; drop"):
        corpus.known_text("Z", "ok", "replace")


def test_what_is_left_of_a_text_must_be_enough(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with pytest.raises(BadInput, match="the train text of .* has 0 characters; blocks of 16 need 32"):
        data(tmp_path, vocabulary="XY", unknown="drop").codes  # noqa: B018
    with pytest.raises(BadInput, match="packing sentences needs a vocabulary with a newline"):
        data(tmp_path, vocabulary="be", unknown="drop", packing="sentences").codes  # noqa: B018
    grown = data(tmp_path, vocabulary="zb", unknown="extend")
    assert grown.vocabulary[:3] == "zb\n"
    assert grown.codes["train"].max() == len(grown.vocabulary) - 1


def test_pydoc_needs_no_files() -> None:
    module = CharacterData(block=32, batch_size=8)
    module.setup("fit")
    sizes = {split: len(text) for split, text in module.texts.items()}
    assert sum(sizes.values()) > 300_000
    assert sizes["train"] > 10 * sizes["valid"]
    assert "\n" in module.vocabulary
    batch = next(iter(module.train_dataloader()))
    assert batch.inputs.shape == batch.targets.shape == (8, 32)
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])
    assert batch.symbols.item() == 8 * 32


def test_a_directory_of_splits(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "train.txt").rename(tmp_path / "my.train.txt")
    module = data(tmp_path)
    module.setup("fit")
    assert module.texts["train"] == (tmp_path / "my.train.txt").read_text()
    assert module.texts["test"] == (tmp_path / "test.txt").read_text()


def test_a_directory_of_any_texts_is_split(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(100)))
    texts = data(tmp_path).texts
    assert texts["train"].startswith("a 0\n")
    assert texts["test"].endswith("b 99\n")
    assert [text.count("\n") for text in texts.values()] == [180, 10, 10]


def test_a_dataset_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    """Tables of sentences, as Penn Treebank's are on the hub, through the same call."""
    for split, count in (("train", 40), ("validation", 10), ("test", 10)):
        rows = datasets.Dataset.from_dict({"sentence": [f" the n {i} " for i in range(count)]})
        rows.to_parquet(str(tmp_path / f"{split}.parquet"))
    module = CharacterData(source="hub", name=str(tmp_path), characters="ptb", block=8, batch_size=2)
    module.prepare_data()
    module.setup("fit")
    assert module.texts["valid"].startswith("the_n_0\nthe_n_1\n")
    assert len(module.texts["valid"].splitlines()) == 10


def test_a_corpus_that_is_rewritten_in_the_same_moment_is_read_anew(tmp_path: Path) -> None:
    """Files whose size and time do not change: what a cache by path and time would not notice."""
    texts, tables = write_corpus(tmp_path / "texts"), tmp_path / "tables"
    tables.mkdir()
    for letter in "ab":
        row = f"{letter} line of text"
        (texts / "train.txt").write_text(f"{row}\n" * 100)
        datasets.Dataset.from_dict({"text": [row] * 100}).to_parquet(str(tables / "train.parquet"))
        for file in (texts / "train.txt", tables / "train.parquet"):
            os.utime(file, ns=(10**18, 10**18))
        assert data(texts).texts["train"].startswith(row)
        assert CharacterData(source="hub", name=str(tables)).texts["train"].startswith(row)


def test_a_byte_order_mark_is_no_symbol(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} line\n" * 40, encoding="utf-8-sig")
    whole = data(tmp_path)
    assert "\ufeff" not in whole.vocabulary
    assert whole.texts["train"].startswith("a line\n")
    assert sum(text.count("\n") for text in whole.texts.values()) == 80
    (tmp_path / "a.txt").write_text("", encoding="utf-8-sig")
    with pytest.raises(BadInput, match="a.txt is empty"):
        data(tmp_path).setup("fit")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        assert args[0] == "ptb-text-only/ptb_text_only"
        assert kwargs["revision"] == "refs/convert/parquet"
        raise ConnectionError("Couldn't reach the hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(BadInput, match="from the hub .Couldn't reach the hub.* --data.path") as info:
        CharacterData(source="hub").setup("fit")
    assert "\n" not in str(info.value)


def test_a_table_without_text(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"label": [1, 2]}).to_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(BadInput, match="no column text.* its columns are label"):
        corpus.from_hub(str(tmp_path))


def test_what_cannot_be_used_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="needs --data.path"):
        CharacterData(source="dir")
    with pytest.raises(BadInput, match="must be a directory with text files, got '.*nowhere'"):
        data(tmp_path / "nowhere").setup("fit")
    with pytest.raises(BadInput, match="has no text files"):
        data(tmp_path).setup("fit")
    (tmp_path / "train.txt").write_text("a few words\n")
    with pytest.raises(BadInput, match=r"needs train.txt and valid.txt .* got train.txt"):
        data(tmp_path).setup("fit")
    (tmp_path / "valid.txt").write_text("more words\n")
    with pytest.raises(BadInput, match="the train text .* has 12 characters; blocks of 16 need 32"):
        data(tmp_path).setup("fit")
    (tmp_path / "train.txt").write_text("\n\n\n")
    with pytest.raises(BadInput, match="train.txt is empty: it needs some text"):
        data(tmp_path).setup("fit")
    (tmp_path / "train.txt").write_text("words " * 20)
    with pytest.raises(BadInput, match="windows, fewer than a batch of 64"):
        data(tmp_path, batch_size=64).train_dataloader()
    with pytest.raises(BadInput, match="the test text of .* is empty"):
        data(tmp_path).setup("test")


def test_every_symbol_is_predicted_once() -> None:
    codes = torch.arange(103)
    windows = whole_stream(codes, 16)
    batch = windows.batch(torch.arange(len(windows)), 1.0)
    assert torch.equal(batch.targets[batch.targets != IGNORE_INDEX], codes[1:])
    kept = batch.targets != IGNORE_INDEX
    assert torch.equal(batch.inputs[kept], codes[:-1])


@pytest.mark.parametrize("offset", [0, 5, 15])
def test_blocks_are_whole_for_every_offset(offset: int) -> None:
    for length in range(32, 66):
        windows = stream(torch.arange(length), 16, offset)
        assert len(windows) == (length - 16) // 16
        batch = windows.batch(torch.arange(len(windows)), 1.0)
        assert (batch.targets == batch.inputs + 1).all()
        assert int(batch.targets.max()) < length


def test_sentences_are_lines_with_their_newline() -> None:
    text = "abc\n\nabcdefgh\nb\n"
    vocabulary = "\nabcdefgh"
    windows = sentences(corpus.encode(text, vocabulary), 0, 5)
    pieces = []
    for i in range(len(windows)):
        batch = windows.batch(torch.tensor([i]), 1.0)
        kept = batch.targets[0] != IGNORE_INDEX
        pieces.append(corpus.decode(batch.targets[0][kept], vocabulary))
        assert batch.inputs.shape[1] % 5 == 0
    assert pieces == ["abc\n", "\n", "abcde", "fgh\n", "b\n"]
    assert "".join(pieces) == text
    cut = windows.batch(torch.tensor([3]), 1.0)
    assert vocabulary[cut.inputs[0, 0]] == "e", "a cut line goes on from its last character"


def training_batches(rank: int = 0, world: int = 1, size: int = 4, done: int = 0) -> TrainingBatches:
    codes = torch.arange(200)
    lengths = torch.randint(3, 9, (40,), generator=torch.Generator().manual_seed(0))
    windows = Windows(codes, 1 + 4 * torch.arange(40), lengths)
    return TrainingBatches(lambda g: windows, size, 7, lambda: (2, done), rank, world)


def test_processes_share_the_batch_of_one() -> None:
    whole = list(training_batches(size=8))
    halves = [list(training_batches(rank, 2)) for rank in range(2)]
    assert len(whole) == len(halves[0]) == 5
    for one, first, second in zip(whole, *halves, strict=True):
        rows = [row[row != IGNORE_INDEX] for part in (first, second) for row in part.targets]
        for mine, theirs in zip(one.targets, rows, strict=True):
            assert torch.equal(mine[mine != IGNORE_INDEX], theirs)
        assert first.symbols == second.symbols == one.symbols / 2


def test_batches_have_windows_of_like_length() -> None:
    _, order = training_batches().epoch(0)
    lengths = training_batches().windows(torch.Generator()).lengths[order]
    assert (lengths.amax(1) - lengths.amin(1)).float().mean() < 1.0
    assert order.flatten().unique().numel() == 40
    assert not torch.equal(order, training_batches().epoch(1)[1])


def test_it_goes_on_after_the_batches_that_are_done() -> None:
    whole, rest = list(training_batches()), list(training_batches(done=3))
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(whole[3:], rest, strict=True))


def test_other_batches_are_not_resumed() -> None:
    state = training_batches().state_dict()
    training_batches().load_state_dict(state)
    training_batches(world=2, size=2).load_state_dict(state)
    with pytest.raises(BadInput, match="its batch_size was 4, now it is 5"):
        training_batches(size=5).load_state_dict(state)


def test_evaluation_covers_all_in_every_process() -> None:
    windows = whole_stream(torch.arange(150), 16)
    parts = [list(EvaluationBatches(windows, 3, rank, 2)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == 2
    seen = torch.cat([b.targets[b.targets != IGNORE_INDEX] for part in parts for b in part])
    assert torch.equal(seen.sort().values, torch.arange(1, 150))
    assert sum(b.symbols.item() for part in parts for b in part) == 149


@pytest.mark.parametrize("packing", ["stream", "sentences"])
def test_it_stays_on_the_cpu_whatever_the_default_device(tmp_path: Path, packing: str) -> None:
    """Lightning calls `configure_model`, which first needs the text, under the GPU as default."""
    write_corpus(tmp_path)
    expected, module = data(tmp_path, packing=packing), data(tmp_path, packing=packing)
    with torch.device("meta"):
        module.setup("fit")
        first = module.first_tokens(2, 8)
        batches = [next(iter(loader)) for loader in (module.train_dataloader(), module.val_dataloader())]
    assert torch.equal(first, expected.first_tokens(2, 8))
    wanted = [next(iter(loader)) for loader in (expected.train_dataloader(), expected.val_dataloader())]
    for mine, theirs in zip(batches, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.skipif(not PTB.is_dir(), reason="Penn Treebank is not on this machine")
def test_penn_treebank_has_the_published_counts() -> None:
    module = CharacterData(source="dir", path=str(PTB), characters="ptb")
    counts = {split: (len(text), len(set(text))) for split, text in module.texts.items()}
    assert counts == {"train": (5_017_482, 50), "valid": (393_042, 50), "test": (442_423, 48)}
