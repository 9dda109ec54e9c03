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
    summary = (tmp_path / "summary.md").read_text()
    assert f"attention of {model}" in summary
    assert "| 1 " in summary
    out = capsys.readouterr().out
    assert summary in out
    lines = [line for line in out.splitlines() if line.startswith("n = ")]
    assert [line.split(": ")[0] for line in lines] == ["n = 2", "n = 6", "n = 12"]
    gains = [float(row["gain"]) for row in found if (row["n"], row["index"]) == ("12", "1")]
    assert lines[-1].split()[-1] == f"{sum(gains) / 2:.4g}"
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


def refused(given: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends with one line and leaves nothing."""
    capsys.readouterr()
    assert main([*given, "--out", str(folder / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (folder / "out").exists()


def test_a_directory_and_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_words(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sees a dog . a dog sees the cat . " * 5)
    given = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *SMALL]
    main([*given, "--out", str(tmp_path / "plain")])
    assert len(rows(tmp_path / "plain")) == 6
    refused([*given, "--special"], "at least one token of text", tmp_path, capsys)
    main([*given, "--special", "--lengths", "3", "8", "--out", str(tmp_path / "special")])
    assert {row["n"] for row in rows(tmp_path / "special")} == {"3", "8"}
    (tmp_path / "text.txt").write_text("the cat")
    refused(given, "2 tokens, too few", tmp_path, capsys)
    (tmp_path / "text.txt").write_text("ein Hund sieht the cat " * 9)
    refused(given, "knows too little: 27 of 45 unknown", tmp_path, capsys)


def test_the_gain_at_adversarial_tokens_grows_with_their_number(tmp_path: Path) -> None:
    save_words(tmp_path / "model", scale=60.0)  # random weights are too flat to be steep anywhere
    (tmp_path / "text.txt").write_text("the cat sees a dog . a dog sees the cat . " * 9)
    given = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *SMALL]
    main([*given, "--adversarial", "--lengths", "4", "16", "64", "--out", str(tmp_path / "steep")])
    steep = [float(row["gain"]) for row in rows(tmp_path / "steep")]
    assert steep[2] / steep[0] > 0.9 * 16**0.5


@pytest.mark.parametrize(
    "config",
    [
        hf.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
        hf.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0),
    ],
    ids=["bert", "gpt2"],
)
def test_a_directory_without_a_tokenizer(
    config: hf.PretrainedConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes one up, which reads every text as [UNK] or as nothing."""
    hf.AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    refused(["--model", str(tmp_path / "model"), *SMALL], "model has no tokenizer", tmp_path, capsys)


def test_a_model_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    refused(["--model", empty, *SMALL], f"--model {empty} cannot be loaded: ", tmp_path, capsys)

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection.")

    monkeypatch.setattr(hf.AutoModel, "from_pretrained", offline)
    refused(["--model", "no/such", *SMALL], "cannot be loaded: We couldn't connect", tmp_path, capsys)
