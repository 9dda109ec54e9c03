"""Texts with labels: any table of the hub or on disk, or opinions that are made up (no network)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import datasets
import lightning as L
import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from training import corpus
from training.batches import for_gpu
from training.errors import BadInput, first_line

LABEL_COLUMNS = ("label", "labels", "target")
# What splits may be called, and what is held out of the training texts where there is no such split.
_NAMES = {"test": ("test",), "val": ("validation", "valid", "val", "dev")}
_HELD_OUT = {"test": 0.2, "val": 0.1}
PAD, UNKNOWN = "[PAD]", "[UNK]"

_THINGS = ("plot", "cast", "music", "script", "ending", "camera", "humour", "pace", "dialogue", "hero")
_GOOD = ("good", "great", "moving", "fresh", "clever", "warm", "fine", "gripping", "bright", "funny")
_BAD = ("bad", "poor", "dull", "stale", "silly", "cold", "weak", "tedious", "bleak", "clumsy")
_DEGREES = ("", "", "very ", "quite ", "really ", "rather ")


class TextBatch(NamedTuple):
    """Texts as numbers, filled up to the longest.

    Attributes:
        tokens: (B, N), int64.
        labels: (B,), int64.
        padding: (B, N), True where there is no token.
    """

    tokens: Tensor
    labels: Tensor
    padding: Tensor


class LabelledTexts(NamedTuple):
    """Texts and their labels, as numbers of classes."""

    texts: list[str]
    labels: list[int]


def opinions(count: int, seed: int) -> LabelledTexts:
    """Texts of one or three clauses, each with an opinion; the label is that of most of them.

    A clause is "the plot is very good", "the plot is bad" or "the plot is not good": a word alone does
    not tell, since a third of the opinions is negated.
    """
    draw = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        clauses, votes = [], 0
        for _ in range(draw.choice((1, 3))):
            good, negated = draw.random() < 0.5, draw.random() < 1 / 3
            word = draw.choice(_GOOD if good != negated else _BAD)
            degree = "not " if negated else draw.choice(_DEGREES)
            clauses.append(f"the {draw.choice(_THINGS)} is {degree}{word}")
            votes += 1 if good else -1
        texts.append(f" {draw.choice(('and', 'but', 'while'))} ".join(clauses) + ".")
        labels.append(int(votes > 0))
    return LabelledTexts(texts, labels)


def train_tokenizer(texts: Sequence[str], kind: str, size: int, least: int) -> Any:
    """A tokenizer of Hugging Face whose symbols are those of the texts.

    Args:
        texts: to learn the symbols of.
        kind: "words" (lower case, punctuation apart) or "characters".
        size: most symbols, the most frequent ones; two of them stand for padding and for all others.
        least: how often a word must come.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    if kind == "words":
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, min_frequency=least, special_tokens=[PAD, UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN)


def load_tokenizer(name: str) -> Any:
    """A tokenizer by its name on the hub or from a directory; without a symbol for padding, 0 pads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub's client raises a dozen unrelated classes
        raise BadInput(
            '--data.tokenizer must be "words", "characters", or a tokenizer of Hugging Face (a '
            f"directory or a name on the hub), got {name!r}: {first_line(error)}"
        ) from error


class ByLength(Sampler[int]):
    """Texts in the order of batches that have about one length each: few tokens are padding.

    Texts in random order are sorted in parts of 50 batches, so that batches differ from epoch to epoch.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self.lengths, self.batch_size = lengths, batch_size

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size * self.batch_size

    def __iter__(self) -> Iterator[int]:
        with torch.device("cpu"):
            parts = torch.randperm(len(self.lengths))[: len(self)].split(50 * self.batch_size)
            order = [i for part in parts for i in sorted(part.tolist(), key=self.lengths.__getitem__)]
            batches = torch.tensor(order).view(-1, self.batch_size)
            drawn = batches[torch.randperm(len(batches))].flatten().tolist()
        yield from drawn


class TextData(L.LightningDataModule):
    """Texts to train on, to follow the training by, and to judge by.

    A table needs a column of texts and one of labels, numbers or names. Without a split to judge by (or
    with hidden labels, -1) that for validation is it, else a fifth of the training texts; without one
    for validation it is a tenth of the training texts. What is held out is drawn once, whatever the seed
    of a run is.

    Args:
        path: a data set on the Hugging Face hub by its name, a directory of tables in its layout, or
            one file .csv, .json, .jsonl or .parquet; default opinions that are made up.
        config: the hub data set's own configuration, if it has several.
        text: the column of texts; default text, sentence or content.
        label: the column of labels; default label, labels or target.
        tokenizer: "words" or "characters", learnt from the training texts, or a tokenizer of Hugging
            Face by its name or directory.
        vocab_size: most words or characters.
        min_count: how often a word must come in the training texts to be known.
        max_len: tokens of a text; what is longer is cut.
        batch_size: texts of a batch.
        by_length: put texts of about one length into a training batch, which then has less padding.
        train_texts: use only so many training texts.
        test_texts: judge by the first so many test texts.

    Example:
        >>> data = TextData(batch_size=4)
        >>> batch = next(iter(data.val_dataloader()))
        >>> batch.labels.shape, batch.tokens.shape == batch.padding.shape
        (torch.Size([4]), True)
    """

    def __init__(
        self,
        path: str | None = None,
        config: str | None = None,
        text: str | None = None,
        label: str | None = None,
        tokenizer: str = "words",
        vocab_size: PositiveInt = 10000,
        min_count: PositiveInt = 2,
        max_len: PositiveInt = 64,
        batch_size: PositiveInt = 64,
        by_length: bool = False,
        train_texts: PositiveInt | None = None,
        test_texts: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        self.path, self.config, self.text, self.label = path, config, text, label
        self.tokenizer_name, self.most, self.min_count = tokenizer, vocab_size, min_count
        self.max_len, self.batch_size, self.by_length = max_len, batch_size, by_length
        self.train_texts, self.test_texts = train_texts, test_texts

    def prepare_data(self) -> None:
        """Downloads in one process what the others then find on disk."""
        if self.path is not None:
            self._tables()

    def setup(self, stage: str | None = None) -> None:
        """Reads the texts, and checks them before anything is built on them."""
        self.codes  # noqa: B018

    def _tables(self) -> Any:
        assert self.path is not None
        try:
            return corpus.read(self.path, self.config)
        except BadInput:
            raise
        except Exception as error:  # the hub's client raises a dozen unrelated classes
            raise BadInput(
                "--data.path must be a data set of the hub, a directory of tables or a file "
                f"{', '.join(corpus.TABLES)}, got {self.path!r} ({first_line(error)})"
            ) from error

    @cached_property
    def _read(self) -> tuple[dict[str, LabelledTexts], tuple[str, ...]]:
        """The texts of train, val and test, and the names of the classes."""
        if self.path is None:
            made = {"train": 4000, "val": 500, "test": 1000}
            parts = {name: opinions(count, seed) for seed, (name, count) in enumerate(made.items())}
            names: tuple[str, ...] = ("negative", "positive")
        else:
            rows, names = _splits(self._tables(), self.path, self.text, self.label)
            parts = {name: _numbered(part, names) for name, part in rows.items()}
        for name, count in (("train", self.train_texts), ("test", self.test_texts)):
            part = parts[name]
            parts[name] = LabelledTexts(part.texts[:count], part.labels[:count])
        for name, part in parts.items():
            if not part.texts:
                raise BadInput(f"{self.described} has no texts for {name}")
        return parts, names

    @property
    def parts(self) -> dict[str, LabelledTexts]:
        """The texts and labels of "train", "val" and "test"."""
        return self._read[0]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their numbers."""
        return self._read[1]

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def described(self) -> str:
        """The source in words."""
        return "made-up opinions" if self.path is None else self.path

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer of Hugging Face; ``save_pretrained`` keeps it beside a model."""
        kind = self.tokenizer_name
        if kind in ("words", "characters"):
            return train_tokenizer(self.parts["train"].texts, kind, self.most, self.min_count)
        return load_tokenizer(kind)

    @property
    def vocab_size(self) -> int:
        """How many symbols there are."""
        return len(self.tokenizer)

    @property
    def pad_id(self) -> int:
        """The number that stands where there is no token."""
        return self.tokenizer.pad_token_id or 0

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """The numbers of each text's tokens, at most max_len and at least one, on the CPU."""
        found = self.tokenizer(list(texts), truncation=True, max_length=self.max_len)["input_ids"]
        unknown = self.tokenizer.unk_token_id or 0
        with torch.device("cpu"):
            return [torch.tensor(tokens or [unknown]) for tokens in found]

    @cached_property
    def codes(self) -> dict[str, list[Tensor]]:
        """The tokens of each part."""
        return {name: self.encode(part.texts) for name, part in self.parts.items()}

    def collate(self, rows: Sequence[tuple[Tensor, int]]) -> TextBatch:
        """A batch of encoded texts and labels."""
        tokens, labels = zip(*rows, strict=True)
        with torch.device("cpu"):
            lengths = torch.tensor([len(text) for text in tokens])
            filled = pad_sequence(list(tokens), batch_first=True, padding_value=self.pad_id)
            padding = torch.arange(filled.shape[1]) >= lengths[:, None]
            return TextBatch(filled, torch.tensor(labels), padding)

    def _batches(self, part: str, train: bool = False) -> DataLoader[Any]:
        rows: Any = list(zip(self.codes[part], self.parts[part].labels, strict=True))
        size = min(self.batch_size, len(rows))
        options: dict[str, Any] = {"shuffle": train}
        if train and self.by_length:
            options = {"sampler": ByLength([len(text) for text, _ in rows], size)}
        return DataLoader(
            rows,
            size,
            collate_fn=self.collate,
            drop_last=train,
            pin_memory=for_gpu(self),
            **options,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches in random order."""
        return self._batches("train", train=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The texts to follow the training by."""
        return self._batches("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """The texts to judge by."""
        return self._batches("test")


def _splits(
    found: Any, source: str, text: str | None, label: str | None
) -> tuple[dict[str, datasets.Dataset], tuple[str, ...]]:
    """Rows of columns "text" and "label" for train, val and test, and the names of the classes."""
    if "train" not in found:
        raise BadInput(f"{source} has no split to train on, only {', '.join(found)}")
    columns = {
        _column(found["train"], source, "text", text, corpus.TEXT_COLUMNS): "text",
        _column(found["train"], source, "label", label, LABEL_COLUMNS): "label",
    }
    rows = {
        split: part.select_columns(list(columns)).rename_columns(columns)
        for split, part in found.items()
        if set(columns) <= set(part.column_names)
    }
    feature = rows["train"].features["label"]
    if isinstance(feature, datasets.ClassLabel):
        names = tuple(feature.names)
    else:
        names = tuple(map(str, sorted(set(rows["train"]["label"]) - {None})))
    parts = {"train": rows["train"]}
    for part, known in _NAMES.items():
        split = next(
            (split for split in known if split in rows and set(rows[split]["label"]) != {-1}), None
        )
        if split is not None:
            parts[part] = rows.pop(split)
    if "test" not in parts and "val" in parts:
        parts["test"] = parts.pop("val")
    for part, share in _HELD_OUT.items():
        if part not in parts:
            cut = parts["train"].train_test_split(share, seed=0)
            parts["train"], parts[part] = cut["train"], cut["test"]
    return parts, names


def _column(
    rows: datasets.Dataset, source: str, what: str, given: str | None, likely: tuple[str, ...]
) -> str:
    wanted = likely if given is None else (given,)
    for column in wanted:
        if column in rows.column_names:
            return column
    raise BadInput(
        f"--data.{what} must name a column of {source}; it has {', '.join(rows.column_names)}, and none "
        f"called {' or '.join(wanted)}"
    )


def _numbered(rows: datasets.Dataset, names: tuple[str, ...]) -> LabelledTexts:
    """Texts, with labels as the places of their names; numbers of a ClassLabel are places already."""
    numbers = {name: i for i, name in enumerate(names)}
    if isinstance(rows.features["label"], datasets.ClassLabel):
        numbers = {str(i): i for i in range(len(names))}
    texts, labels = list(rows["text"]), [str(label) for label in rows["label"]]
    for text, label in zip(texts, labels, strict=True):
        if not isinstance(text, str) or label not in numbers:
            raise BadInput(
                f"every row needs a text and one of the labels {', '.join(numbers)} of the training "
                f"texts, got {text!r} with {label!r}"
            )
    return LabelledTexts(texts, [numbers[label] for label in labels])
