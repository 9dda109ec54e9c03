"""The recipe how_smooth runs on random models, on a directory, and on steep tokens."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers as hf

from recipes.analysis.how_smooth import main

SMALL = [
    "--depth",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--lengths",
    "2",
    "6",
    "12",
    "--sequences",
    "2",
]


def rows(out: Path) -> list[dict[str, str]]:
    assert sorted(path.name for path in out.iterdir()) == ["gains.csv", "gains.png", "summary.md"]
    with (out / "gains.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("model", ["random-gpt2", "random-bert"])
def test_random_models(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, *SMALL, "--bound", "jasmin", "--out", str(tmp_path)]) == 0
    found = rows(tmp_path)
    assert [int(row["n"]) for row in found] == [n for n in (2, 6, 12) for _ in range(4)]
    assert all(0 < float(row["gain"]) <= float(row["bound"]) for row in found)
    assert "| 1 " in (tmp_path / "summary.md").read_text()
    shown = capsys.readouterr().out
    assert model in shown
    summary = (tmp_path / "summary.md").read_text()
    assert all(line in shown for line in summary.splitlines()), "no row of the table is broken"
    again = tmp_path / "again"
    main(["--model", model, *SMALL, "--bound", "jasmin", "--out", str(again)])
    assert rows(again) == found


def save_words(directory: Path, scale: float = 1.0) -> None:
    """A BERT-type model with a tokenizer of whole words, as a directory."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "sees", "a", "."]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[UNK]"}
    hf.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(directory)
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = hf.BertModel(config)
    for layer in model.encoder.layer:
        for part in ("query", "key"):
            getattr(layer.attention.self, part).weight.requires_grad_(False).mul_(scale)
    model.save_pretrained(directory)


def test_a_directory_and_a_text(tmp_path: Path) -> None:
    save_words(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sees a dog . a dog sees the cat . " * 5)
    given = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *SMALL]
    main([*given, "--out", str(tmp_path / "plain")])
    assert len(rows(tmp_path / "plain")) == 6
    with pytest.raises(SystemExit, match="at least one token of text"):
        main([*given, "--special", "--out", str(tmp_path / "special")])
    main([*given, "--special", "--lengths", "3", "8", "--out", str(tmp_path / "special")])
    assert {row["n"] for row in rows(tmp_path / "special")} == {"3", "8"}
    (tmp_path / "text.txt").write_text("the cat")
    with pytest.raises(SystemExit, match="2 tokens, too few"):
        main([*given, "--out", str(tmp_path / "short")])
    assert not (tmp_path / "short").exists()


def test_the_gain_at_adversarial_tokens_grows_with_their_number(tmp_path: Path) -> None:
    save_words(tmp_path / "model", scale=60.0)  # random weights are too flat to be steep anywhere
    (tmp_path / "text.txt").write_text("the cat sees a dog . a dog sees the cat . " * 9)
    given = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *SMALL]
    main([*given, "--adversarial", "--lengths", "4", "16", "64", "--out", str(tmp_path / "steep")])
    steep = [float(row["gain"]) for row in rows(tmp_path / "steep")]
    assert steep[2] / steep[0] > 0.9 * 16**0.5


def test_bad_arguments(tmp_path: Path) -> None:
    for given, match in (
        (["--lengths", "4", "4"], "two different lengths"),
        (["--text", str(tmp_path / "none.txt")], "must be a text file"),
        (["--special"], "needs a tokenizer"),
        (["--adversarial", "--bound", "min"], "leave out --bound, got min"),
    ):
        with pytest.raises(SystemExit, match=match):
            main([*given, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def tiny(kind: str) -> hf.PreTrainedModel:
    if kind == "gpt2":
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2Model(hf.GPT2Config(vocab_size=9, **sizes))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return hf.BertModel(hf.BertConfig(vocab_size=9, **sizes))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_directory_without_a_tokenizer(kind: str, tmp_path: Path) -> None:
    """transformers makes one up, which reads every text as [UNK] or as nothing."""
    tiny(kind).save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit, match=f"^{tmp_path / 'model'} has no tokenizer$"):
        main(["--model", str(tmp_path / "model"), *SMALL, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_text_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    save_words(tmp_path / "model")
    (tmp_path / "text.txt").write_text("ein Hund sieht the cat " * 9)
    given = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *SMALL]
    with pytest.raises(SystemExit, match="knows too little: 27 of 45 unknown"):
        main([*given, "--out", str(tmp_path / "out")])


def test_a_model_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection.")

    monkeypatch.setattr(hf.AutoModel, "from_pretrained", offline)
    with pytest.raises(
        SystemExit, match="^--model no/such cannot be loaded: We couldn't connect"
    ) as stop:
        main(["--model", "no/such", *SMALL, "--out", str(tmp_path / "out")])
    assert "\n" not in str(stop.value)
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="empty cannot be loaded: "):
        main(["--model", str(tmp_path / "empty"), *SMALL, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
