"""Characters as batches."""

from __future__ import annotations

import pytest
import torch

from training.characters import Characters, embedded_text


def test_embedded_text_is_english_and_long() -> None:
    text = embedded_text()
    assert len(text) > 300_000
    assert text.count(" the ") > 1000


def test_numbers_lead_back_to_the_text() -> None:
    text = "to be, or not to be, that is the question"
    data = Characters.of(text)
    codes = torch.cat([data.train, data.valid])
    assert "".join(data.symbols[i] for i in codes.tolist()) == text
    assert len(data.train) == len(text) * 9 // 10


def test_targets_are_the_next_characters() -> None:
    data = Characters.of("".join(chr(65 + i % 26) for i in range(400)))
    inputs, targets = next(data.batches(8, 3, torch.Generator().manual_seed(0)))
    assert inputs.shape == targets.shape == (3, 8)
    assert torch.equal(targets[:, :-1], inputs[:, 1:])
    judged, following = data.judged(4, 5)
    assert judged.shape == (5, 4)
    assert torch.equal(following.flatten()[:-1], judged.flatten()[1:])


def test_batches_repeat_with_the_generator() -> None:
    data = Characters.of("abcdefghij" * 20)
    first = next(data.batches(5, 4, torch.Generator().manual_seed(7)))
    second = next(data.batches(5, 4, torch.Generator().manual_seed(7)))
    assert torch.equal(first[0], second[0])


def test_short_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 20 characters, got 3"):
        Characters.of("abc")
    data = Characters.of("a" * 30)
    with pytest.raises(ValueError, match="27 characters, fewer than 65"):
        next(data.batches(64, 1, torch.Generator()))
    with pytest.raises(ValueError, match="held-out text has 3 characters, not 65"):
        data.judged(64, 1)
