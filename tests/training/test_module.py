"""Schedules, decay groups, losses, and what training promises: the same seed, the same losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lipformer as lf
from lipformer.models import VARIANTS, LanguageModel, LanguageModelConfig
from tests.training.tiny import LIGHTNING_WARNINGS, Losses, data, module, trainer, write_corpus
from training import schedules
from training.corpus import decode
from training.errors import BadInput
from training.module import VARIANT, LanguageModule
from training.optimisers import decay_groups
from training.windows import IGNORE_INDEX, Batch

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
UNTOLD = LanguageModelConfig(VARIANT, 1)


def test_the_noam_schedule() -> None:
    rates = [2.0 * schedules.noam(t, warmup=400, dim=64) for t in range(2000)]
    peak = rates.index(max(rates))
    assert peak == 399
    assert rates[peak] == pytest.approx(2.0 / 8.0 / 20.0)
    assert rates[0] == pytest.approx(2.0 / 8.0 * 400**-1.5)
    assert rates[1599] == pytest.approx(2.0 / 8.0 / 40.0)


def test_the_cosine_rises_and_falls() -> None:
    rates = [schedules.cosine(t, warmup=10, total=100, final=0.1) for t in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[54] == pytest.approx(0.55)
    assert rates[99] == rates[109] == pytest.approx(0.1)
    assert schedules.cosine(0, warmup=0, total=1, final=0.0) == 0.0
    assert [schedules.constant(t, warmup=2) for t in range(3)] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_only_weights_of_linear_maps_decay(variant: str) -> None:
    model = VARIANTS[variant](20, dim=16, num_heads=2, num_layers=1)
    decayed, kept = decay_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
    kept_names = [names[id(p)] for p in kept["params"]]
    decayed_names = [names[id(p)] for p in decayed["params"]]
    assert "embedding.weight" in kept_names
    assert all("weight" in name and "embedding" not in name for name in decayed_names)
    forbidden = ("bias", "temperature", "log_scale", "shift")
    assert not [name for name in decayed_names if name.endswith(forbidden)]
    assert len(decayed_names) >= 4


def fitted(folder: Path, steps: int = 4, **options: Any) -> tuple[Losses, LanguageModule]:
    losses = Losses()
    model = module(**options)
    trainer(max_steps=steps, callbacks=[losses], limit_val_batches=1).fit(model, data(folder))
    return losses, model


def test_the_same_seed_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path)
    first, _ = fitted(tmp_path, dropout=0.2)
    torch.manual_seed(99)
    again, _ = fitted(tmp_path, dropout=0.2)
    assert first.train == again.train
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    other, _ = fitted(tmp_path, dropout=0.2)
    assert first.train != other.train


def test_act_norm_has_seen_text_before_the_first_step(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    _, model = fitted(tmp_path, steps=1)
    scales = [part for part in model.modules() if isinstance(part, lf.ActNorm)]
    assert scales
    assert all(bool(part.initialized) for part in scales)


def test_padding_counts_for_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    _, model = fitted(tmp_path, steps=1)
    model.eval()
    inputs = torch.randint(8, (2, 10))
    targets = torch.randint(8, (2, 10))
    targets[1, 6:] = IGNORE_INDEX
    batch = Batch(inputs, targets, torch.tensor(16.0))
    logits = model(inputs)
    expected = F.cross_entropy(logits[0], targets[0], reduction="sum")
    expected = expected + F.cross_entropy(model(inputs[1:, :6])[0], targets[1, :6], reduction="sum")
    torch.testing.assert_close(model.nats(batch), expected, rtol=1e-5, atol=1e-5)
    inputs[1, 7:] = 3
    torch.testing.assert_close(model.nats(batch), expected, rtol=1e-5, atol=1e-5)


def test_validation_is_the_mean_over_symbols(tmp_path: Path) -> None:
    """Batches of unlike sizes, the last window being shorter."""
    write_corpus(tmp_path)
    model, corpus = module(), data(tmp_path, batch_size=3)
    judge = trainer()
    (metrics,) = judge.validate(model, corpus, verbose=False)
    model.eval()
    total, hits, count = 0.0, 0, 0
    with torch.no_grad():
        for batch in corpus.val_dataloader():
            total += model.nats(batch).item()
            hits += int((model(batch.inputs).argmax(-1) == batch.targets).sum())
            count += int((batch.targets != IGNORE_INDEX).sum())
    assert count == len(corpus.texts["valid"]) - 1
    assert metrics["val/nats"] == pytest.approx(total / count, rel=1e-6)
    assert metrics["val/bits"] == pytest.approx(total / count / math.log(2.0), rel=1e-6)
    assert metrics["val/accuracy"] == pytest.approx(hits / count, rel=1e-6)
    assert 0 < hits < count


def test_it_starts_from_a_saved_model(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    _, first = fitted(tmp_path / "text")
    first.model.save_pretrained(tmp_path / "saved")
    tuned = LanguageModule(UNTOLD, pretrained=str(tmp_path / "saved"), warmup=1)
    trainer(max_steps=1, limit_val_batches=1).fit(tuned, data(tmp_path / "text"))
    assert tuned.model.config == first.model.config
    change = (tuned.model.embedding.weight - first.model.embedding.weight).abs().max()
    assert 0 < change < 0.1
    (tmp_path / "text" / "train.txt").write_text("Zebras QUIZ\n" * 20)
    with pytest.raises(BadInput, match=r"the train text has 4 characters that .*--data\.unknown drop"):
        trainer(max_steps=1).fit(
            LanguageModule(UNTOLD, pretrained=str(tmp_path / "saved")), data(tmp_path / "text")
        )


@pytest.mark.parametrize("unknown", ["drop", "replace", "extend"])
def test_it_takes_unknown_characters(
    tmp_path: Path, unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = "".join(sorted(set((write_corpus(tmp_path) / "train.txt").read_text())))
    saved = VARIANTS["lipschitz"](len(letters), dim=16, num_heads=2, num_layers=1, vocabulary=letters)
    saved.save_pretrained(tmp_path / "saved")
    with (tmp_path / "train.txt").open("a") as file:
        file.write("Zoé\n" * 3)
    corpus = data(tmp_path, unknown=unknown)
    tuned = LanguageModule(UNTOLD, pretrained=str(tmp_path / "saved"), warmup=1)
    trainer(max_steps=2, limit_val_batches=1).fit(tuned, corpus)
    told = capsys.readouterr().out
    read = decode(corpus.codes["train"], corpus.vocabulary)
    if unknown == "extend":
        assert corpus.vocabulary == tuned.model.config.vocabulary == letters + "Zé"
        assert read == corpus.texts["train"]
        assert not told
    else:
        assert corpus.vocabulary == letters
        assert read.endswith("\n" + ("o\n" if unknown == "drop" else " o \n") * 3)
        assert f"the train text: {unknown[:4]}" in told
        assert "ed 6 characters that the model does not know ('Z', 'é')" in told
    assert lf.certify(tuned.model.eval()).bound <= lf.certify(saved.eval()).bound * 1.001
    tuned.model.save_pretrained(tmp_path / "tuned")
    assert LanguageModel.from_pretrained(tmp_path / "tuned").config.vocabulary == corpus.vocabulary


def test_bad_options_are_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match="pretrained brings its own config: leave yours out, got .*dim=16"
    ):
        module(pretrained="saved")
    write_corpus(tmp_path)
    nowhere = LanguageModule(UNTOLD, pretrained=str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match="nowhere/config.json"):
        trainer(max_steps=1).fit(nowhere, data(tmp_path))
    with pytest.raises(BadInput, match="cosine needs an end"):
        trainer(max_steps=-1, max_epochs=-1).fit(module(), data(tmp_path))


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    plain, _ = fitted(tmp_path)
    compiled, model = fitted(tmp_path, compile=True)
    for (*where, a), (*there, b) in zip(plain.train, compiled.train, strict=True):
        assert where == there
        assert a == pytest.approx(b, rel=1e-4)
    assert not [name for name in model.state_dict() if "_orig_mod" in name]


def test_a_temperature_divides_logits_in_the_loss_alone(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    _, model = fitted(tmp_path, steps=1)
    model.eval()
    inputs, targets = torch.randint(8, (2, 10)), torch.randint(8, (2, 10))
    logits = model(inputs)
    model.temperature = 0.25
    found = model.nats(Batch(inputs, targets, torch.tensor(20.0)))
    torch.testing.assert_close(found, F.cross_entropy(4.0 * logits.mT, targets, reduction="sum"))
    torch.testing.assert_close(model(inputs), logits)
