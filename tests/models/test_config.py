"""The config fills in each variant's defaults, survives JSON, and names what is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from lipformer.models import VARIANTS, LanguageModel, LanguageModelConfig
from tests.models.variants import CASES, build


@pytest.mark.parametrize("case", CASES)
def test_a_config_survives_json(case: str) -> None:
    config = build(case).config
    entries = json.loads(json.dumps(config.to_dict()))
    assert LanguageModelConfig.from_dict(entries) == config
    assert config.variant == case.partition(" ")[0]


def test_every_variant_has_a_builder() -> None:
    for name, make in VARIANTS.items():
        config = make(7, dim=8, num_heads=2, num_layers=1).config
        assert (config.variant, config.vocab_size, config.dim, config.hidden) == (name, 7, 8, 32)
        assert config.positions == "alibi"


def test_defaults_are_filled_in_and_foreign_options_stay_empty() -> None:
    dot = LanguageModelConfig("dot_product", 5)
    assert (dot.norm_place, dot.coeff, dot.norm, dot.value_proj, dot.hidden) == (
        *("pre", None, None, None),
        512,
    )
    contractive = LanguageModelConfig("contractive", 5)
    assert (contractive.coeff, contractive.norm, contractive.value_proj) == (1.0, "self", False)
    paper = LanguageModelConfig("contractive", 5, bound="kim2021")
    assert (paper.norm, paper.value_proj) == ("linf", True)


def test_query_scale_multiplies_the_initial_queries() -> None:
    for case in CASES:
        torch.manual_seed(0)
        plain = dict(build(case).named_parameters())
        torch.manual_seed(0)
        scaled = dict(build(case, query_scale=0.5).named_parameters())
        changed = [name for name in plain if not torch.equal(plain[name], scaled[name])]
        assert changed, case
        for name in changed:
            weight, start = plain[name].chunk(3)[0] if "qkv" in name else plain[name], scaled[name]
            assert "qkv.weight" in name or "q_proj" in name, (case, name)
            torch.testing.assert_close(start[: len(weight)], 0.5 * weight)
            torch.testing.assert_close(start[len(weight) :], plain[name][len(weight) :])


def test_slopes_reach_the_attention() -> None:
    slopes = [0.5, 0.125]
    for case in ("dot_product", "l2", "invertible"):
        model = build(case, slopes=slopes)
        assert model.config.slopes == (0.5, 0.125)
        found = [m.slopes for m in model.modules() if getattr(m, "slopes", None) is not None]
        assert found == [(0.5, 0.125)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "lstm"}, "variant must be one of dot_product, .* got 'lstm'"),
        ({"vocab_size": 0}, "vocab_size must be positive and finite, got 0"),
        ({"dim": 10, "num_heads": 4}, "multiple of num_heads, got embed_dim=10, num_heads=4"),
        ({"dropout": 1.5}, "dropout .* got 1.5"),
        ({"query_scale": math.nan}, "query_scale must be positive and finite, got nan"),
        ({"positions": "learned"}, "positions must be one of alibi, .* got 'learned'"),
        ({"query_scale": 0.0}, "query_scale must be positive and finite, got 0.0"),
        ({"slopes": [1, 1, 1, -1]}, "slopes must be 4 positive"),
        ({"slopes": [1, 1, 1, 1], "positions": "rotary"}, "slopes need positions='alibi'"),
        ({"variant": "dot_product", "coeff": 0.5}, "'dot_product' has no option coeff, got coeff=0.5"),
        ({"variant": "l2", "bound": "kim2021"}, "'l2' has no option bound"),
        ({"bound": "kim2020"}, "bound must be one of kim2021, None, got 'kim2020'"),
        ({"bound": "kim2021", "norm": "l2"}, "value_proj=True and norm='linf', got .* norm='l2'"),
        ({"coeff": 0.0}, "coeff must be positive and finite, got 0.0"),
        ({"norm": "l1"}, "norm must be one of l2, token, self, linf, None, got 'l1'"),
        ({"variant": "lipschitz", "norm": "self"}, "one of l2, token, linf, None, got 'self'"),
        ({"variant": "lipschitz", "norm_place": "post"}, "norm_place must be one of pre, none"),
        ({"variant": "invertible", "coeff": 1.0}, "coeff .* got 1.0"),
        ({"variant": "l2", "gather": 4}, "'l2' has no option gather, got gather=4"),
        ({"variant": "lipschitz", "gather": 2, "dim": 9, "num_heads": 1}, "gather needs an even dim"),
        ({"variant": "lipschitz", "attention_weight": 1.5}, r"weight must be in \[0, 1\], got 1.5"),
        ({"embedding_rms": 0.0}, "embedding_rms must be positive and finite, got 0.0"),
        ({"vocabulary": "abb", "vocab_size": 3}, "distinct characters, got 'abb'"),
        ({"vocabulary": "abc", "vocab_size": 4}, "vocab_size=4 distinct characters, got 'abc'"),
    ],
)
def test_a_wrong_entry_is_named(options: dict[str, Any], message: str) -> None:
    entries = {"variant": "contractive", "vocab_size": 50, **options}
    with pytest.raises(ValueError, match=message):
        LanguageModel(LanguageModelConfig.from_dict(entries))


def test_positions_none_means_none() -> None:
    assert LanguageModelConfig("l2", 5, positions="auto") == LanguageModelConfig("l2", 5)
    none = LanguageModelConfig("l2", 5, positions=None)
    assert none.positions is None
    assert LanguageModelConfig.from_dict(none.to_dict()) == none


def test_unknown_and_missing_entries_are_named() -> None:
    with pytest.raises(ValueError, match="wrong entries for LanguageModelConfig: .* 'width'"):
        LanguageModelConfig.from_dict({"variant": "l2_untied", "vocab_size": 3, "width": 1})
    with pytest.raises(ValueError, match="missing .* 'vocab_size'"):
        LanguageModelConfig.from_dict({"variant": "l2_untied"})
