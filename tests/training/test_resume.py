"""A run that is killed and resumed has the loss curve of one that was not."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.training.tiny import LIGHTNING_WARNINGS, Losses, data, module, trainer, write_corpus
from training.batches import TrainingBatches
from training.errors import BadInput
from training.safety import checkpoint_callbacks

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
STEPS = 13
# Epochs of 8 batches; validations inside and at the end of epochs.
OPTIONS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"fit": {"val_check_interval": 3, "check_val_every_n_epoch": None}},
    "limited": {"fit": {"limit_train_batches": 4}},
    "sentences": {"packing": "sentences", "fit": {"val_check_interval": 2, "limit_train_batches": 5}},
    "accumulated": {"batch_size": 2, "fit": {"accumulate_grad_batches": 2, "limit_train_batches": 5}},
}


def run(
    folder: Path, callbacks: list[L.Callback] | None = None, ckpt: Any = None, **options: Any
) -> tuple[Losses, L.LightningModule]:
    losses, options = Losses(), copy.deepcopy(options)
    fit = {"max_steps": STEPS, **options.pop("fit", {})}
    model = module(dropout=0.1)
    given = callbacks or []
    saves = any(isinstance(callback, ModelCheckpoint) for callback in given)
    trained = trainer(callbacks=[losses, *given], enable_checkpointing=saves, **fit)
    trained.fit(model, data(folder, **options), ckpt_path=ckpt)
    return losses, model


def check_resumes(folder: Path, options: dict[str, Any], steps: list[int]) -> None:
    corpus = write_corpus(folder / "corpus", lines=30)
    saver = ModelCheckpoint(folder / "all", "{step}", every_n_train_steps=1, save_top_k=-1)
    whole, model = run(corpus, [saver], **options)
    assert whole.train[-1][2] == STEPS
    assert len({loss for *_, loss in whole.train}) > 10
    for step in steps:
        resumed, again = run(corpus, None, folder / "all" / f"step={step}.ckpt", **options)
        assert (resumed.train, resumed.after(step)[1]) == whole.after(step), step
        for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_checkpoint_in_mid_epoch_resumes_exactly(tmp_path: Path) -> None:
    check_resumes(tmp_path, OPTIONS["limited"], [1, 4, 6])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_checkpoint_resumes_exactly(tmp_path: Path, name: str) -> None:
    """Epoch ends and validations included: a kill may come anywhere."""
    check_resumes(tmp_path, OPTIONS[name], list(range(1, STEPS)))


def test_it_would_notice_batches_that_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: what Lightning does by itself, replaying the epoch's first batches."""

    def from_the_start(self: TrainingBatches) -> Any:
        windows, order = self.epoch(self.progress()[0])
        for index in order:
            yield windows.batch(index, float(windows.lengths[index].sum()))

    monkeypatch.setattr(TrainingBatches, "__iter__", from_the_start)
    with pytest.raises(AssertionError):
        check_resumes(tmp_path, OPTIONS["limited"], [6])


class Stop(L.Callback):
    """A signal, or an error, in the middle of a step."""

    def __init__(self, step: int, number: signal.Signals | None) -> None:
        self.step, self.number = step, number

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            if self.number is None:
                raise RuntimeError("out of memory")
            signal.raise_signal(self.number)


# Gradients that an error finds half summed up are lost: no exact resume of "accumulated" after one.
@pytest.mark.parametrize(
    ("name", "step", "number"),
    [
        ("epochs", 6, None),
        ("epochs", 8, None),  # in the first batch of an epoch
        ("steps", 6, None),
        ("epochs", 6, signal.SIGINT),
        ("steps", 6, signal.SIGINT),
        ("accumulated", 6, signal.SIGINT),
        ("steps", 6, signal.SIGTERM),
    ],
)
def test_what_stops_a_run_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path,
    name: str,
    step: int,
    number: signal.Signals | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = write_corpus(tmp_path / "corpus", lines=30)
    options = OPTIONS[name]
    whole, _ = run(corpus, **options)
    handler = signal.getsignal(signal.SIGINT)
    fit = {**options.get("fit", {}), "default_root_dir": str(tmp_path)}
    with pytest.raises((RuntimeError, SystemExit)):
        run(corpus, [Stop(step, number), *checkpoint_callbacks(100)], **{**options, "fit": fit})
    assert signal.getsignal(signal.SIGINT) in (handler, signal.SIG_IGN)
    signal.signal(signal.SIGINT, handler)
    path = next(tmp_path.rglob("interrupted.ckpt"))
    assert f"--ckpt_path {path}" in capsys.readouterr().out
    # Signals let the step end, an error is before its update.
    done = step if number is None else step + 1
    resumed, _ = run(corpus, None, path, **options)
    assert (resumed.train, resumed.after(done)[1]) == whole.after(done)
    assert min(map(len, whole.after(done)))


def test_other_settings_are_not_resumed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", lines=30)
    saver = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=5)
    run(corpus, [saver], fit={"max_steps": 5})
    path = tmp_path / "all" / "step=5.ckpt"
    with pytest.raises(BadInput, match="its batch_size was 4, now it is 3"):
        run(corpus, None, path, batch_size=3)
    with pytest.raises(BadInput, match="checkpoint is of another model: its dim is 16, not 8"):
        trainer(max_steps=9).fit(module(dropout=0.1, dim=8), data(corpus), ckpt_path=path)


def test_a_resumed_run_has_the_rates_it_is_asked_for(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", lines=30)
    saver = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=5)
    run(corpus, [saver], fit={"max_steps": 5})
    path = tmp_path / "all" / "step=5.ckpt"
    asked = {"lr": 1e-4, "weight_decay": 0.3, "betas": (0.8, 0.9), "schedule": "constant"}
    seen: list[list[dict[str, Any]]] = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append([dict(group) for group in trainer.optimizers[0].param_groups])

    trained = trainer(max_steps=7, callbacks=[Watch()])
    trained.fit(module(dropout=0.1, **asked), data(corpus), ckpt_path=path)
    assert len(seen) == 2
    for groups in seen:
        assert [group["lr"] for group in groups] == [1e-4, 1e-4], "the first step included"
        assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
        assert [group["betas"] for group in groups] == [(0.8, 0.9)] * 2
    moments = trained.optimizers[0].state_dict()["state"]
    assert all(state["step"] == 7 for state in moments.values()), "the moments are the checkpoint's"


def test_another_accumulation_is_not_resumed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", lines=30)
    saver = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=3)
    run(corpus, [saver], fit={"max_steps": 3, "accumulate_grad_batches": 2})
    with pytest.raises(BadInput, match="its accumulate_grad_batches was 2, now it is 1"):
        run(corpus, None, tmp_path / "all" / "step=3.ckpt")
