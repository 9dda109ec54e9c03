"""recipes/vision in small: attack, loss, report, and that every YAML file runs."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import certified_radius
from lipformer.models import VisionTransformer, VisionTransformerConfig
from recipes.margin import add_margin
from recipes.pgd import logit_margin, pgd, pgd_accuracy, project_to_ball
from recipes.vision.__main__ import main
from recipes.vision.data import DATASETS, ImageData
from recipes.vision.module import VisionModule, local_gain
from recipes.vision.report import Row, radii, table, table_text
from tests.recipes.tiny import run_small
from tests.training.tiny import LIGHTNING_WARNINGS

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "vision"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
NAMES = {f"{name}_{variant}" for name in DATASETS for variant in ("l2", "dot_product")}
TINY: dict[str, object] = {
    "model.config.dim": 8,
    "model.config.hidden": 8,
    "model.config.readout": 8,
    "data.batch_size": 8,
    "data.train_images": 64,
    "trainer.max_steps": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.val_check_interval": 2,
    "trainer.limit_val_batches": 1,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": False,
    "report.images": 6,
    "report.attack_steps": 2,
    "report.attack_restarts": 1,
}
run = partial(run_small, main, TINY)


def noise(*shape: int, white: int = 255) -> Tensor:
    return torch.randint(white + 1, shape, generator=torch.Generator().manual_seed(5)).to(torch.uint8)


def write_idx(path: Path, content: Tensor) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in content.shape)
    path.write_bytes(b"\0\0\x08" + bytes([content.ndim]) + sizes + content.numpy().tobytes())


def write_sheet(path: Path, images: Tensor) -> None:

    rows = images.permute(0, 2, 3, 1).flatten(1, 2)
    Image.fromarray(rows.contiguous().numpy()).save(path)


def write_hub(folder: Path, images: Tensor, labels: Tensor) -> Path:
    """A data set as it is on the hub, in "cropped_digits", the second of two configurations."""
    pictures = [Image.fromarray(image.squeeze(-1).numpy()) for image in images.permute(0, 2, 3, 1)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": labels.tolist()}, features=datasets.Features(features)
    )
    configs = []
    for name, count in (("full_numbers", 1), ("cropped_digits", len(rows))):
        configs.append({"config_name": name, "data_dir": name})
        for split in ("train", "test"):
            some = rows.select(range(count))
            some.to_parquet(str(folder / name / f"{split}-00000-of-00001.parquet"))
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    return folder


def write_data(name: str, folder: Path, count: int = 100) -> Path:
    """Made-up files with the names and layout of the packages."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = torch.arange(count) % 10
    if name == "svhn":
        write_hub(folder, noise(count, 3, 32, 32), labels)
    elif name == "mnist":
        for part in ("train", "t10k"):
            write_idx(folder / f"{part}-images-idx3-ubyte", noise(count, 28, 28))
            write_idx(folder / f"{part}-labels-idx1-ubyte", labels.to(torch.uint8))
    else:
        for i in range(1, 6):
            write_sheet(folder / f"data_batch_{i}.png", noise(count // 5, 3, 32, 32))
        write_sheet(folder / "test_batch.png", noise(count, 3, 32, 32))
        for part in ("train", "test"):
            (folder / f"{part}_lables.json").write_text(json.dumps(labels.tolist()))
    return folder


def test_a_configuration_opens_with_its_command() -> None:
    assert {path.stem for path in CONFIGS} == NAMES
    for path in CONFIGS:
        text = path.read_text()
        assert f"python -m recipes.vision fit --config recipes/vision/{path.name}" in text[:400]
        assert "# Expect" in text[:700]
        settings = yaml.safe_load(text)
        assert f"{settings['data']['name']}_{settings['model']['config']['variant']}" == path.stem
        assert settings["trainer"]["accelerator"] == "auto"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_model_is_built(path: Path) -> None:
    """At its own size: forward and backward, one image."""
    settings = yaml.safe_load(path.read_text())
    about = DATASETS[settings["data"]["name"]]
    shape = {"image_size": about.image_size, "channels": about.channels, "num_classes": 10}
    config = VisionTransformerConfig(**settings["model"].pop("config"), **shape)
    module = VisionModule(config, **settings["model"])
    images = torch.rand(2, about.channels, about.image_size, about.image_size)
    F.cross_entropy(module(images), torch.tensor([3, 4])).backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_takes_two_steps(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = path.stem.partition("_")[0]
    where = []
    if name != "digits":
        option = "hub" if name == "svhn" else "directory"
        where = [
            f"--data.{option}={write_data(name, tmp_path / 'data')}",
            "--model.config.num_layers=1",
        ]
    assert run("fit", tmp_path / "out", f"--config={path}", *where) == 0
    out = tmp_path / "out"
    assert "val/accuracy" in (out / "logs" / "version_0" / "metrics.csv").read_text()
    with open(out / "accuracy.csv", encoding="utf-8", newline="") as file:
        rows = [Row(**{k: float(v) for k, v in row.items()}) for row in csv.DictReader(file)]
    assert len(rows) == 5
    assert all(row.clean >= row.pgd >= row.certified for row in rows), rows
    assert (out / "accuracy.png").stat().st_size > 5_000
    assert "| 36/255 |" in (out / "report.md").read_text()
    model = VisionTransformer.from_pretrained(out / "model")
    again = VisionModule.load_from_checkpoint(out / "last.ckpt").model
    assert model.config == again.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_validate_and_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", tmp_path, "--trainer.logger=false") == 0
    assert "val/margin_accuracy" in capsys.readouterr().out
    assert run("fit", tmp_path, "--data.name=mnist", "--model.config.patch_size=7") == 2
    assert "python -m recipes.vision.fetch mnist" in capsys.readouterr().err
    assert run("fit", tmp_path, "--model.config.patch_size=3") == 2
    assert "image_size must be a multiple of patch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--report.eps=[-1.0]", "-1.0 does not conform"),
        ("--report.attack_steps=0", "0 does not conform"),
        ("--data.train_images=0", "data.train_images"),
        ("--data.shift=-1", "-1 does not conform"),
        ("--data.name=letters", "'svhn']. Got value: letters"),
    ],
)
def test_what_a_report_could_not_be_made_with_is_refused_before_training(
    option: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run("fit", tmp_path / "out", option)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "file"
    out.write_text("kept")
    assert run("fit", out) == 2
    error = capsys.readouterr().err
    assert "--out must be a directory that can be written in" in error
    assert str(out) in error
    assert out.read_text() == "kept"


def test_a_checkpoint_finishes_an_interrupted_run_and_prolongs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = VisionModule.training_step

    def broken(module: VisionModule, batch: list[Tensor], batch_idx: int) -> Tensor:
        if module.global_step == 3:
            raise RuntimeError("the power is gone")
        return step(module, batch, batch_idx)

    four, last = "--trainer.max_steps=4", tmp_path / "last.ckpt"
    monkeypatch.setattr(VisionModule, "training_step", broken)
    with pytest.raises(RuntimeError, match="the power is gone"):
        run("fit", tmp_path, four)
    monkeypatch.setattr(VisionModule, "training_step", step)
    assert torch.load(last, weights_only=True)["global_step"] == 2
    bar = "--trainer.enable_progress_bar=true"
    assert run("fit", tmp_path, four, f"--ckpt_path={last}", bar) == 0
    assert "Epoch 0/-2" not in capsys.readouterr().out
    assert "4 updates" in (tmp_path / "report.md").read_text()
    assert torch.load(last, weights_only=True)["lr_schedulers"][0]["last_epoch"] == 4
    before = last.read_bytes()
    assert run("fit", tmp_path, "--trainer.max_steps=6", f"--ckpt_path={last}") == 2
    error = capsys.readouterr().err
    assert "planned for 4 steps, after which its learning rate is zero, got 6 steps" in error
    assert "Traceback" not in error
    assert last.read_bytes() == before


def small_model(variant: str, steps: int = 60) -> tuple[VisionTransformer, Tensor, Tensor]:
    """A model that has learnt some digits, and digits it has not seen."""
    data = ImageData()
    data.setup("fit")
    shape: dict[str, Any] = {"dim": 16, "num_heads": 2, "num_layers": 1, "std": (0.376,), "readout": 16}
    torch.manual_seed(0)
    model = VisionTransformer(
        VisionTransformerConfig(variant, 8, 1, 4, 10, attention_weight=0.3, **shape)
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
    images, labels = data.images("train")
    for _ in range(steps):
        some = torch.randint(len(images), (64,))
        loss = F.cross_entropy(10 * model(images[some]), labels[some])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval(), *data.images("test", 60)


@pytest.mark.parametrize("variant", ["l2", "dot_product"])
def test_pgd_accuracy_is_not_below_certified_accuracy(variant: str) -> None:
    model, images, labels = small_model(variant)
    radius = radii(model, images, labels, 25)
    assert torch.allclose(radius, certified_radius(model, images, labels), rtol=0, atol=1e-3)
    eps = [0.02, 0.1, 0.3, 1.0, 3.0]
    rows = table(model, images, labels, radius, eps, steps=10, restarts=2)
    assert rows[0].clean > 0.7
    assert rows[0].certified > 0.5
    assert all(row.clean >= row.pgd >= row.certified for row in rows), rows
    assert rows[-1].pgd < 0.2, "an attack that finds nothing shows nothing"
    # Image by image, just inside its certified radius.
    for x, y, r in zip(images[:8, None], labels[:8, None], radius[:8].tolist(), strict=True):
        if r > 0:
            assert logit_margin(model(pgd(model, x, y, r, steps=10, restarts=2)), y) > 0


def test_an_attack_passes_a_wrong_certificate() -> None:
    """The negative control: with radii ten times too large PGD accuracy falls below."""
    model, images, labels = small_model("l2")
    rows = table(
        model, images, labels, 10 * radii(model, images, labels, 60), [2.0], steps=10, restarts=1
    )
    assert rows[0].pgd < rows[0].certified


def test_pgd_stays_in_the_ball_and_finds_the_worst_of_a_linear_map() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    images, labels = 0.3 + 0.4 * torch.rand(5, 1, 4, 4), torch.zeros(5, dtype=torch.int64)
    found = pgd(model, images, labels, 0.2, steps=10)
    assert (found - images).flatten(1).norm(dim=1).max() <= 0.2
    assert found.min() >= 0
    assert found.max() <= 1
    w = model[1].weight
    expected = logit_margin(model(images), labels) - 0.2 * (w[0] - w[1]).norm()
    assert torch.allclose(logit_margin(model(found), labels), expected, rtol=1e-3)
    assert project_to_ball(images + 5, images, 0.2).max() <= 1
    assert pgd_accuracy(model, images, model(images).argmax(1), 0.0, steps=1) == 1.0


def test_the_margin_is_what_a_perturbation_can_do() -> None:
    logits, weight = torch.zeros(2, 3), torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1])
    got = add_margin(logits, labels, weight.requires_grad_(), 0.5)
    assert torch.allclose(got, torch.tensor([[0.0, 2.5, 0.0], [2.5, 0.0, 2.5]]), atol=1e-5)
    got.sum().backward()
    assert bool(weight.grad.isfinite().all())  # type: ignore[union-attr]


def test_the_local_gain_of_a_certified_model_is_its_constant() -> None:
    model, images, _ = small_model("l2", steps=3)
    bound = lf.certify(model.body[:-1]).bound
    # Radii are found to 1e-3 from below, so that gains come out a little large.
    assert local_gain(model.train(), images[:10]) == pytest.approx(bound, rel=0.1)
    assert model.training


def test_the_table_names_parts_of_255() -> None:
    text = table_text([Row(36 / 255, 0.9, 0.8, 0.7), Row(1.0, 0.9, 0.2, 0.0)])
    assert "| 36/255 | 90.0% | 80.0% | 70.0% |" in text
    assert "| 1 | 90.0% | 20.0% | 0.0% |" in text
