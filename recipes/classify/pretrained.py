"""Fine-tunes a pretrained encoder of Hugging Face on texts with labels, its attention converted to L2.

    python -m recipes.classify.pretrained fit --config recipes/classify/pretrained.yaml

The encoder is converted, fitted to the original on the training texts (`lf.distill_attention`) and then
fine-tuned. ``--model.convert false`` fine-tunes it as it is, by the same plan, to compare with. ``--out
DIR`` says where all goes, else report/classify/pretrained_convert_<convert>.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.cli import LightningArgumentParser
from rich.progress import track
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers.convert.conversion import RECORD
from recipes.classify.data import TextBatch, TextData
from recipes.classify.pretrained_report import PretrainedReport
from recipes.cli import RecipeCLI, run_recipe
from recipes.margin import OneCycleModule
from training.errors import BadInput, first_line

TRAINER = {
    "max_epochs": -1,
    "max_steps": 200,
    "val_check_interval": 50,
    "enable_model_summary": False,
}


def is_converted(pretrained: str) -> bool:
    """Whether a directory holds a converted model; a name on the hub does not."""
    try:
        config = transformers.AutoConfig.from_pretrained(pretrained)
    except (OSError, ValueError) as error:
        raise BadInput(
            "--model.pretrained must be an encoder of Hugging Face, a directory or a name on the hub, "
            f"got {pretrained!r}: {first_line(error)}"
        ) from error
    return getattr(config, RECORD, None) is not None


def load_classifier(pretrained: str, num_classes: int, convert: bool, null_key: bool = False) -> Any:
    """A classifier of Hugging Face with the weights of an encoder, converted or as it is.

    Args:
        pretrained: a directory or a name on the hub; of a converted classifier (``distilled`` or
            ``model`` of an earlier run) a directory.
        num_classes: K.
        convert: its attention to L2.
        null_key: to untied L2 with a null key, see lf.convert_attention.
    """
    if not is_converted(pretrained):
        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            pretrained, num_labels=num_classes
        )
        # Numbers that its new layers draw are not missed later: both arms see the same batches.
        with torch.random.fork_rng(devices=[]):
            return lf.convert_attention(model, null_key=null_key).model if convert else model
    if not convert:
        raise BadInput(f"--model.convert false needs an encoder as it was, {pretrained} is converted")
    model = lf.load_converted(pretrained)
    if getattr(model, "num_labels", None) != num_classes:
        raise BadInput(f"--model.pretrained {pretrained} does not classify {num_classes} classes")
    return model


def arguments(batch: TextBatch) -> dict[str, Tensor]:
    """What an encoder of Hugging Face is called with."""
    return {"input_ids": batch.tokens, "attention_mask": (~batch.padding).long()}


@torch.no_grad()
def mean_cosine(model: nn.Module, original: nn.Module, batches: Iterator[dict[str, Tensor]]) -> float:
    """Of the mean outputs of two encoders over the tokens of a text, over all texts."""
    found = []
    for batch in batches:
        weight = batch["attention_mask"].unsqueeze(-1)
        a, b = ((weight * encoder(**batch)[0]).sum(1) for encoder in (model, original))
        found.append(F.cosine_similarity(a, b, dim=-1))
    return torch.cat(found).mean().item()


class PretrainedModule(OneCycleModule):
    """An encoder of Hugging Face with a head for classes, trained by cross-entropy.

    Args:
        pretrained: its directory or its name on the hub, or a directory that an earlier run left.
        num_classes: is that of the data.
        convert: its attention to L2, which is then fitted to its own.
        null_key: to L2 attention with weights of its own for queries, keys and values and a null key,
            much nearer to the original. False: to tied attention, whose certificate is smaller.
        distill_steps: steps of the two stages of lf.distill_attention, on the training texts.
        lr: largest learning rate of one cycle.
        weight_decay: of linear weights.

    Attributes:
        cosines: of the mean outputs with the original's, on the texts for validation: converted, and
            after each stage.
    """

    model: Any

    def __init__(
        self,
        pretrained: str,
        num_classes: int = 2,
        convert: bool = True,
        null_key: bool = True,
        distill_steps: tuple[int, int] = (150, 1000),
        lr: float = 1e-4,
        weight_decay: float = 0.01,
    ) -> None:
        model = load_classifier(pretrained, num_classes, convert, null_key)
        super().__init__(model.train(), lr, weight_decay)
        self.save_hyperparameters()
        if min(distill_steps) < 0:
            raise BadInput(f"--model.distill_steps must be two integers >= 0, got {distill_steps}")
        self.pretrained, self.num_classes = pretrained, num_classes
        needed = convert and not is_converted(pretrained)
        self.distill_steps = tuple(distill_steps) if needed else (0, 0)
        self.cosines: list[float] = []

    def forward(self, batch: TextBatch) -> Tensor:
        """Logits (B, K)."""
        return self.model(**arguments(batch)).logits

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        loss = F.cross_entropy(self(batch), batch.labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Accuracy."""
        self._evaluate(batch, "val")

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        """The same on the test texts."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: TextBatch, stage: str) -> None:
        right = (self(batch).argmax(1) == batch.labels).float().mean()
        self.log(f"{stage}/accuracy", right, prog_bar=True, batch_size=len(batch.labels), sync_dist=True)

    def on_fit_start(self) -> None:
        """Fits what was converted to the original, unless a checkpoint has it already."""
        if not any(self.distill_steps) or self.trainer.ckpt_path is not None:
            return
        if self.trainer.world_size > 1:
            raise BadInput(
                "distilling takes one device: give --trainer.devices 1 --trainer.max_steps 1, and then "
                "the directory distilled/ of that run as --model.pretrained"
            )
        # The order of the batches to come is that of the unconverted arm.
        with torch.random.fork_rng(devices=[]):
            self.distill(self.trainer.datamodule)  # type: ignore[attr-defined]

    def distill(self, data: TextData) -> None:
        """Both stages, with a bar; the result is kept in ``distilled`` of the output directory."""
        original = load_classifier(self.pretrained, self.num_classes, False).base_model.to(self.device)
        encoder = self.model.base_model
        was_training = encoder.training

        def measure(when: str) -> None:
            encoder.eval(), original.eval()
            self.cosines.append(mean_cosine(encoder, original, self._inputs(data.val_dataloader())))
            print(f"cosine with the original {when}: {self.cosines[-1]:.3f}", flush=True)

        def batches() -> Iterator[dict[str, Tensor]]:
            while True:
                yield from self._inputs(data.train_dataloader())

        first, second = self.distill_steps
        print(f"distilling by {first} + {second} steps; cosines are on validation texts", flush=True)
        self.cosines = []
        measure("as converted")
        hidden = self.trainer.progress_bar_callback is None
        bar: Any = track(batches(), "Distilling", first + second, disable=hidden)
        with contextlib.closing(bar):
            for steps, when in (((first, 0), "layer by layer"), ((0, second), "end to end")):
                lf.distill_attention(encoder, original, bar, steps)
                measure(f"after {sum(steps)} steps {when}")
        encoder.train(was_training)
        for part in (self.model, data.tokenizer):
            part.save_pretrained(Path(self.trainer.default_root_dir) / "distilled")

    def _inputs(self, batches: Iterable[TextBatch]) -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            yield {name: part.to(self.device) for name, part in arguments(batch).items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps what the report tells of the distillation."""
        checkpoint["cosines"] = self.cosines

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes it back."""
        self.cosines = checkpoint["cosines"]


class PretrainedCLI(RecipeCLI):
    """The command line: the encoder's tokenizer, the data's classes, one directory for all output."""

    loss = "train/loss"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        place = "report/classify/pretrained_convert_{}"
        self.add_output(parser, PretrainedReport, place, "model.convert")
        parser.link_arguments("model.pretrained", "data.tokenizer")
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def run(given: list[str]) -> None:
        PretrainedCLI(PretrainedModule, TextData, args=given, trainer_defaults=TRAINER)

    return run_recipe("recipes.classify.pretrained", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
