"""Callbacks that measure a model after each validation: certificate, inverse, text, speed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lipformer as lf
from lipformer.flows import NotConverged
from lipformer.models import LanguageModel
from lipformer.models.language_model import check_sampling
from training.corpus import decode, encode
from training.errors import BadInput
from training.module import LanguageModule
from training.progress import print_plain
from training.sharding import whole_model

Norm = Literal["l2", "token", "self", "linf"]


@contextmanager
def measured(pl_module: LanguageModule) -> Iterator[LanguageModel]:
    """The model in float32 or wider as it is saved: unsharded, in eval mode, outside autocast.

    It is frozen: an attack that normalised the weights in each pass would take half as long again.
    """
    device = pl_module.device.type
    with torch.inference_mode(False), torch.autocast(device, enabled=False):
        model = whole_model(pl_module.model)
        training = model.training
        model.eval()
        try:
            with lf.frozen(model):
                yield model
        finally:
            model.train(training)


class OutOfTime(Exception):
    """Raised when a measurement takes longer than its budget."""


class Deadline(TorchFunctionMode):
    """Raises :class:`OutOfTime` at the first call of torch after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, if there is time."""
        if time.monotonic() > self._end:
            raise OutOfTime
        return func(*args, **(kwargs or {}))


def certified_bound(model: LanguageModel, norm: str) -> float | None:
    """The certificate from embedded tokens to logits, None for variants that have none."""
    length = None if model.config.any_length else model.config.max_len
    try:
        return lf.certify(model, seq_len=length, norm=norm).bound
    except lf.NotCertifiable:
        return None


def attacked_estimate(
    model: LanguageModel, tokens: Tensor, norm: str, steps: int, restarts: int, seed: int = 0
) -> float:
    """The largest gain that a search from real text finds: a lower estimate of the constant."""
    with torch.enable_grad():
        x = model.embed(tokens).detach()
        generator = torch.Generator(x.device).manual_seed(seed)
        found = lf.attack_lipschitz(
            model.body, x, norm=norm, steps=steps, restarts=restarts, generator=generator
        )
    return found.value


def local_gains(model: LanguageModel, tokens: Tensor, radius: float) -> tuple[float, float]:
    """The certificate around embedded text (Theorem L), and the gain there, from below; l2 norm.

    Args:
        model: one that has a certificate.
        tokens: (B, N).
        radius: of the ball around each sample, in median lengths of an embedded token.
    """
    with torch.enable_grad():
        x = model.embed(tokens).detach()
        length = radius * float(torch.linalg.vector_norm(x, dim=-1).median())
        gain = lf.estimate_lipschitz(model.body, x).value
    return lf.certify(model, at=x, radius=length).bound, gain


def within(seconds: float) -> AbstractContextManager[object]:
    """A deadline, if there is one: it makes what it watches a third slower."""
    return Deadline(seconds) if seconds < math.inf else nullcontext()


class Monitor(L.Callback):
    """Measures after each validation, within a share of the training time since the last one.

    What is skipped is logged as NaN, printed, counted in the report, and measured in full when the fit
    ends. All monitors of a validation share that time; `validate` has no limit.

    Attributes:
        final: what was measured when the fit ended, since the last validation had cut it.
    """

    names: ClassVar[tuple[str, ...]]
    option: ClassVar[str]

    def __init__(self, enabled: bool, budget: float) -> None:
        self.enabled, self.budget = enabled, budget
        self.final: dict[str, float] = {}
        self._begun = self._trained = self._spent = 0.0

    def measure(self, model: LanguageModel, module: LanguageModule, seconds: float) -> dict[str, float]:
        """What it measures; not a number what was cut after so many seconds, the same names anyway."""
        raise NotImplementedError

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock of training."""
        self._begun = time.monotonic()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops it."""
        self._trained, self._spent = time.monotonic() - self._begun, 0.0

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measures; every process does, and all agree on what was cut: not a number stays so."""
        if not self.enabled or trainer.sanity_checking:
            return
        seconds = math.inf
        if trainer.state.fn == "fit":
            others = (c for c in trainer.callbacks if isinstance(c, Monitor))  # type: ignore[attr-defined]
            seconds = self.budget * self._trained - sum(other._spent for other in others)
        start = time.monotonic()
        with measured(pl_module) as model:
            found = self.measure(model, pl_module, seconds)
        self._spent = time.monotonic() - start
        pl_module.log_dict(found, sync_dist=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Says what was cut, and starts the clock again."""
        cut = self._cut(trainer)
        if cut and trainer.is_global_zero and not trainer.sanity_checking:
            print_plain(
                f"step {trainer.global_step}: no {', '.join(cut)}: monitors may take {self.budget:g} "
                f"(--{self.option}.budget) of the {self._trained:.1f} s of training since the last "
                "validation. In full when the fit ends."
            )
        self._begun = time.monotonic()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measures in full what the last validation had to leave out."""
        if not self._cut(trainer):
            return
        with measured(pl_module) as model:
            self.final = self.measure(model, pl_module, math.inf)
        for logger in trainer.loggers:
            logger.log_metrics(self.final, step=trainer.global_step - 1)  # steps count from 0 there

    def _cut(self, trainer: L.Trainer) -> list[str]:
        metrics = trainer.callback_metrics
        return [name for name in self.names if name in metrics and math.isnan(metrics[name])]


class CertificateMonitor(Monitor):
    """Logs the certified constant beside an attacked lower estimate: the truth lies between them.

    In the l2 norm also both around validation text: the certificate for inputs in a small ball, and the
    gain at its centre. Variants without a certificate get the estimate alone. The attack draws from its
    own generator. The certified constant is never cut.

    Args:
        enabled: false to skip it.
        norm: l2, token, self or linf.
        length: tokens of the attacked sequence.
        steps: of the attack.
        restarts: of the attack.
        radius: of that ball, in median lengths of an embedded token; 0 for no certificate there.
        budget: the share of the training time since the last validation that all monitors before it and
            it may take; what is cut is measured when the fit ends.
    """

    names = (
        "certificate/bound",
        "certificate/local",
        "certificate/local_estimate",
        "certificate/estimate",
    )
    option = "certificate"

    def __init__(
        self,
        enabled: bool = True,
        norm: Norm = "l2",
        length: PositiveInt = 24,
        steps: PositiveInt = 4,
        restarts: PositiveInt = 4,
        radius: NonNegativeFloat = 0.01,
        budget: NonNegativeFloat = 0.1,
    ) -> None:
        super().__init__(enabled, budget)
        self.norm, self.radius = norm, radius
        self.length, self.steps, self.restarts = length, steps, restarts

    def measure(self, model: LanguageModel, module: LanguageModule, seconds: float) -> dict[str, float]:
        """The constant, the two around the text, and last the attack, which takes longest."""
        end = time.monotonic() + seconds
        # Moved here: a copy that is made in inference mode cannot be attacked.
        tokens = module.data.validation_tokens(self.length).to(module.device)
        found = {}
        bound = certified_bound(model, self.norm)
        if bound is not None:
            found["certificate/bound"] = bound
        if bound is not None and self.norm == "l2" and self.radius:
            found |= {"certificate/local": math.nan, "certificate/local_estimate": math.nan}
            with suppress(OutOfTime), within(end - time.monotonic()):
                around, gain = local_gains(model, tokens, self.radius)
                found |= {"certificate/local": around, "certificate/local_estimate": gain}
        found["certificate/estimate"] = math.nan
        with suppress(OutOfTime), within(end - time.monotonic()):
            found["certificate/estimate"] = attacked_estimate(
                model, tokens, self.norm, self.steps, self.restarts
            )
        return found


class InversionMonitor(Monitor):
    """Logs how well an invertible model's input is recovered from its hidden tokens.

    The largest error of an entry, infinite where an inverse does not converge.

    Args:
        enabled: false to skip it. Models that are not invertible are skipped anyway.
        length: tokens of validation text.
        budget: as the certificate's.
    """

    names = ("inversion/error",)
    option = "inversion"

    def __init__(
        self, enabled: bool = True, length: PositiveInt = 128, budget: NonNegativeFloat = 0.1
    ) -> None:
        super().__init__(enabled, budget)
        self.length = length

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measures an invertible model."""
        if pl_module.model.config.variant == "invertible":
            super().on_validation_epoch_end(trainer, pl_module)

    def measure(self, model: LanguageModel, module: LanguageModule, seconds: float) -> dict[str, float]:
        """The error of the beginning of the validation text."""
        tokens = module.data.validation_tokens(min(self.length, model.config.max_len))
        error = math.nan
        with suppress(OutOfTime), within(seconds):
            error = inversion_error(model, tokens.to(module.device))
        return {"inversion/error": error}


@torch.no_grad()
def inversion_error(model: LanguageModel, tokens: Tensor) -> float:
    """The largest entry of |invert(hidden(x)) - x| for the embedded tokens x (B, N)."""
    x = model.embed(tokens)
    try:
        return (model.invert(model.hidden(x)) - x).abs().max().item()
    except NotConverged:
        return math.inf


class TextSample(L.Callback):
    """Prints what the model writes after each validation, and gives it to TensorBoard.

    Args:
        enabled: false to skip it.
        prompt: what it continues; default the first line of the validation text.
        max_new: characters to write.
        temperature: divides the logits; 0 takes the likeliest character.
        top_k: draw among the k likeliest characters only.
    """

    def __init__(
        self,
        enabled: bool = True,
        prompt: str | None = None,
        max_new: PositiveInt = 200,
        temperature: NonNegativeFloat = 0.8,
        top_k: PositiveInt | None = None,
    ) -> None:
        self.enabled, self.prompt, self.max_new = enabled, prompt, max_new
        self.temperature, self.top_k = temperature, top_k
        self.text = ""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Refuses what it could not write with, before the model is trained."""
        if self.enabled:
            self._prompt(pl_module)
            try:
                check_sampling(self.temperature, self.top_k, pl_module.model.config.vocab_size)
            except ValueError as error:
                raise BadInput(f"--text.{error}") from error

    def _prompt(self, module: LanguageModule) -> Tensor:
        """Tokens to continue, (1, N)."""
        config = module.model.config
        if self.prompt is None:
            return module.data.validation_tokens(min(32, config.max_len // 2))
        if not self.prompt:
            raise BadInput("--text.prompt must have at least one character, got ''")
        return encode(self.prompt, str(config.vocabulary), "--text.prompt")[None]

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Writes with a generator of its own: training draws the same numbers with and without."""
        if not self.enabled or trainer.sanity_checking:
            return
        prompt = self._prompt(pl_module)
        with measured(pl_module) as model:
            room = self.max_new if model.config.any_length else model.config.max_len - prompt.shape[1]
            tokens = model.generate(
                prompt.to(pl_module.device),
                max(0, min(self.max_new, room)),
                self.temperature,
                self.top_k,
                torch.Generator(pl_module.device).manual_seed(0),
            )
        self.text = decode(tokens[0], str(model.config.vocabulary))
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("text", f"```\n{self.text}\n```", trainer.global_step)
        if trainer.state.fn == "fit":
            print_plain(f"--- step {trainer.global_step} ---\n{self.text}")


class Throughput(L.Callback):
    """Logs characters learnt from per second, over all processes, without the time of validations."""

    def __init__(self) -> None:
        self._clock: float | None = None
        self._seconds, self._symbols = 0.0, 0
        self.total_seconds, self.total_symbols = 0.0, 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock where it was stopped."""
        if self._clock is None:
            self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts, and logs when the Trainer logs."""
        self._symbols += batch.inputs.numel() * trainer.world_size
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._stop(pl_module)
        pl_module.log("train/characters_per_second", self._symbols / max(self._seconds, 1e-9))
        self.total_seconds += self._seconds
        self.total_symbols += self._symbols
        self._seconds, self._symbols = 0.0, 0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock."""
        self._stop(pl_module)

    def _stop(self, pl_module: L.LightningModule) -> None:
        if self._clock is None:
            return
        torch.get_device_module(pl_module.device).synchronize()
        self._seconds += time.perf_counter() - self._clock
        self._clock = None
