"""The report of a run: clean, PGD and certified accuracy in one table and one picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor

import lipformer as lf
from lipformer.analysis import certified_radius
from lipformer.models import VisionTransformer
from recipes.output import markdown, write_csv
from recipes.pgd import pgd_accuracy
from recipes.report import RunReport, count, draw_accuracy
from recipes.vision.data import ImageData
from recipes.vision.module import VisionModule


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


def table_text(rows: list[Row]) -> str:
    """The table of the report; radii that are known as parts of 255 are shown as such."""
    found = []
    for row in rows:
        known = abs(row.eps * 255 - round(row.eps * 255)) < 1e-3 and row.eps < 1
        shown = f"{round(row.eps * 255)}/255" if known else f"{row.eps:g}"
        accuracies = {"clean": row.clean, "PGD": row.pgd, "certified": row.certified}
        found.append({"eps": shown, **{name: f"{part:.1%}" for name, part in accuracies.items()}})
    return markdown(found)


class Report(RunReport):
    """After training: certifies and attacks the model on test images and writes what came out.

    Args:
        directory: of the report, the model and last.ckpt.
        eps: radii of the table; default 36/255, 72/255, 108/255, 0.5 and 1.
        images: judge by the first so many test images.
        attack_steps: of PGD.
        attack_restarts: of PGD.
        batch_size: images certified at once.
    """

    def __init__(
        self,
        directory: str = "report/vision",
        eps: list[PositiveFloat] | None = None,
        images: PositiveInt = 1000,
        attack_steps: PositiveInt = 20,
        attack_restarts: PositiveInt = 2,
        batch_size: PositiveInt = 100,
    ) -> None:
        super().__init__(directory)
        self.eps = sorted(eps or [36 / 255, 72 / 255, 108 / 255, 0.5, 1.0])
        self.images, self.batch_size = images, batch_size
        self.attack_steps, self.attack_restarts = attack_steps, attack_restarts

    def write(self, module: VisionModule, data: ImageData, updates: int, seconds: float) -> str:
        """The model, its accuracies and the text."""
        model = module.model
        model.save_pretrained(self.directory / "model")
        images, labels = (part.to(module.device) for part in data.images("test", self.images))
        with lf.frozen(model):
            radius = radii(model, images, labels, self.batch_size)
        attack = {"steps": self.attack_steps, "restarts": self.attack_restarts}
        rows = table(model, images, labels, radius, self.eps, **attack)
        write_csv(self.directory / "accuracy.csv", [asdict(row) for row in rows])
        attacked = {0.0: rows[0].clean, **{row.eps: row.pgd for row in rows}}
        path = self.directory / "accuracy.png"
        draw_accuracy(radius, attacked, path, "eps, l2 norm of pixels in [0, 1]")
        return self.text(rows, radius, model, data, updates, seconds)

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
        how = "LoFAST around each image"
        if model.config.variant == "l2":
            bound = lf.certify(model.body[:-1]).bound
            how = (
                f"one constant for all images, {bound:.4g} from image to the head's input, or Theorem L "
                "around each where it is better"
            )
        return (
            f"# {data.name}: a certified Vision Transformer ({model.config.variant})\n\n"
            f"    {self.command}\n\n"
            f"{model.config.tokens} tokens, {count(model):,} parameters, {updates} updates in "
            f"{seconds:.0f} s; {len(radius)} test images. Certified by {how}. "
            "eps is in the l2 norm of pixels in [0, 1]; "
            f"PGD has {self.attack_steps} steps from each of {self.attack_restarts} starts.\n\n"
            f"{table_text(rows)}\n\n"
            f"Median certified radius {radius.median().item():.3f}.\n\n"
            "- `accuracy.png`, `accuracy.csv`: the table; `model/`: the model, for\n"
            "  `lipformer.models.VisionTransformer.from_pretrained`.\n"
            "- `last.ckpt`: the state at the end; one that an interrupted run leaves is finished by\n"
            "  `fit --ckpt_path` with the same settings. `logs/`: CSV logs and the configuration.\n"
        )
