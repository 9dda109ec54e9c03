"""Every YAML file of training is read and built; the small ones take two steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lipformer.models import VARIANTS, LanguageModel, LanguageModelConfig
from tests.training.tiny import LIGHTNING_WARNINGS, write_corpus
from training.__main__ import main
from training.data import CharacterData
from training.module import LanguageModule

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
NAMES = {*VARIANTS, "contractive_kim2021"}
PTB = sorted((RECIPES / "ptb").glob("*.yaml"))
SMALL = sorted((RECIPES / "ptb" / "small").glob("*.yaml"))
SHAKESPEARE = sorted((RECIPES / "shakespeare").glob("*.yaml"))
ALL = [RECIPES / "quickstart.yaml", RECIPES / "finetune.yaml", *PTB, *SMALL, *SHAKESPEARE]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def settings_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def test_every_variant_has_its_files() -> None:
    assert {path.stem for path in PTB} == NAMES | {"ddp", "fsdp"}
    assert {path.stem for path in SMALL} == NAMES


@pytest.mark.parametrize("path", ALL, ids=relative)
def test_it_opens_with_its_command_and_what_to_expect(path: Path) -> None:
    head = path.read_text().partition("seed_everything")[0]
    assert f"python -m training fit --config {relative(path)}" in head
    assert "\n# EXPECT\n" in head
    assert all(line.startswith("#") for line in head.splitlines())
    settings = settings_of(path)
    assert settings["trainer"]["gradient_clip_val"] == 1.0
    assert settings["trainer"]["default_root_dir"].endswith(path.stem)
    assert settings["trainer"]["default_root_dir"].split("/")[0] == "runs"


@pytest.mark.parametrize("path", [*PTB, *SMALL], ids=relative)
def test_its_model_can_be_built(path: Path) -> None:
    settings = settings_of(path)
    data = CharacterData(**settings["data"])
    config = LanguageModelConfig(vocab_size=50, max_len=data.block, **settings["model"].pop("config"))
    module, model = LanguageModule(config, **settings["model"]), LanguageModel(config)
    small = path in SMALL
    assert (config.dim, config.num_heads) == ((128, 4) if small else (512, 8))
    size = sum(p.numel() for p in model.parameters())
    assert 4e5 < size < 8e5 if small else 1e7 < size < 3e7
    assert (config.bound == "kim2021") == (path.stem == "contractive_kim2021")
    if path.stem in VARIANTS:
        assert config.variant == path.stem
    trainer = settings["trainer"]
    if small:
        assert (trainer["max_steps"], data.block, data.batch_size) == (600, 128, 32)
        assert module.schedule == "cosine"
    else:
        assert trainer["precision"] == "bf16-mixed"
        assert module.compiled
        assert module.schedule == "noam"


TINY: list[object] = [
    *("--trainer.max_steps", 2, "--trainer.val_check_interval", 2, "--trainer.log_every_n_steps", 1),
    *("--trainer.check_val_every_n_epoch", "null", "--trainer.max_epochs", "null"),
    *("--trainer.accelerator", "cpu", "--trainer.devices", 1, "--trainer.precision", "32-true"),
    *("--trainer.enable_progress_bar", "false", "--data.source", "dir"),
    *("--data.block", 16, "--data.batch_size", 4, "--data.characters", "plain"),
    # Attacks take seconds; test_monitors and test_commands make them.
    *("--certificate.enabled", "false", "--inversion.length", 4, "--text.max_new", 4),
    *("--report.enabled", "false"),
]
NARROW: list[object] = [
    *(
        "--model.config.dim",
        16,
        "--model.config.num_heads",
        4,
        "--model.config.num_layers",
        1,
        "--model.compile",
        "false",
    )
]


def take_two_steps(path: Path, folder: Path, *options: object) -> None:
    corpus = write_corpus(folder / "corpus", lines=24)
    places = ["--data.path", corpus, "--trainer.default_root_dir", folder / "runs"]
    given = ["fit", "--config", path, *TINY, *places, *options]
    with warnings.catch_warnings():  # the command sets filters of its own
        assert main([str(argument) for argument in given]) == 0
    checkpoint = torch.load(folder / "runs" / "0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert "val/bits" in (folder / "runs" / "0" / "metrics.csv").read_text()


@pytest.fixture(autouse=True)
def _as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: True)
    monkeypatch.setattr("sys.argv", ["training"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.mark.parametrize("path", [RECIPES / "quickstart.yaml", *SMALL, *SHAKESPEARE], ids=relative)
def test_it_takes_two_steps(path: Path, tmp_path: Path) -> None:
    take_two_steps(path, tmp_path, *NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("path", PTB, ids=relative)
def test_it_takes_two_steps_on_a_cpu_too(path: Path, tmp_path: Path) -> None:
    take_two_steps(path, tmp_path, *NARROW, "--trainer.strategy", "auto")


def test_a_saved_model_is_fine_tuned(tmp_path: Path) -> None:
    letters = "".join(sorted(set((write_corpus(tmp_path / "corpus") / "train.txt").read_text())))
    options: dict[str, Any] = {"dim": 16, "num_heads": 4, "num_layers": 1, "vocabulary": letters}
    model = VARIANTS["invertible"](len(letters), **options)
    for part in model.modules():
        if hasattr(part, "initialized"):
            part.initialized.fill_(True)
    model.save_pretrained(tmp_path / "saved")
    take_two_steps(RECIPES / "finetune.yaml", tmp_path, "--model.pretrained", tmp_path / "saved")
