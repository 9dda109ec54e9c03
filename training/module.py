"""Training a language model, with Lightning."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveFloat
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lipformer.certificate import NotCertifiable
from lipformer.models import LanguageModel, LanguageModelConfig
from lipformer.saving.saved_model import check_dtypes
from training import schedules
from training.batches import derive_seed
from training.checkpoints import model_weights
from training.converted import with_vocabulary
from training.data import CharacterData, run_seed
from training.errors import BadInput
from training.optimisers import adamw
from training.sharding import shard
from training.windows import IGNORE_INDEX, Batch

# What is trained if nothing is said.
VARIANT = "invertible"
# Windows that ActNorm takes its scales from.
_CALIBRATION = 32


class LanguageModule(L.LightningModule):
    """A character model and how it is trained, evaluated in nats and bits per character.

    The accuracy is the share of symbols that have the largest logit.

    Args:
        config: the model; vocab_size and vocabulary are the data's, whatever is given.
        pretrained: directory of a saved model to start from; its own config is used, and no option of
            config may be given.
        lr: learning rate: the largest one (cosine, constant), or the factor g (noam).
        schedule: cosine, constant, or noam: lr / sqrt(D) min(t^-1/2, t warmup^-3/2).
        warmup: steps of rising rates.
        final_lr: what is left of lr at the end of cosine.
        weight_decay: of linear weights; biases, norms, temperatures and embeddings never decay.
        betas: of AdamW.
        temperature: divides the logits before the softmax, in the loss and in nats: logits of a model
            with a small constant may be too close to each other for a sharp prediction. Text is
            drawn as it was trained with the same temperature in ``generate``.
        compile: run the model through torch.compile.
    """

    model: LanguageModel

    def __init__(
        self,
        config: LanguageModelConfig,
        pretrained: str | None = None,
        lr: float = 3e-3,
        schedule: Literal["cosine", "noam", "constant"] = "cosine",
        warmup: int = 100,
        final_lr: float = 0.1,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        temperature: PositiveFloat = 1.0,
        compile: bool = False,
    ) -> None:
        super().__init__()
        sizes = {name: getattr(config, name) for name in ("vocab_size", "vocabulary", "max_len")}
        if pretrained is not None and config != LanguageModelConfig(VARIANT, **sizes):
            raise BadInput(f"--model.pretrained brings its own config: leave yours out, got {config}")
        self.config, self.pretrained = config, pretrained
        self.lr, self.schedule, self.warmup, self.final_lr = lr, schedule, warmup, final_lr
        self.weight_decay, self.betas, self.compiled = weight_decay, betas, compile
        self.temperature = temperature
        self._sums: Tensor | None = None

    @property
    def data(self) -> CharacterData:
        """The Trainer's data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        """Builds the model for the data's vocabulary, before any checkpoint is loaded."""
        if "model" in self._modules:
            return
        kind = self.device.type
        # What the device draws with is put back, too; mps does not tell its state.
        with torch.random.fork_rng([] if kind in ("cpu", "mps") else [self.device], device_type=kind):
            torch.manual_seed(run_seed())
            self.model = self._loaded() if self.pretrained is not None else self._built()
            self._calibrate()
        if isinstance(self._strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            shard(self.model, self.device_mesh["data_parallel"])
        if self.compiled:
            self.model.compile()

    @property
    def _strategy(self) -> Any:
        return self.trainer.strategy

    def _built(self) -> LanguageModel:
        symbols = self.data.vocabulary
        try:
            return LanguageModel(replace(self.config, vocab_size=len(symbols), vocabulary=symbols))
        except (ValueError, NotCertifiable) as error:
            raise BadInput(f"--model.config: {error}") from error

    def _loaded(self) -> LanguageModel:
        assert self.pretrained is not None
        try:
            model = LanguageModel.from_pretrained(self.pretrained)
        except (OSError, ValueError) as error:
            raise BadInput(f"--model.pretrained: {error}") from error
        if model.config.vocabulary is None:
            raise BadInput(f"--model.pretrained: the model in {self.pretrained} has no vocabulary")
        self.data.use_vocabulary(model.config.vocabulary)
        self.data.codes  # noqa: B018  raises here for characters that the model does not know
        return with_vocabulary(model, self.data.vocabulary).train().to(self.device)

    @torch.no_grad()
    def _calibrate(self) -> None:
        """Lets ActNorm see text once: the same in each process, uncompiled and before sharding."""
        tokens = self.data.first_tokens(_CALIBRATION, min(self.data.block, self.model.config.max_len))
        self.model.train()
        self.model(tokens.to(next(self.model.parameters()).device))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next token: (B, N) -> (B, N, V)."""
        return self.model(tokens)

    def nats(self, batch: Batch) -> Tensor:
        """The sum of -log p over the symbols of a batch, in nats."""
        return self._nats(self.model(batch.inputs), batch.targets)

    def _nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of -log p over the symbols (B, N) that are not padding, for logits (B, N, V)."""
        scaled = logits.flatten(0, 1) / self.temperature
        return F.cross_entropy(scaled, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes what is random in a step a function of seed, process and step.

        So a resumed run draws what the unbroken one drew, whichever process wrote the checkpoint.
        """
        torch.manual_seed(
            derive_seed(run_seed(), self.global_rank, self.trainer.current_epoch, batch_idx)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the symbols of all processes, once their gradients are averaged."""
        loss = self.nats(batch) / batch.symbols
        self.log("train/nats", loss, sync_dist=True)
        self.log("train/bits", loss.detach() / math.log(2.0), sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up the nats of the validation text, and the symbols that were thought likeliest."""
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        logits = self.model(batch.inputs)
        hits = (logits.argmax(-1) == batch.targets).sum()
        nats = self._nats(logits, batch.targets)
        found = torch.stack([nats.to(wide), hits.to(wide), batch.symbols.to(wide)])
        self._sums = found if self._sums is None else self._sums + found

    def on_validation_epoch_end(self) -> None:
        """Nats and bits per character of the validation text, and the accuracy."""
        self._log_mean("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up the nats of the test text."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Nats and bits per character of the test text, and the accuracy."""
        self._log_mean("test")

    def _log_mean(self, stage: str) -> None:
        """The mean over all symbols of all processes (Lightning's own rounds the number of symbols)."""
        assert self._sums is not None
        total, hits, count = self._strategy.reduce(self._sums, reduce_op="sum")
        self._sums = None
        nats = (total / count).float()
        self.log(f"{stage}/nats", nats, prog_bar=True, sync_dist=True)
        self.log(f"{stage}/bits", nats / math.log(2.0), prog_bar=True, sync_dist=True)
        self.log(f"{stage}/accuracy", (hits / count).float(), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW and the schedule, stepped with each update."""
        optimiser = adamw(self.model, self.lr, self.weight_decay, self.betas)
        self._settings = [
            {name: group[name] for name in ("weight_decay", "betas")} for group in optimiser.param_groups
        ]
        rate = torch.optim.lr_scheduler.LambdaLR(optimiser, self._factor())
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": rate, "interval": "step"},
        }

    def on_train_start(self) -> None:
        """Gives a resumed optimiser the rate, decay and betas that this run was asked for.

        A checkpoint brings those of its own run along with the moments. The schedule is a function of
        the step, so that a run with the same settings goes on with the same rate to the last bit.
        """
        optimiser, schedule = self.optimizers(), self.lr_schedulers()
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        schedule.base_lrs = [self.lr] * len(self._settings)
        rate = self.lr * schedule.lr_lambdas[0](schedule.last_epoch)
        groups = optimiser.param_groups  # type: ignore[union-attr]
        for group, settings in zip(groups, self._settings, strict=True):
            group.update(settings, lr=rate, initial_lr=self.lr)

    def _factor(self) -> Any:
        if self.schedule == "noam":
            return partial(schedules.noam, warmup=self.warmup, dim=self.model.config.dim)
        if self.schedule == "constant":
            return partial(schedules.constant, warmup=self.warmup)
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total):
            raise BadInput(
                "--model.schedule cosine needs an end: give --trainer.max_steps or max_epochs"
            )
        return partial(schedules.cosine, warmup=self.warmup, total=int(total), final=self.final_lr)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Steps the schedule."""
        with warnings.catch_warnings():
            # A first mixed-precision step may be skipped; the schedule's count goes on regardless.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.* before .*optimizer.step")
            scheduler.step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the model is: its weights can be used without this class."""
        checkpoint["lipformer"] = {"config": self.model.config.to_dict(), "seed": run_seed()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses the checkpoint of another model before any weight is loaded."""
        theirs, ours = checkpoint["lipformer"]["config"], self.model.config.to_dict()
        wrong = [name for name in ours if theirs.get(name) != ours[name]]
        if wrong:
            listed = "; ".join(f"its {key} is {theirs.get(key)!r}, not {ours[key]!r}" for key in wrong)
            raise BadInput(f"the checkpoint is of another model: {listed}")
        try:
            check_dtypes(self.model.state_dict(), model_weights(checkpoint))
        except ValueError as error:
            raise BadInput(f"the checkpoint cannot be used: {error}") from error
