"""Character corpora for Lightning."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from functools import cached_property
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from training import corpus
from training.batches import EvaluationBatches, TrainingBatches, for_gpu
from training.errors import BadInput
from training.windows import Batch, Windows, sentences, stream, whole_stream

_NEEDED = {"fit": ("train", "valid"), "validate": ("valid",), "test": ("test",)}


def run_seed() -> int:
    """The seed that Lightning was given (seed_everything), 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class CharacterData(L.LightningDataModule):
    """A text as characters: the embedded one, a directory of files, or a dataset of the hub.

    Args:
        source: "pydoc" (documentation that comes with Python; needs no network and no files), "dir"
            (text files in `path`) or "hub" (the dataset `name`).
        path: directory with train.txt, valid.txt and test.txt (also ptb.train.txt and so on); without
            them all its *.txt files are one text and its last tenth is held out.
        name: of a text dataset on the Hugging Face hub; default Penn Treebank.
        config: the hub dataset's own configuration, if it has several.
        revision: of the hub dataset; default the main one, for Penn Treebank its tables.
        characters: "plain", or "ptb": lines stripped, spaces shown as underscores.
        packing: "stream" (blocks of equal length) or "sentences" (a line each, bucketed by length).
        block: symbols in a block, and of the longest sentence (longer lines are cut).
        batch_size: windows in a batch, of each process.
        vocabulary: the characters in the order of their numbers; default those of the corpus, and of a
            pretrained model its own.
        unknown: what becomes of characters that the vocabulary, given or of a pretrained model, does not
            have: "error", "drop" (they are left out), "replace" (by a question mark or a space) or
            "extend" (the vocabulary and the model learn them).

    Example:
        >>> data = CharacterData(block=16, batch_size=4)
        >>> data.setup()
        >>> next(iter(data.val_dataloader())).inputs.shape
        torch.Size([4, 16])
    """

    def __init__(
        self,
        source: Literal["pydoc", "dir", "hub"] = "pydoc",
        path: str | None = None,
        name: str | None = None,
        config: str | None = None,
        revision: str | None = None,
        characters: Literal["plain", "ptb"] = "plain",
        packing: Literal["stream", "sentences"] = "stream",
        block: int = 128,
        batch_size: int = 32,
        vocabulary: str | None = None,
        unknown: Literal["error", "drop", "replace", "extend"] = "error",
    ) -> None:
        super().__init__()
        if source == "dir" and path is None:
            raise BadInput("--data.source dir needs --data.path, a directory with text files")
        if min(block, batch_size) < 1:
            raise BadInput(
                f"--data.block and --data.batch_size must be positive, got {block}, {batch_size}"
            )
        self.source, self.path, self.name = source, path, name
        self.config, self.revision, self.characters = config, revision, characters
        self.packing, self.block, self.batch_size = packing, block, batch_size
        self.given_vocabulary, self.unknown = vocabulary, unknown

    def prepare_data(self) -> None:
        """Downloads in one process what the others then find on disk."""
        if self.source == "hub":
            corpus.from_hub(self.name, self.revision, self.config)

    def setup(self, stage: str | None = None) -> None:
        """Reads the corpus, and checks it before anything is built on it."""
        for split in _NEEDED[stage or "fit"]:
            self.check_split(split)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The text of each split."""
        if self.source == "dir":
            rows = corpus.from_dir(str(self.path))
        elif self.source == "hub":
            rows = corpus.from_hub(self.name, self.revision, self.config)
        else:
            rows = corpus.from_pydoc()
        return {split: corpus.text_of(part, self.characters) for split, part in rows.items()}

    @cached_property
    def vocabulary(self) -> str:
        """The characters in the order of their numbers: sorted, if none were given."""
        given = self.given_vocabulary
        if given is not None and self.unknown != "extend":
            return given
        return (given or "") + "".join(sorted(set().union(*self.texts.values()) - set(given or "")))

    def use_vocabulary(self, vocabulary: str) -> None:
        """Numbers the characters as a pretrained model does, and new ones after its own."""
        self.__dict__.pop("codes", None)
        self.__dict__.pop("vocabulary", None)
        self.given_vocabulary = vocabulary

    @cached_property
    def codes(self) -> dict[str, Tensor]:
        """The numbers of each split's characters, (T,) int64, on the CPU."""
        instead = "; --data.unknown drop, replace or extend takes such a text"
        return {
            split: corpus.encode(self._known(split, text), self.vocabulary, f"the {split} text", instead)
            for split, text in self.texts.items()
        }

    def _known(self, split: str, text: str) -> str:
        """A text without unknown characters, if they are to be dropped or replaced; says how many."""
        others = Counter(text)
        for symbol in self.vocabulary:
            del others[symbol]
        if not others or self.unknown in ("error", "extend"):
            return text
        if self.packing == "sentences" and "\n" in others:
            raise BadInput(
                "--data.packing sentences needs a vocabulary with a newline: --data.unknown extend"
            )
        text = corpus.known_text(text, self.vocabulary, self.unknown)
        done = "dropped" if self.unknown == "drop" else "replaced"
        rank_zero_only(print)(
            f"the {split} text: {done} {others.total()} characters that the model does not know "
            f"({corpus.shown(symbol for symbol, _ in others.most_common())})"
        )
        self._check_length(split, len(text))
        return text

    def check_split(self, split: str) -> None:
        """Raises BadInput where a split has nothing, or is too short for a block."""
        text = self.texts.get(split, "")
        if not text.strip():
            raise BadInput(f"the {split} text of {self.described} is empty")
        self._check_length(split, len(text))

    def _check_length(self, split: str, length: int) -> None:
        # A block needs a symbol in front of it; blocks of training begin at any of `block` offsets.
        least = 2 * self.block if split == "train" else 2
        if self.packing == "stream" and length < least:
            raise BadInput(
                f"the {split} text of {self.described} has {length} characters; blocks of "
                f"{self.block} need {least} (choose a smaller --data.block)"
            )

    @property
    def described(self) -> str:
        """The source in words."""
        place = {"pydoc": "pydoc", "dir": self.path, "hub": self.name or corpus.PTB}[self.source]
        return f"{place!r}"

    def windows(self, split: str, generator: torch.Generator | None = None) -> Windows:
        """The windows of a split; with a generator (training), blocks begin at a random offset."""
        codes = self.codes[split]
        if self.packing == "sentences":
            return sentences(codes, self.vocabulary.index("\n"), self.block)
        if generator is None:
            return whole_stream(codes, self.block)
        offset = int(torch.randint(self.block, (1,), generator=generator, device=codes.device))
        return stream(codes, self.block, offset)

    def first_tokens(self, count: int, length: int) -> Tensor:
        """The beginning of the training text as (count, length) tokens, the same in every process.

        They are on the CPU, whatever the default device is: Lightning builds models under the GPU.
        """
        codes = self.codes["train"]
        index = torch.arange(count * length, device=codes.device).reshape(count, length)
        return codes[index % len(codes)]

    def validation_tokens(self, length: int) -> Tensor:
        """The beginning of the validation text, (1, at most length)."""
        return self.codes["valid"][None, :length]

    def train_dataloader(self) -> TrainingBatches:
        """Shuffled batches that go on where a checkpoint left them."""
        rank, world = self._process()
        batches = TrainingBatches(
            lambda generator: self.windows("train", generator),
            self.batch_size,
            run_seed(),
            self._progress,
            rank,
            world,
            {
                "corpus": self._digest("train"),
                "packing": self.packing,
                "block": self.block,
                # The checkpoint counts batches, its schedule updates.
                "accumulate_grad_batches": self.trainer.accumulate_grad_batches if self.trainer else 1,
            },
        )
        if len(batches) == 0:
            raise BadInput(
                f"the train text of {self.described} gives {batches.count} windows, fewer than a batch "
                f"of {self.batch_size * world} (choose a smaller --data.batch_size or --data.block)"
            )
        return batches

    def val_dataloader(self) -> EvaluationBatches:
        """All of the validation text."""
        return EvaluationBatches(self.windows("valid"), self.batch_size, *self._process())

    def test_dataloader(self) -> EvaluationBatches:
        """All of the test text."""
        return EvaluationBatches(self.windows("test"), self.batch_size, *self._process())

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Puts a batch for a GPU into pinned memory, whose copy the host does not wait for."""
        return Batch(*(part.pin_memory() for part in batch)) if for_gpu(self) else batch

    def _process(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _progress(self) -> tuple[int, int]:
        """Lightning's own counters: epochs done, and batches of this one that have been begun."""
        if self.trainer is None:
            return 0, 0
        loop = self.trainer.fit_loop
        epochs = vars(loop.epoch_progress.current)["processed"]
        return int(epochs), loop.epoch_loop.batch_progress.current.ready

    def _digest(self, split: str) -> str:
        return hashlib.sha256(self.codes[split].numpy().tobytes()).hexdigest()[:16]
