"""The commands of the Trainer: fit, validate and test."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from training.base_cli import BaseCLI
from training.checkpoints import CheckpointFiles
from training.data import CharacterData
from training.errors import usable_directory
from training.module import VARIANT, LanguageModule
from training.monitors import CertificateMonitor, InversionMonitor, TextSample, Throughput
from training.report import Report
from training.safety import checkpoint_callbacks


def claim_directory(root: str | Path) -> Path:
    """A new directory root/0, root/1, ...: the first that does not exist, so that no run is mixed up.

    Raises:
        BadInput: root cannot be made or written in.
    """
    place = usable_directory(root, "--trainer.default_root_dir")
    for number in itertools.count():
        folder = place / str(number)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        break
    return folder


def _claimed(root: str | Path) -> Path:
    """A new directory in the first process; Lightning tells the others its name."""
    return Path(root) / "0" if getattr(rank_zero_only, "rank", 0) else claim_directory(root)


def loggers(root: str | Path) -> list[Logger]:
    """CSV and TensorBoard logs in a new directory; only the first process writes."""
    version = _claimed(root).name
    return [
        CSVLogger(root, name="", version=version),
        TensorBoardLogger(root, name="", version=version),
    ]


def _symbols(vocabulary: str | None) -> int:
    """Of a vocabulary; the module asks the data for one that is not given."""
    return len(vocabulary or " ")


class TrainingCLI(BaseCLI):
    """The command line with the language models' callbacks, logs and checkpoints."""

    loss = "train/nats"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the callbacks, each under a name of its own, and says what of the model is the data's."""
        # In the order in which they share their time.
        parser.add_lightning_class_args(InversionMonitor, "inversion")
        parser.add_lightning_class_args(CertificateMonitor, "certificate")
        parser.add_lightning_class_args(TextSample, "text")
        parser.add_lightning_class_args(Report, "report")
        parser.add_argument(
            "--checkpoint_every",
            type=PositiveInt,
            default=200,
            help="steps between two checkpoints; a killed run resumes from the last one",
        )
        parser.set_defaults({"model.config.variant": VARIANT})
        parser.link_arguments("data.block", "model.config.max_len")
        parser.link_arguments("data.vocabulary", "model.config.vocabulary")
        parser.link_arguments("data.vocabulary", "model.config.vocab_size", compute_fn=_symbols)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Adds logs and checkpoints where the configuration does not say otherwise."""
        config = self._get(self.config_init, "trainer")
        callbacks: list[L.Callback] = [Throughput()]
        plugins = config["plugins"] or []
        plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        if self.subcommand != "fit":
            kwargs |= {"logger": False, "enable_checkpointing": False}
        else:
            root = config["default_root_dir"] or "runs"
            if config["logger"] in (None, True) and not config["fast_dev_run"]:
                kwargs["logger"] = loggers(root)
            elif config["logger"] is False:
                # Everything else is beside the logs; without them all runs would share one place.
                kwargs["default_root_dir"] = str(_claimed(root))
            if config["enable_checkpointing"] is not False:
                callbacks += checkpoint_callbacks(int(self._get(self.config_init, "checkpoint_every")))
        return super().instantiate_trainer(
            callbacks=callbacks, plugins=[*plugins, CheckpointFiles()], **kwargs
        )


_ABOUT = {
    "fit": "Trains a model; logs, checkpoints and a report go to a new directory.",
    "validate": "Prints nats and bits per character of the validation text.",
    "test": "Prints nats and bits per character of the test text.",
}


def _help(command: str) -> dict[str, str]:
    """Prints a usage line and what the command does, instead of a page of options."""
    usage = f"python -m training {command} --config FILE [--ckpt_path FILE] [--OPTION VALUE ...]"
    return {"usage": usage, "description": _ABOUT[command]}


def run(arguments: list[str]) -> TrainingCLI:
    """Runs fit, validate or test, the first of the arguments."""
    return TrainingCLI(
        LanguageModule,
        CharacterData,
        args=arguments,
        trainer_defaults={"enable_model_summary": False},
        # Other commands leave no files.
        save_config_callback=SaveConfigCallback if arguments[0] == "fit" else None,
        parser_kwargs={"prog": "python -m training", **{name: _help(name) for name in _ABOUT}},
    )
