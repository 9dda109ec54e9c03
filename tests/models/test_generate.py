"""Generation with the cache equals generation without, and bad prompts are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lipformer.layers import step_module
from lipformer.models.language_model import sample_tokens
from tests.models.variants import CASES, build, fit, tokens

V = 11


@pytest.mark.parametrize("case", CASES)
def test_the_cache_changes_nothing(case: str) -> None:
    model = build(case)
    fit(model, 2)
    model.double()
    prompt = tokens(2, 4)
    choices: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.3, "top_k": 5})
    for options in choices:
        outputs = [
            model.generate(
                prompt, 6, **options, generator=torch.Generator().manual_seed(1), use_cache=cached
            )
            for cached in (True, False)
        ]
        assert outputs[0].shape == (2, 10)
        assert torch.equal(outputs[0][:, :4], prompt)
        assert torch.equal(*outputs)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_steps_are_those_of_the_full_pass(case: str) -> None:
    model = build(case).eval()
    x, cache, rows = tokens(2, 15), None, []
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 9), (9, 15)):
            row, cache = step_module(model.body, model.embed(x[:, start:stop], start), cache)
            rows.append(row)
        assert (torch.cat(rows, dim=1) - model(x)).abs().max() <= 1e-5


def test_greedy_takes_the_likeliest_token() -> None:
    model, prompt = build("l2"), tokens(2, 5)
    likeliest = model.eval()(prompt)[:, -1].argmax(-1)
    assert torch.equal(model.generate(prompt, 1, temperature=0.0)[:, -1], likeliest)


def test_a_generator_decides_the_draws() -> None:
    model, prompt = build("l2"), tokens(2, 5)
    drawn = [
        model.generate(prompt, 15, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    seen = sample_tokens(logits, 1.0, None, None).flatten().bincount(minlength=3) / 20_000
    assert (seen - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.02  # 5 deviations of 0.0035
    best = sample_tokens(logits, 1.0, 2, None).flatten().bincount(minlength=3) / 20_000
    assert (best - torch.tensor([0.625, 0.375, 0.0])).abs().max() < 0.02
    sharp = sample_tokens(logits, 0.5, None, None).flatten().bincount(minlength=3) / 20_000
    assert (sharp - torch.tensor([25.0, 9.0, 4.0]) / 38.0).abs().max() < 0.02


def test_modes_are_as_before_and_dropout_sleeps() -> None:
    model = build("l2", dropout=0.5).train()
    model.body[0].eval()
    before = [part.training for part in model.modules()]
    prompt = tokens(1, 3)
    assert torch.equal(model.generate(prompt, 9, temperature=0.0), model.generate(prompt, 9, 0.0))
    assert [part.training for part in model.modules()] == before


def test_no_new_token_is_the_prompt() -> None:
    prompt = tokens(2, 3)
    assert torch.equal(build("l2_untied").generate(prompt, 0), prompt)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, "at least one token"),
        (torch.tensor([[0, 11]]), {}, r"the vocabulary 0\.\.10, got \[\[0, 11"),
        (torch.tensor([[1]]), {"temperature": -1.0}, "temperature must be 0 .* got -1.0"),
        (torch.tensor([[1]]), {"top_k": 0}, r"top_k must be None or an integer in 1\.\.11, got 0"),
        (torch.tensor([[1]]), {"max_new": 25}, "max_len is 24, got 25 tokens"),
    ],
)
def test_bad_requests_are_named(prompt: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("dot_product rotary").generate(prompt, **{"max_new": 2, **options})


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    model, prompt = build("l2").eval(), tokens(2, 5)
    expected = model.generate(prompt, 4, temperature=0.0)
    for temperature in (1e-45, 1e-300):
        assert torch.equal(model.generate(prompt, 4, temperature=temperature), expected)
        assert torch.equal(model.generate(prompt, 4, temperature=temperature, top_k=3), expected)
