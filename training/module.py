"""Training a language model, with Lightning."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lipformer.certificate import NotCertifiable
from lipformer.models import LanguageModel, LanguageModelConfig
from training import schedules
from training.batches import mixed_seed
from training.data import CharacterData, run_seed
from training.errors import BadInput
from training.optimisers import adamw
from training.sharding import shard
from training.windows import IGNORED, Batch

# Windows that ActNorm takes its scales from.
_CALIBRATION = 32


class LanguageModule(L.LightningModule):
    """A character model and how it is trained, judged in nats and bits per character.

    Args:
        variant: dot_product, l2_untied, l2, contractive, lipschitz or invertible.
        dim: D, the width of a token.
        num_heads: H, a divisor of D.
        num_layers: blocks of attention and feed-forward.
        hidden: width inside the feed-forward part, default 4 D.
        max_len: the largest number of tokens, default the data's block; ALiBi takes any number.
        dropout: of attention weights and hidden features.
        positions: alibi, rotary, sinusoidal or none; default the variant's best.
        slopes: ALiBi slopes, one per head; default the variant's best.
        token_shift: half of the features that attention sees come from the token before; default the
            variant's best.
        query_scale: what the initial W_Q is multiplied by, default 1.
        value_proj: tied L2 attention in the paper's form (true) or in the lean form (false).
        norm_place: pre, post or none.
        coeff: bound of each contractive branch.
        norm: in which branches contract: self, l2, token or linf.
        bound: kim2021 for the published scaling (contractive only).
        head_coeff: bound of the last linear map (lipschitz only).
        pretrained: directory of a saved model to start from; its own config is used, and options above
            must not be given.
        lr: learning rate: the largest one (cosine, constant), or the factor g (paper).
        schedule: cosine, constant, or paper: lr / sqrt(D) min(t^-1/2, t warmup^-3/2).
        warmup: steps of rising rates.
        final_lr: what is left of lr at the end of cosine.
        weight_decay: of linear weights; biases, norms, temperatures and embeddings never decay.
        betas: of AdamW.
        compile: run the model through torch.compile.
    """

    model: LanguageModel

    def __init__(
        self,
        variant: str = "invertible",
        dim: int | None = None,
        num_heads: int | None = None,
        num_layers: int | None = None,
        hidden: int | None = None,
        max_len: int | None = None,
        dropout: float | None = None,
        positions: str | None = None,
        slopes: list[float] | None = None,
        token_shift: bool | None = None,
        query_scale: float | None = None,
        value_proj: bool | None = None,
        norm_place: str | None = None,
        coeff: float | None = None,
        norm: str | None = None,
        bound: str | None = None,
        head_coeff: float | None = None,
        pretrained: str | None = None,
        lr: float = 3e-3,
        schedule: str = "cosine",
        warmup: int = 100,
        final_lr: float = 0.1,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        compile: bool = False,
    ) -> None:
        super().__init__()
        if schedule not in schedules.SCHEDULES:
            raise BadInput(
                f"--model.schedule must be one of {', '.join(schedules.SCHEDULES)}, got {schedule!r}"
            )
        if not (0.0 < lr < math.inf):
            raise BadInput(f"--model.lr must be positive and finite, got {lr}")
        if not (0.0 <= weight_decay < math.inf):
            raise BadInput(f"--model.weight_decay must be finite and not negative, got {weight_decay}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise BadInput(f"--model.betas must lie in [0, 1), got {betas}")
        if warmup < 0:
            raise BadInput(f"--model.warmup must be at least 0, got {warmup}")
        if not (0.0 <= final_lr <= 1.0):
            raise BadInput(f"--model.final_lr must lie in [0, 1], got {final_lr}")
        shape = {
            "dim": dim,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "hidden": hidden,
            "max_len": max_len,
            "dropout": dropout,
            "positions": positions,
            "slopes": None if slopes is None else tuple(slopes),
            "token_shift": token_shift,
            "query_scale": query_scale,
            "value_proj": value_proj,
            "norm_place": norm_place,
            "coeff": coeff,
            "norm": norm,
            "bound": bound,
            "head_coeff": head_coeff,
        }
        self.shape = {name: value for name, value in shape.items() if value is not None}
        if pretrained is not None and self.shape:
            raise BadInput(
                f"--model.pretrained brings its own {', '.join(self.shape)}: leave them out, got "
                f"{self.shape}"
            )
        self.variant, self.pretrained = variant, pretrained
        self.lr, self.schedule, self.warmup, self.final_lr = lr, schedule, warmup, final_lr
        self.weight_decay, self.betas, self.compiled = weight_decay, betas, compile
        self._sums: Tensor | None = None

    @property
    def data(self) -> CharacterData:
        """The Trainer's data module."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, CharacterData):
            raise BadInput(f"LanguageModule trains on CharacterData, got {type(data).__name__}")
        return data

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
        vocabulary = self.data.vocabulary
        shape = {"max_len": self.data.block, **self.shape}
        try:
            config = LanguageModelConfig(
                self.variant,
                len(vocabulary),
                vocabulary=vocabulary,
                **shape,  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise BadInput(f"--model: {error}") from error
        if not config.any_length and config.max_len < self.data.block:
            raise BadInput(
                f"--model.max_len must be at least the block of {self.data.block} with these positions, "
                f"got {config.max_len}"
            )
        try:
            return LanguageModel(config)
        except (ValueError, NotCertifiable) as error:
            raise BadInput(f"--model: {error}") from error

    def _loaded(self) -> LanguageModel:
        assert self.pretrained is not None
        try:
            model = LanguageModel.from_pretrained(self.pretrained)
        except (OSError, ValueError) as error:
            raise BadInput(f"--model.pretrained: {error}") from error
        if model.config.vocabulary is None:
            raise BadInput(f"--model.pretrained: the model in {self.pretrained} has no vocabulary")
        self.data.use_vocabulary(model.config.vocabulary)
        self.data.codes  # noqa: B018  characters that the model does not know are told of here
        return model.train().to(self.device)

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
        logits = self.model(batch.inputs)
        return F.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes what is random in a step a function of seed, process and step.

        So a resumed run draws what the unbroken one drew, whichever process wrote the checkpoint.
        """
        torch.manual_seed(
            mixed_seed(run_seed(), self.global_rank, self.trainer.current_epoch, batch_idx)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the symbols of all processes, once their gradients are averaged."""
        loss = self.nats(batch) / batch.symbols
        self.log("train/nats", loss, sync_dist=True)
        self.log("train/bits", loss.detach() / math.log(2.0), sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Begins to count."""
        self._sums = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up the nats of the validation text."""
        self._judge(batch)

    def on_validation_epoch_end(self) -> None:
        """Nats and bits per character of the validation text."""
        self._log_mean("val")

    def on_test_epoch_start(self) -> None:
        """Begins to count."""
        self._sums = None

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up the nats of the test text."""
        self._judge(batch)

    def on_test_epoch_end(self) -> None:
        """Nats and bits per character of the test text."""
        self._log_mean("test")

    def _judge(self, batch: Batch) -> None:
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        found = torch.stack([self.nats(batch).to(wide), batch.symbols.to(wide)])
        self._sums = found if self._sums is None else self._sums + found

    def _log_mean(self, stage: str) -> None:
        """The mean over all symbols of all processes (Lightning's own rounds the number of symbols)."""
        assert self._sums is not None
        total, count = self._strategy.reduce(self._sums, reduce_op="sum")
        nats = (total / count).float()
        self.log(f"{stage}/nats", nats, prog_bar=True, sync_dist=True)
        self.log(f"{stage}/bits", nats / math.log(2.0), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW and the schedule, stepped with each update."""
        optimiser = adamw(self.model, self.lr, self.weight_decay, self.betas)
        rate = torch.optim.lr_scheduler.LambdaLR(optimiser, self._factor())
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": rate, "interval": "step"},
        }

    def _factor(self) -> Any:
        if self.schedule == "paper":
            return partial(schedules.paper, warmup=self.warmup, dim=self.model.config.dim)
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
        found = checkpoint.get("lipformer", {}).get("config")
        if found is None:
            raise BadInput("the checkpoint is not one of a lipformer language model")
        try:  # entries that are missing, as in older checkpoints, have their default
            theirs = LanguageModelConfig.from_dict(found).to_dict()
        except ValueError as error:
            raise BadInput(f"the checkpoint's model cannot be built: {error}") from error
        ours = self.model.config.to_dict()
        wrong = [name for name in ours if theirs.get(name) != ours[name]]
        if wrong:
            told = "; ".join(f"its {name} is {theirs.get(name)!r}, not {ours[name]!r}" for name in wrong)
            raise BadInput(f"the checkpoint is of another model: {told}")
