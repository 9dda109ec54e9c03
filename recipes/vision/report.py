"""The report of a run: clean, PGD and certified accuracy in one table and one picture."""

from __future__ import annotations

import csv
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

import lightning as L
import torch
from torch import Tensor

import lipformer as lf
from lipformer.analysis import certified_radius
from lipformer.models import VisionTransformer
from recipes.vision.data import ImageData
from recipes.vision.module import VisionModule
from recipes.vision.pgd import pgd_accuracy
from training.errors import BadInput


@dataclass(frozen=True)
class Row:
    """Accuracies at one radius.

    Attributes:
        eps: radius, in the l2 norm of pixels in [0, 1].
        clean: accuracy on the images as they are.
        pgd: accuracy at the worst images that an attack finds, at least the robust accuracy.
        certified: the part that no perturbation changes, at most the robust accuracy.
    """

    eps: float
    clean: float
    pgd: float
    certified: float


def radii(model: VisionTransformer, images: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    """The certified radius of each image, 0 where it is misclassified, (B,) on the CPU."""
    batches = zip(images.split(batch_size), labels.split(batch_size), strict=True)
    return torch.cat([certified_radius(model, x, y).cpu() for x, y in batches])


def table(
    model: VisionTransformer,
    images: Tensor,
    labels: Tensor,
    radius: Tensor,
    eps: list[float],
    *,
    steps: int,
    restarts: int,
) -> list[Row]:
    """A row for each eps; the radii are those of the same images."""
    with torch.no_grad():
        clean = (model(images).argmax(1) == labels).double().mean().item()
    rows = []
    for reach in eps:
        attacked = pgd_accuracy(model, images, labels, reach, steps=steps, restarts=restarts)
        rows.append(Row(reach, clean, attacked, (radius >= reach).double().mean().item()))
    return rows


def markdown(rows: list[Row]) -> str:
    """The table of the report."""
    lines = ["| eps | clean | PGD | certified |", "|---|---|---|---|"]
    for row in rows:
        # Radii that are known as parts of 255 are shown as such.
        parts = row.eps * 255
        shown = (
            f"{round(parts)}/255" if abs(parts - round(parts)) < 1e-3 and row.eps < 1 else f"{row.eps:g}"
        )
        lines.append(f"| {shown} | {row.clean:.1%} | {row.pgd:.1%} | {row.certified:.1%} |")
    return "\n".join(lines)


def draw(rows: list[Row], radius: Tensor, path: Path) -> None:
    """Accuracy against eps: the certified curve, the attack's points, what lies between."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    furthest = max(row.eps for row in rows)
    grid = torch.linspace(0.0, furthest, 200, dtype=torch.float64)
    certified = (radius.double()[None] >= grid.clamp_min(1e-12)[:, None]).double().mean(1)
    axes.plot(grid.tolist(), certified.tolist(), label="certified")
    places = [0.0, *(row.eps for row in rows)]
    axes.plot(places, [rows[0].clean, *(row.pgd for row in rows)], "o--", label="PGD attack")
    axes.set(xlabel="eps, l2 norm of pixels in [0, 1]", ylabel="accuracy", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=150)


class Report(L.Callback):
    """After training: certifies and attacks the model on test images and writes what came out.

    Args:
        directory: of the report, the model and last.ckpt.
        eps: radii of the table; default 36/255, 72/255, 108/255, 0.5 and 1.
        images: judge by the first so many test images.
        attack_steps: of PGD.
        attack_restarts: of PGD.
        batch_size: images certified at once.

    Attributes:
        command: the command line of the run, for the report.
    """

    command: ClassVar[str] = "python -m recipes.vision fit"

    def __init__(
        self,
        directory: str = "report/vision",
        eps: list[float] | None = None,
        images: int = 1000,
        attack_steps: int = 20,
        attack_restarts: int = 2,
        batch_size: int = 100,
    ) -> None:
        counts = {
            "images": images,
            "attack_steps": attack_steps,
            "attack_restarts": attack_restarts,
            "batch_size": batch_size,
        }
        for option, count in counts.items():
            if count < 1:
                raise BadInput(f"--report.{option} must be at least 1, got {count}")
        if eps is not None and not all(0.0 < reach < math.inf for reach in eps):
            raise BadInput(f"--report.eps must be positive and finite numbers, got {eps}")
        self.directory = Path(directory)
        self.eps = sorted(eps or [36 / 255, 72 / 255, 108 / 255, 0.5, 1.0])
        self.images, self.batch_size = images, batch_size
        self.attack_steps, self.attack_restarts = attack_steps, attack_restarts
        self._begin = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the state so far, in case the run is broken off."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            trainer.save_checkpoint(self.directory / "last.ckpt", weights_only=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the weights and writes the report, in the first process only."""
        seconds = time.perf_counter() - self._begin
        trainer.save_checkpoint(self.directory / "last.ckpt", weights_only=False)
        if not trainer.is_global_zero:
            return
        assert isinstance(pl_module, VisionModule)
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, ImageData)
        model = pl_module.model.eval()
        model.save_pretrained(self.directory / "model")
        images, labels = (part.to(pl_module.device) for part in data.images("test", self.images))
        with lf.frozen(model):
            radius = radii(model, images, labels, self.batch_size)
        rows = table(
            model,
            images,
            labels,
            radius,
            self.eps,
            steps=self.attack_steps,
            restarts=self.attack_restarts,
        )
        with open(self.directory / "accuracy.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        draw(rows, radius, self.directory / "accuracy.png")
        text = self.text(rows, radius, model, data, trainer.global_step, seconds)
        (self.directory / "report.md").write_text(text, encoding="utf-8")
        print(f"\n{text}\nwritten to {self.directory}")

    def text(
        self,
        rows: list[Row],
        radius: Tensor,
        model: VisionTransformer,
        data: ImageData,
        updates: int,
        seconds: float,
    ) -> str:
        """The report as Markdown."""
        size = sum(p.numel() for p in model.parameters())
        how = "LoFAST around each image"
        if model.config.variant == "l2":
            bound = lf.certify(model.body[:-1]).bound
            how = f"one constant, {bound:.4g} from image to the head's input"
        return (
            f"# {data.name}: a certified Vision Transformer ({model.config.variant})\n\n"
            f"    {self.command}\n\n"
            f"{model.config.tokens} tokens, {size:,} parameters, {updates} updates in {seconds:.0f} s; "
            f"{len(radius)} test images. Certified by {how}. eps is in the l2 norm of pixels in [0, 1]; "
            f"PGD has {self.attack_steps} steps from each of {self.attack_restarts} starts.\n\n"
            f"{markdown(rows)}\n\n"
            f"Median certified radius {radius.median().item():.3f}.\n\n"
            "- `accuracy.png`, `accuracy.csv`: the table; `model/`: the model, for\n"
            "  `lipformer.models.VisionTransformer.from_pretrained`.\n"
            "- `last.ckpt`: the state at the end; one that an interrupted run leaves is finished by\n"
            "  `fit --ckpt_path` with the same settings. `logs/`: CSV logs and the configuration.\n"
        )
