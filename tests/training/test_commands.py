"""The command line, from the user's side: what is printed, exit codes, and that nothing is lost."""

from __future__ import annotations

import errno
import io
import math
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lipformer.models import LanguageModel
from tests.training.tiny import LIGHTNING_WARNINGS, write_corpus
from tests.training.tiny import checkpoint as untrained
from training.__main__ import main
from training.checkpoints import write_checkpoint
from training.monitors import Throughput

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command; gives its exit code, output and errors."""
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: True)
    monkeypatch.setattr("sys.argv", ["training"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")

    def run(*arguments: object) -> tuple[int, str, str]:
        with warnings.catch_warnings():  # the command sets filters of its own
            try:
                code = main([str(argument) for argument in arguments])
            except SystemExit as end:
                code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> list[object]:
    """Options that make the quickstart tiny."""
    corpus = write_corpus(tmp_path / "corpus")
    return [
        *("--config", ROOT / "recipes" / "quickstart.yaml", "--data.source", "dir"),
        *("--data.path", corpus, "--data.block", 16, "--data.batch_size", 4),
        *("--model.config.dim", 16, "--model.config.num_heads", 2, "--model.config.num_layers", 1),
        *("--trainer.max_steps", 4, "--trainer.val_check_interval", 2),
        *("--trainer.log_every_n_steps", 1, "--trainer.accelerator", "cpu"),
        *("--trainer.enable_progress_bar", "false", "--certificate.length", 4),
        *("--certificate.steps", 1, "--certificate.restarts", 1, "--text.max_new", 20),
        *("--trainer.default_root_dir", tmp_path / "runs"),
    ]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved("lipschitz", tmp_path)


def saved(variant: str, folder: Path) -> Path:
    """The checkpoint of a run that did nothing."""
    path = folder / f"{variant}.ckpt"
    write_checkpoint(
        {**untrained(variant), "pytorch-lightning_version": "2.6.0", "global_step": 1}, path
    )
    return path


def test_a_run_from_fit_to_export(command: Run, tiny: list[object], tmp_path: Path) -> None:
    code, out, _ = command("fit", *tiny)
    assert code == 0
    run = tmp_path / "runs" / "0"
    for told in ("bits per character", "certified Lipschitz constant", "attack reaches", "inversion"):
        assert told in out
    assert out.rstrip().endswith(f"report: {run / 'report'}")
    report = (run / "report" / "report.md").read_text()
    assert "What it writes" in report
    for name in ("loss.png", "bits.png", "certificate.png"):
        assert (run / "report" / name).stat().st_size > 5_000
    header = (run / "metrics.csv").read_text().partition("\n")[0]
    for key in ("val/bits", "certificate/bound", "certificate/estimate", "inversion/error"):
        assert key in header
    assert "certificates over that gain" in report
    assert "train/characters_per_second" in header
    assert list(run.glob("events.out.tfevents.*"))
    assert (run / "config.yaml").is_file()
    last = run / "checkpoints" / "last.ckpt"
    assert (run / "checkpoints" / "best.ckpt").is_file()

    for _ in range(2):  # the second time finds what the first has left: nothing
        code, out, _ = command("test", *tiny, "--ckpt_path", last)
        assert code == 0
        assert "test/bits" in out
    assert sorted(path.name for path in run.parent.iterdir()) == ["0"]
    code, out, _ = command("sample", last, "--prompt", "to be", "--max-new", 30, "--top-k", 3)
    assert code == 0
    assert out.startswith("to be")
    assert len(out) == 5 + 30 + 1
    code, out, _ = command("certify", last, "--steps", 1, "--restarts", 1, "--length", 4)
    assert code == 0
    bound = float(out.split("Lipschitz bound ")[1].split()[0])
    assert bound >= float(out.split("attack reaches ")[1].split()[0])
    code, out, _ = command("export", last, tmp_path / "model")
    assert code == 0
    assert LanguageModel.from_pretrained(tmp_path / "model").config.variant == "invertible"
    more = ["--trainer.max_steps", 6, "--certificate.enabled", "false"]
    code, _, _ = command("fit", *tiny, "--ckpt_path", last, *more)
    assert code == 0
    assert (tmp_path / "runs" / "1" / "report" / "report.md").is_file(), "no run is written over"


@pytest.mark.parametrize(
    ("number", "expected", "told"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 1, "interrupted")],
)
def test_a_signal_ends_a_run_with_a_checkpoint_and_an_exit_code(
    command: Run,
    tiny: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    expected: int,
    told: str,
) -> None:
    def signalled(self: Throughput, trainer: Any, *_: object) -> None:
        if trainer.global_step == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(Throughput, "on_train_batch_end", signalled)
    before = signal.getsignal(signal.SIGINT)
    less = ["--certificate.enabled", "false", "--text.enabled", "false"]
    code, out, err = command("fit", *tiny, *less, "--trainer.val_check_interval", 4)
    signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored after Ctrl-C
    assert code == expected
    path = tmp_path / "runs" / "0" / "checkpoints" / "interrupted.ckpt"
    assert f"{told} at step 2; resume with the same command and --ckpt_path {path}" in out
    assert "Traceback" not in err
    assert torch.load(path, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_whose_loss_is_not_finite_ends_with_a_line(
    command: Run, tiny: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """Weights that a step spoils: its own loss is finite still, and a save comes before the next."""

    def spoil(self: Throughput, trainer: Any, pl_module: Any, *_: object) -> None:
        if trainer.global_step == 3:
            next(pl_module.parameters()).data.fill_(math.nan)

    monkeypatch.setattr(Throughput, "on_train_batch_end", spoil)
    less = ["--certificate.enabled", "false", "--text.enabled", "false", "--inversion.enabled", "false"]
    every = [
        "--checkpoint_every",
        1 if saved else 100,
        "--trainer.val_check_interval",
        2 if saved else 4,
    ]
    code, out, err = command("fit", *tiny, *less, *every)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert "Traceback" not in err + out
    path = tmp_path / "runs" / "0" / "checkpoints" / "last.ckpt"
    if saved:
        assert "weights are not finite at step 3" in line
        assert f"--ckpt_path {path}" in line
        for name in ("last.ckpt", "best.ckpt"):
            found = torch.load(path.with_name(name), weights_only=True)
            assert found["global_step"] == 2
            assert all(value.isfinite().all() for value in found["state_dict"].values())
    else:
        assert "train/nats is nan at step 4; no checkpoint was written" in line
        assert not list(tmp_path.rglob("*.ckpt"))


def test_what_is_not_finite_is_no_result(command: Run, tiny: list[object], tmp_path: Path) -> None:
    less = ["--certificate.enabled", "false", "--text.enabled", "false", "--report.enabled", "false"]
    assert command("fit", *tiny, *less)[0] == 0
    path = tmp_path / "runs" / "0" / "checkpoints" / "last.ckpt"
    spoilt = torch.load(path, weights_only=True)
    spoilt["state_dict"]["model.embedding.weight"].fill_(math.nan)
    write_checkpoint(spoilt, path)
    code, _, err = command("test", *tiny, "--ckpt_path", path)
    assert code == 2
    assert "error: test/nats is nan at step" in err
    spoilt["state_dict"]["model.embedding.weight"] = torch.ones(1, dtype=torch.int8)
    write_checkpoint(spoilt, path)
    code, _, err = command("fit", *tiny, "--ckpt_path", path)
    assert code == 2
    assert "embedding.weight must be of dtype torch.float16, torch.bfloat16" in err
    assert "got torch.int8" in err


def test_a_disk_that_fills_up_ends_a_run_with_a_line(
    command: Run, tiny: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(checkpoint: dict[str, Any], file: Any) -> None:
        if checkpoint["global_step"] > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(checkpoint, file)

    monkeypatch.setattr(torch, "save", full)
    less = ["--certificate.enabled", "false", "--text.enabled", "false", "--checkpoint_every", 1]
    code, out, err = command("fit", *tiny, *less)
    path = tmp_path / "runs" / "0" / "checkpoints" / "last.ckpt"
    assert code == 2
    assert f"error: [Errno 28] No space left on device: '{path}'" in err
    assert "stopped by an error at step 2 (interrupted.ckpt was not written: [Errno 28]" in out
    assert f"--ckpt_path {path}" in out
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert torch.load(path, weights_only=True)["global_step"] == 1


@pytest.mark.parametrize("kind", ["dangling", "file", "proc"])
def test_an_output_directory_that_cannot_be_written_in(
    command: Run, tiny: list[object], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("precious")
    place = Path("/proc/no") if kind == "proc" else tmp_path / kind
    code, _, err = command("fit", *tiny, "--trainer.default_root_dir", place)
    assert code == 2
    told = f"--trainer.default_root_dir must be a directory that can be written in, got '{place}'"
    assert f"error: {told}: " in err
    assert ("which does not exist" in err) == (kind == "dangling")


def test_runs_without_logs_have_directories_of_their_own(
    command: Run, tiny: list[object], tmp_path: Path
) -> None:
    less = ["--certificate.enabled", "false", "--text.enabled", "false", "--trainer.logger", "false"]
    for _ in range(2):
        assert command("fit", *tiny, *less, "--report.enabled", "false")[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["0", "1"]
    for run in "01":
        assert (tmp_path / "runs" / run / "checkpoints" / "last.ckpt").is_file()
        assert (tmp_path / "runs" / run / "config.yaml").is_file()


def test_a_terminal_that_knows_ascii_alone_gets_question_marks(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(untrained(vocabulary="abcdé"), tmp_path / "a.ckpt")
    screen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, encoding="ascii", write_through=True))
    code, _, _ = command("sample", tmp_path / "a.ckpt", "--prompt", "éa", "--max-new", 3)
    assert code == 0
    assert screen.getvalue().startswith(b"?a")


def test_help_is_readable(command: Run) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert "python -m training certify CKPT" in out
    code, out, _ = command("fit", "--help")
    assert code == 0
    for option in (
        "--model.config.variant",
        "--data.source",
        "--checkpoint_every",
        "--certificate.steps",
    ):
        assert option in out
    assert '"l2", "contractive", "lipschitz" or "invertible"' in " ".join(out.split())
    assert len(out.partition("options:")[0].splitlines()) < 10, "no page of usage"
    code, out, _ = command("sample", "--help")
    assert "--prompt" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fly"], "unknown command 'fly'; commands are fit, validate, test, certify, sample, export"),
        (["certify", "nowhere.ckpt"], "there is no checkpoint 'nowhere.ckpt'"),
        (["certify", "TEXT"], "is truncated, not a checkpoint"),
        (
            ["sample", "CKPT", "--prompt", "abx"],
            "--prompt has 1 characters that the model does not know",
        ),
        (["sample", "CKPT", "--prompt", ""], "--prompt must have at least one character"),
        (
            ["sample", "CKPT", "--prompt", "a", "--top-k", "9"],
            "top_k must be None or an integer in 1..5",
        ),
        (["export", "CKPT", "FULL"], "is not empty; --force overwrites"),
        (["export", "CKPT", "/proc/no/such"], "cannot be written"),
        (
            ["fit", "TINY", "--data.path", "nowhere"],
            "must be a directory with text files, got 'nowhere'",
        ),
        (["fit", "TINY", "--data.block", "10000"], "blocks of 10000 need 20000"),
        (["fit", "TINY", "--data.path", "EMPTY"], "valid.txt is empty: it needs some text"),
        (["fit", "TINY", "--data.path", "LATIN"], "valid.txt must be a text file in UTF-8"),
        (["fit", "TINY", "--model.config.variant", "l3"], "variant must be one of dot_product"),
        (["fit", "TINY", "--model.config.bound", "kim2021"], "'invertible' has no option bound"),
        (
            ["fit", "TINY", "--model.config.positions", "rotary", "--model.config.norm", "linf"],
            "rotations are no isometries in the linf norm",
        ),
        (["fit", "TINY", "--ckpt_path", "CKPT"], "checkpoint is of another model: its variant is"),
        (["fit", "TINY", "--text.prompt", "€"], "--text.prompt has 1 characters that the model does"),
        (["fit", "TINY", "--text.top_k", "1000"], "--text.top_k must be None or an integer in 1.."),
        (["fit", "TINY", "--trainer.max_steps", "-5"], "`max_steps` must be a non-negative"),
    ],
)
def test_bad_input_is_told_in_one_line(
    command: Run, tiny: list[object], checkpoint: Path, tmp_path: Path, arguments: list[str], told: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    places = {"CKPT": checkpoint, "FULL": tmp_path / "full"}
    for name, data in (("EMPTY", b""), ("LATIN", b"caf\xe9")):
        places[name] = tmp_path / name
        places[name].mkdir()
        (places[name] / "train.txt").write_text("some text\n" * 40)
        (places[name] / "valid.txt").write_bytes(data)
    places["TEXT"] = tmp_path / "EMPTY" / "train.txt"
    given: list[object] = []
    for argument in arguments:
        given += tiny if argument == "TINY" else [places.get(argument, argument)]
    code, _, err = command(*given)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert told in line
    assert "Traceback" not in err
    assert (tmp_path / "full" / "mine").read_text() == "kept"
    assert not list((tmp_path / "runs").rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("model.config.widht", 3, "unrecognized arguments: --model.config.widht 3"),
        ("model.config.dim", "wide", "model.config.dim"),
        ("model.schedule", "linear", "model.schedule"),
        ("certificate.norm", "l3", "certificate.norm"),
        ("checkpoint_every", 0, "checkpoint_every"),
    ],
)
def test_an_unknown_option_or_value_is_refused(
    command: Run, tiny: list[object], tmp_path: Path, option: str, value: object, told: str
) -> None:
    code, _, err = command("fit", *tiny, f"--{option}", value)
    assert code == 2
    assert told in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_variants_without_a_certificate_say_so(command: Run, tmp_path: Path) -> None:
    path = saved("dot_product", tmp_path)
    code, out, _ = command("certify", path, "--steps", 1, "--restarts", 2, "--length", 5)
    assert code == 1
    assert "no certificate: 'body.trunk.0.branch.1' (DotProductAttention) cannot be certified" in out
    assert "attack reaches" in out


def test_export_overwrites_only_when_told(command: Run, checkpoint: Path, tmp_path: Path) -> None:
    assert command("export", checkpoint, tmp_path / "model")[0] == 0
    assert command("export", checkpoint, tmp_path / "model")[0] == 2
    assert command("export", checkpoint, tmp_path / "model", "--force")[0] == 0
    assert command("export", checkpoint, checkpoint)[0] == 2
