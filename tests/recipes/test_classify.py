"""recipes/classify in small: its loss, its report under attack, and that every YAML file runs."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lipformer as lf
from lipformer.models import EncoderClassifier, EncoderClassifierConfig
from recipes.classify.__main__ import main
from recipes.classify.data import TextBatch, TextData, opinions
from recipes.classify.module import TextModule, one_token_gain
from recipes.classify.report import Report, distances, exchanged_accuracy
from recipes.pgd import logit_margin
from tests.recipes.tiny import run_small
from tests.training.tiny import LIGHTNING_WARNINGS

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "classify"
CONFIGS = [FOLDER / f"{name}.yaml" for name in ("movies_dot_product", "movies_l2", "opinions_l2")]
TINY: dict[str, object] = {
    "model.config.dim": 8,
    "model.config.num_layers": 1,
    "data.batch_size": 4,
    "data.train_texts": 32,
    "data.test_texts": 4,
    "trainer.max_steps": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.val_check_interval": 2,
    "trainer.limit_val_batches": 1,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": False,
    "report.attacked_texts": 2,
    "report.attack_steps": 2,
    "report.attack_restarts": 1,
    "report.exchanges": 1,
    "report.local_texts": 1,
}
run = partial(run_small, main, TINY)


def write_movies(folder: Path) -> Path:
    """Files of the names and layout that recipes.classify.fetch writes."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate((("train", 40), ("validation", 8), ("test", 8))):
        rows = zip(*opinions(count, seed), strict=True)
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_takes_two_steps(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    assert f"python -m recipes.classify fit --config recipes/classify/{path.name}" in text[:400]
    assert "# Expect" in text[:700]
    settings = yaml.safe_load(text)
    variant = settings["model"]["config"]["variant"]
    assert path.stem.endswith(variant)
    assert settings["trainer"]["accelerator"] == "auto"
    movies = path.stem.startswith("movies")
    where = [f"--data.path={write_movies(tmp_path / 'data')}"] if movies else []
    out = tmp_path / "out"
    assert run("fit", out, f"--config={path}", *where) == 0
    assert "val/margin_accuracy" in (out / "logs" / "version_0" / "metrics.csv").read_text()
    with open(out / "accuracy.csv", encoding="utf-8", newline="") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert [row["eps"] for row in rows] == [0.0, 0.1, 0.25, 0.5, 1.0, 2.0]
    assert all(row["pgd"] >= row["attacked"] for row in rows), rows
    assert (out / "accuracy.png").stat().st_size > 5_000
    report = (out / "report.md").read_text()
    certified = "certified constant 1 from embedded text to logits" in report
    assert certified == ("Theorem L around" in report) == (variant == "l2")
    assert ("0 is 0, 1 is 1." if movies else "0 is negative, 1 is positive.") in report
    model = EncoderClassifier.from_pretrained(out / "model")
    tokenizer = json.loads((out / "model" / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == model.config.max_len
    again = TextModule.load_from_checkpoint(out / "last.ckpt").eval()
    assert again.model.config == model.config
    data = TextData(tokenizer=str(out / "model"))
    batch = data.collate([(code, 0) for code in data.encode(["The plot is good.", "no"])])
    assert data.vocab_size == model.config.vocab_size
    assert torch.equal(model(batch.tokens, batch.padding), again.model(batch.tokens, batch.padding))


def test_configurations_of_the_movies_have_one_budget_and_size() -> None:
    one, two = (yaml.safe_load(path.read_text()) for path in CONFIGS[:2])
    sizes = []
    for each in (one, two):
        options = {**each["model"].pop("config"), "num_classes": 2, "vocab_size": 100}
        model = EncoderClassifier(EncoderClassifierConfig(**options))
        sizes.append(sum(p.numel() for p in model.body.parameters()))
        each["model"] = {"weight_decay": each["model"]["weight_decay"]}
    assert one == two
    assert 0.5 < sizes[1] / sizes[0] <= 1.0, sizes


def trained(steps: int = 60) -> tuple[TextModule, TextData]:
    torch.manual_seed(0)
    data = TextData(batch_size=32, test_texts=48, max_len=16)
    options: dict[str, Any] = {"dim": 16, "num_layers": 1, "max_len": 16, "attention_weight": 0.2}
    config = EncoderClassifierConfig("l2", 2, vocab_size=data.vocab_size, **options)
    module = TextModule(config, eps=0.1)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for step, batch in zip(range(steps), data.train_dataloader(), strict=False):
        _, shifted, labels = module.logits(batch, 0.1 * step / steps)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(20.0 * shifted, labels).backward()
        optimiser.step()
    return module.eval(), data


def test_the_margin_is_the_certificate_and_the_report_survives_its_attacks() -> None:
    module, data = trained()
    report = Report(eps=[0.1, 0.4], attack_steps=4, attack_restarts=1, exchanges=2)
    every = report.texts(data, module.device)
    model = module.model
    radius = {
        "all together": report.radii(model, every, None),
        "one token": report.radii(model, every, 1),
    }
    for eps in (0.05, 0.2):
        _, shifted, labels = module.logits(every, eps)
        stands = logit_margin(shifted, labels) > 0
        close = (radius["one token"] - eps).abs() < 2e-3
        assert torch.equal(stands[~close], (radius["one token"] > eps)[~close])
    with torch.no_grad():
        right = logit_margin(model(every.tokens, every.padding), every.labels) > 0
    assert right.double().mean() > 0.6
    rows = list(report.table(model, every, radius, right))
    assert all(row["pgd"] >= row["attacked"] for row in rows), rows
    assert rows[0]["pgd"] == rows[0]["attacked"] == right.double().mean().item()
    # The negative control: radii that are too large are found out.
    wrong = {name: 50.0 * each for name, each in radius.items()}
    rows = list(report.table(model, every, wrong, right))
    assert any(row["pgd"] < row["attacked"] for row in rows), rows
    with lf.frozen(model):
        swaps = report.swaps(model, every, every, radius["one token"])
        assert swaps["right under random exchanges"] >= swaps["certified against every exchange"]
        swaps = report.swaps(model, every, every, torch.full((48,), 2.1))
    message = "no two vectors of a ball of radius 1 are farther apart"
    assert swaps["certified against every exchange"] == 1.0, message


def test_distances_and_exchanges_are_those_of_the_symbols() -> None:
    model = EncoderClassifier(EncoderClassifierConfig("l2", 2, vocab_size=5, dim=4, num_heads=2)).eval()
    table = model.embed(torch.arange(5)[None])[0]
    typical, farthest = distances(model, torch.tensor([1, 3, 1, 3, 1, 3, 1, 3]))
    assert typical == pytest.approx((table[1] - table[3]).norm().item(), rel=1e-5)
    torch.testing.assert_close(farthest, torch.cdist(table, table).amax(1))
    tokens = torch.tensor([[1, 2, 0]])
    padding = torch.tensor([[False, False, True]])
    label = model(tokens, padding).argmax(1)
    batch = TextBatch(tokens, label, padding)
    every = [torch.tensor([[v, 2, 0]]) for v in range(5)] + [torch.tensor([[1, v, 0]]) for v in range(5)]
    stays = all(bool(model(each, padding).argmax(1) == label) for each in every)
    with lf.frozen(model):
        assert exchanged_accuracy(model, batch, tries=40) == float(stays)
        assert exchanged_accuracy(model, TextBatch(tokens, 1 - label, padding), tries=1) == 0.0


def test_the_gain_of_one_token() -> None:
    config = EncoderClassifierConfig("l2", 2, vocab_size=5, attention_weight=0.5, least=4)
    gain = one_token_gain(config, torch.tensor([1.0, 4.0, 16.0]))
    assert gain.tolist() == pytest.approx([1.0 / 4, (0.25 + 0.75 * 2) / 4, (0.25 + 0.75 * 4) / 16])


def test_validate_and_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", tmp_path, "--trainer.logger=false") == 0
    assert "val/margin_accuracy" in capsys.readouterr().out
    assert run("fit", tmp_path, "--data.path=absent.csv") == 2
    assert "--data.path must be a data set of the hub" in capsys.readouterr().err
    assert run("fit", tmp_path, "--model.config.dim=9") == 2
    assert "embed_dim must be a positive multiple of num_heads" in capsys.readouterr().err
