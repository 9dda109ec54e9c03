"""Runs the commands of YAML files under recipes/ on a device and prints one JSON line for each file.

    python -m tests.gpu.recipe_runs pretend FOLDER recipes/quickstart.yaml recipes/ptb/l2.yaml:fit ...

Each file keeps its own precision, clipping, optimiser and callbacks; its sizes become tiny and its text
local. torch.compile knows no such device, and it is one device: `compile: true` and the strategies of
ddp.yaml and fsdp.yaml are left to tests/training. Of an attack one gradient is left, since it takes
seconds and cases_analysis.py has it; pictures are drawn but not written. All commands of a file are run,
or that behind the colon: a command, or one of CONTROLS.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from matplotlib.figure import Figure
from torch import Tensor

import lipformer as lf
import recipes.classify.__main__ as classify
import recipes.classify.pretrained as pretrained
import recipes.flows.__main__ as flows
import recipes.series.__main__ as series
import recipes.sets.__main__ as sets
import recipes.vision.__main__ as vision
import training.__main__ as language
from recipes.flows import report
from recipes.flows.pictures import inversion_errors
from tests.gpu.accelerator import lightning
from tests.gpu.log import ROOT
from tests.gpu.pretend import NAME, record
from tests.recipes import test_classify, test_flows, test_pretrained, test_series, test_sets, test_vision
from tests.training.tiny import write_corpus
from training import module, optimisers

# Of three steps the first lays buffers out, the second logs; neither happens in the last.
STEPS, LOGGED = 3, 2
SIZES: list[object] = [
    *("--trainer.max_steps", STEPS, "--trainer.log_every_n_steps", LOGGED),
    *("--trainer.val_check_interval", STEPS, "--trainer.check_val_every_n_epoch", "null"),
    *("--trainer.max_epochs", "null", "--data.source", "dir"),
    *("--data.block", 16, "--data.batch_size", 4, "--data.characters", "plain"),
    *("--certificate.length", 4, "--certificate.steps", 1, "--certificate.restarts", 1),
    *("--inversion.length", 4, "--text.max_new", 4),
]
NARROW: list[object] = [
    "--model.config.dim",
    16,
    "--model.config.num_heads",
    4,
    "--model.config.num_layers",
    1,
]

# Recipes with a command line of their own, by folder or file, and their sizes.
SMALL: dict[str, tuple[Callable[[list[str]], int], dict[str, object]]] = {
    "classify": (classify.main, test_classify.TINY),
    "flows": (flows.main, test_flows.TINY),
    "pretrained": (pretrained.main, test_pretrained.TINY),
    "series": (series.main, test_series.TINY),
    "sets": (sets.main, test_sets.TINY),
    "vision": (vision.main, test_vision.TINY),
}


@dataclass
class Run:
    """What the commands of a file gave.

    Attributes:
        file: as given.
        codes: exit code of each command.
        error: of the command that ended the run, with its causes; empty if none did.
        reads: waits of the host in the last step, which logs nothing, from batch to progress bar.
        fused: whether the optimiser is.
    """

    file: str
    codes: dict[str, int] = field(default_factory=dict)
    error: str = ""
    reads: list[str] = field(default_factory=list)
    fused: bool = False


@contextlib.contextmanager
def watched(run: Run) -> Iterator[None]:
    """Notes what each training step does on the device."""
    advance = _TrainingEpochLoop.advance

    def noted(loop: _TrainingEpochLoop, *args: Any) -> None:
        with record() as log:
            advance(loop, *args)
        if loop.global_step == STEPS:
            run.reads += [f"{read.kind} {read.operator} {read.where}" for read in log.reads]
        run.fused = bool(loop.trainer.optimizers[0].defaults["fused"])

    with mock.patch.object(_TrainingEpochLoop, "advance", noted):
        yield


def commands(path: Path, folder: Path) -> Iterator[tuple[Callable[[list[str]], int], list[object]]]:
    """The command lines of a file, in the order of their use."""
    if path.stem in SMALL or path.parent.name in SMALL:
        yield from recipe_commands(path, folder)
        return
    corpus = write_corpus(folder / "corpus", lines=24)
    given = ["--config", path, *SIZES, "--data.path", corpus]
    if path.stem == "finetune":
        with (corpus / "train.txt").open("a") as file:
            file.write("Zo\u00eb\n")
        given += ["--model.pretrained", folder.parent / "quickstart.yaml" / "exported"]
        given += ["--data.unknown", "extend"]
    else:
        given += [*NARROW, "--model.compile", "false"]
    if path.stem in {"ddp", "fsdp"}:
        given += ["--trainer.devices", 1, "--trainer.strategy", "auto"]
    yield language.main, ["fit", *given, "--trainer.default_root_dir", folder / "runs"]
    last = folder / "runs" / "0" / "checkpoints" / "last.ckpt"
    more = ["--ckpt_path", last, "--trainer.default_root_dir", folder / "runs"]
    yield language.main, ["fit", *given, *more, "--trainer.max_steps", STEPS + 1]
    for command in ("validate", "test"):
        yield language.main, [command, *given, "--ckpt_path", last]
    yield language.main, ["certify", last, "--steps", 1, "--restarts", 1, "--length", 4]
    yield language.main, ["sample", last, "--max-new", 4, "--prompt", "to"]
    yield language.main, ["export", last, folder / "exported"]


def recipe_commands(
    path: Path, folder: Path
) -> Iterator[tuple[Callable[[list[str]], int], list[object]]]:
    """The command lines of recipes with one of their own."""
    main, sizes = SMALL[path.stem if path.stem in SMALL else path.parent.name]
    steps = {"max_steps": STEPS, "log_every_n_steps": LOGGED, "val_check_interval": STEPS}
    own = {**sizes, **{f"trainer.{name}": value for name, value in steps.items()}}
    own.update({"trainer.accelerator": "auto", "trainer.enable_progress_bar": True})
    if path.parent.name == "vision":
        own.update({"data.test_images": 16, "report.eps": [0.1]})
    options: list[object] = [f"--{name}={value}" for name, value in own.items()]
    name = path.stem.partition("_")[0]
    if name in {"mnist", "cifar10", "svhn"}:
        kind = "hub" if name == "svhn" else "directory"
        options += [f"--data.{kind}={test_vision.write_data(name, folder / 'data')}"]
    if name == "movies":
        options += [f"--data.path={test_classify.write_movies(folder / 'data')}"]
    if name == "pretrained":
        options += [f"--model.pretrained={test_pretrained.write_encoder(folder / 'encoder')}"]
    given = ["--config", path, "--out", folder, *options]
    yield main, ["fit", *given]
    for command in ("validate", "test"):
        yield main, [command, *given, "--ckpt_path", folder / "last.ckpt"]


def offering(*args: Any) -> torch.optim.AdamW:
    """AdamW as torch makes it: fused, its step offers to unscale gradients."""
    optimiser = optimisers.adamw(*args)
    optimiser._step_supports_amp_scaling = True
    return optimiser


# A fit with other options, or with a fault.
CONTROLS: dict[str, tuple[list[object], Any]] = {
    "float16": (["--trainer.precision", "16-mixed"], contextlib.nullcontext()),
    "offering": ([], mock.patch.object(module, "adamw", offering)),
}


def run_file(given: str, out: Path) -> Run:
    """Runs all commands of a file or the one that is asked for, up to the first that raises."""
    run = Run(given)
    file, _, wanted = given.partition(":")
    options, fault = CONTROLS.get(wanted, ([], contextlib.nullcontext()))
    try:
        for main, arguments in commands(ROOT / file, out / given):
            command = "resume" if run.codes.keys() == {"fit"} == {arguments[0]} else str(arguments[0])
            if wanted in ("", command) or (wanted in CONTROLS and command == "fit"):
                # A command sets filters of its own.
                with warnings.catch_warnings(), watched(run), fault:
                    run.codes[command] = main([str(part) for part in [*arguments, *options]])
    except (Exception, SystemExit) as error:
        cause: BaseException | None = error
        while cause is not None:  # the first cause comes last
            run.error += "".join(traceback.format_exception(cause, chain=False))
            cause = cause.__context__
    return run


def gradient(fn: Callable[[Tensor], Tensor], x: Tensor, **_: Any) -> SimpleNamespace:
    """In place of an attack: the norm of one gradient."""
    x = x.detach().requires_grad_()
    return SimpleNamespace(value=torch.autograd.grad(fn(x).sum(), x)[0].norm().item())


def once(flow: Any, x: Tensor, tolerances: tuple[float, ...]) -> Any:
    """The inverse of a block for the first tolerance alone."""
    return inversion_errors(flow, x, tolerances[:1])


def main(device: str, out: str, *files: str) -> None:
    """Runs the files in the order given."""
    torch.set_num_threads(1)
    sys.argv, os.environ["PL_GLOBAL_SEED"] = ["recipe_runs"], "0"
    with contextlib.ExitStack() as stack:
        stack.enter_context(lightning() if device == NAME else contextlib.nullcontext())
        stack.enter_context(mock.patch.object(Figure, "savefig"))
        stack.enter_context(mock.patch.object(lf, "attack_lipschitz", gradient))
        stack.enter_context(mock.patch.object(report, "inversion_errors", once))
        for file in files:
            with contextlib.redirect_stdout(sys.stderr):
                run = run_file(file, Path(out))
            print(json.dumps(asdict(run)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
