"""Kills a process at random moments of saving, and looks at what it left; run by test_crashes.

    python -m tests.training.kills DIRECTORY KIND KILLS SEED

KIND is checkpoint (a run that saves each step, each child going on from what the killed one left),
pretrained (a saved model that alternates between two configs) or plain (the control: torch.save in
place). Prints kills, how many of them came inside a save, losses, and saves; ends with 1 if anything was
lost. A fork in place of a start of Python makes hundreds of kills a matter of seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lipformer.models import VARIANTS, LanguageModel, LanguageModelConfig
from training.optimisers import adamw

# training.checkpoints is imported where it is used: with Lightning it takes longer than some kills.
SYMBOLS = 20
Tell = Callable[[str, int], object]
SHAPE: dict[str, Any] = {"dim": 32, "num_heads": 2, "num_layers": 1}


class Run:
    """A model in training: everything it is made of is in its checkpoint."""

    def __init__(self, checkpoint: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model = VARIANTS["lipschitz"](SYMBOLS, **SHAPE)
        self.optimiser = adamw(self.model, 0.01, 0.01, (0.9, 0.99))
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimiser, lambda step: 0.999**step)
        self.step = 0
        if checkpoint is not None:
            from training.checkpoints import model_weights

            assert checkpoint["lipformer"]["config"] == self.model.config.to_dict()
            self.model.load_state_dict(model_weights(checkpoint))
            self.optimiser.load_state_dict(checkpoint["optimizer_states"])
            self.rate.load_state_dict(checkpoint["lr_schedulers"])
            self.step = checkpoint["global_step"]

    def advance(self) -> None:
        """A step of training, a function of the number of steps before it."""
        draw = torch.Generator().manual_seed(self.step)
        tokens = torch.randint(SYMBOLS, (2, 9), generator=draw)
        self.optimiser.zero_grad()
        F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimiser.step()
        self.rate.step()
        self.step += 1

    def checkpoint(self) -> dict[str, Any]:
        return {
            "lipformer": {"config": self.model.config.to_dict()},
            "state_dict": {f"model.{name}": value for name, value in self.model.state_dict().items()},
            "optimizer_states": self.optimiser.state_dict(),
            "lr_schedulers": self.rate.state_dict(),
            "global_step": self.step,
            "ballast": torch.arange(100_000) + self.step,  # takes time to write
        }


def equal(a: Any, b: Any) -> bool:
    """Whether nested values are the same to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def train(path: Path, write: Callable[[Any, Path], None], tell: Tell) -> None:
    """Goes on from the checkpoint for ever."""
    from training.checkpoints import read_checkpoint

    run = Run(read_checkpoint(path))
    tell("done", run.step)
    while True:
        run.advance()
        tell("begun", run.step)
        write(run.checkpoint(), path)
        tell("done", run.step)


@cache
def with_symbols(count: int) -> LanguageModel:
    return LanguageModel(LanguageModelConfig("lipschitz", count, **SHAPE))


def numbered(number: int) -> LanguageModel:
    """A model whose weights and config tell its number."""
    model = with_symbols(SYMBOLS + number % 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
    return model


def number_of(model: LanguageModel) -> int:
    """The number of `numbered`, if all of the model has it."""
    values = torch.cat([p.flatten() for p in model.parameters()]).unique()
    assert len(values) == 1
    number = int(values)
    assert model.config.vocab_size == SYMBOLS + number % 2
    return number


def export(folder: Path, tell: Tell) -> None:
    """Saves the next models for ever."""
    number = number_of(LanguageModel.from_pretrained(folder))
    tell("done", number)
    while True:
        number += 1
        tell("begun", number)
        numbered(number).save_pretrained(folder)
        tell("done", number)


def killed_in_save(share: float, work: Callable[[Tell], None]) -> int:
    """Kills a child in its second save and gives the number of the last that it had done.

    Args:
        share: when, as a share of the time that its first save took: machines are slow at times.
        work: tells when a save is begun or done, and at first which one it goes on from.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        work(lambda word, number: os.write(writer, f"{word} {number}\n".encode()))
    os.close(writer)
    with os.fdopen(reader) as file:
        told, times = [], []
        for _ in range(4):  # done, begun, done, begun
            told.append(file.readline())
            times.append(time.monotonic())
        time.sleep(share * (times[2] - times[1]))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "it ended by itself"
        told += file.readlines()
    return int([line for line in told if line.startswith("done")][-1].split()[1])


def main(directory: str, kind: str, kills: str, seed: str) -> int:
    torch.set_num_threads(1)
    folder, chance = Path(directory), random.Random(int(seed))
    path = folder / "last.ckpt"
    kept: list[dict[str, Any]] = []
    if kind != "pretrained":
        from training.checkpoints import read_checkpoint, write_checkpoint
    if kind == "pretrained":
        numbered(0).save_pretrained(folder)
    else:
        write_checkpoint(Run(None).checkpoint(), path)
    names = {entry.name for entry in folder.iterdir()}

    def work(tell: Tell) -> None:
        if kind == "pretrained":
            export(folder, tell)
        train(path, write_checkpoint if kind == "checkpoint" else torch.save, tell)

    def found() -> int:
        if kind == "pretrained":
            return number_of(LanguageModel.from_pretrained(folder))
        kept.append(read_checkpoint(path))
        return kept[-1]["global_step"]

    number = inside = lost = 0
    for _ in range(int(kills)):
        before = killed_in_save(chance.uniform(0.0, 1.2), work)
        try:
            number = found()
            lost += number not in (before, before + 1)
        except Exception as error:
            lost += 1
            print(f"lost after {before}: {error}", file=sys.stderr)
            if kind == "pretrained":
                number = before
                numbered(number).save_pretrained(folder)
            else:
                write_checkpoint(kept[-1] if kept else Run(None).checkpoint(), path)
                number = kept[-1]["global_step"] if kept else 0
        left = [entry for entry in folder.iterdir() if entry.name not in names]
        inside += bool(left)
        for entry in left:
            entry.unlink()
        if kind == "pretrained":  # whose config may have been among what was left
            numbered(number).save_pretrained(folder)
    # The run without interruption, after the last fork.
    run = Run(None)
    for checkpoint in kept:
        while run.step < checkpoint["global_step"]:
            run.advance()
        lost += not equal(run.checkpoint(), checkpoint)
    print(json.dumps({"kills": int(kills), "inside": inside, "lost": lost, "saves": number}))
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
