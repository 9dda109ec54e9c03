"""The config fills in each variant's defaults, survives JSON, and names what is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from lipformer.models import VARIANTS, LanguageModelConfig
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
        ({"vocab_size": 0}, "vocab_size must be an integer >= 1, got 0"),
        ({"dim": 2.5}, "dim must be an integer >= 1, got 2.5"),
        ({"dim": 10, "num_heads": 4}, "multiple of num_heads, got dim=10, num_heads=4"),
        ({"max_len": None}, "max_len must be an integer >= 1, got None"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": "a lot"}, "got 'a lot'"),
        ({"positions": "learned"}, "positions must be one of alibi, .* got 'learned'"),
        ({"query_scale": 0.0}, "query_scale must be positive and finite, got 0.0"),
        ({"slopes": [0.5]}, r"slopes must be 4 positive numbers, got \[0.5\]"),
        ({"slopes": [1, 1, 1, -1]}, "slopes must be 4 positive"),
        ({"slopes": [1, 1, 1, 1], "positions": "rotary"}, "slopes need positions='alibi'"),
        ({"variant": "dot_product", "coeff": 0.5}, "'dot_product' has no option coeff, got coeff=0.5"),
        ({"variant": "l2", "bound": "kim2021"}, "'l2' has no option bound"),
        ({"bound": "kim2020"}, "bound must be one of kim2021, got 'kim2020'"),
        ({"bound": "kim2021", "norm": "l2"}, "value_proj=True and norm='linf', got .* norm='l2'"),
        ({"coeff": 0.0}, "coeff must be positive and finite, got 0.0"),
        ({"norm": "l1"}, "norm must be one of self, l2, token, linf, got 'l1'"),
        ({"norm_place": "middle"}, "norm_place must be one of pre, post, none, got 'middle'"),
        ({"value_proj": 1}, "value_proj must be True or False, got 1"),
        ({"variant": "lipschitz", "norm": "self"}, "norm must be one of l2, token, linf, got 'self'"),
        ({"variant": "lipschitz", "norm_place": "post"}, "norm_place must be one of pre, none"),
        ({"variant": "invertible", "coeff": 1.0}, "coeff must be below 1 .* got 1.0"),
        ({"vocabulary": "abb", "vocab_size": 3}, "distinct characters, got 'abb'"),
        ({"vocabulary": "abc", "vocab_size": 4}, "vocab_size=4 characters, got 3"),
    ],
)
def test_a_wrong_entry_is_named(options: dict[str, Any], message: str) -> None:
    entries = {"variant": "contractive", "vocab_size": 50, **options}
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig.from_dict(entries)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 10**13}, "vocab_size must be at most 16777216, got 10000000000000"),
        ({"vocab_size": True}, "vocab_size must be an integer >= 1, got True"),
        (
            {"vocab_size": 2**24, "dim": 1024},
            r"at most 1e\+10 parameters, got about .* vocab_size=16777",
        ),
        ({"dim": 10**5000, "num_heads": 1}, "must be at most 16777216, got int of 16610 bits"),
        ({"dim": 2**20}, r"at most 1e\+10 parameters, got about 4e\+13 with .*dim=1048576"),
        ({"hidden": 10**30}, "hidden must be at most 16777216, got 1000"),
        ({"num_layers": 10**9}, "num_layers must be at most 10000, got 1000000000"),
        ({"max_len": 10**400}, "max_len must be at most 2147483647, got 1000"),
        ({"dropout": 10**400}, r"dropout must be in \[0, 1\), got 1000"),
        ({"dropout": math.nan}, r"dropout must be in \[0, 1\), got nan"),
        ({"query_scale": 10**400}, "query_scale must be positive and finite, got 10000"),
        ({"query_scale": 1e300}, "query_scale must be .* got 1e.300; allowed is 1e-30 to 1e30"),
        ({"coeff": 10**5000}, "coeff must be positive and finite, got int of 16610 bits"),
        ({"coeff": 1e-320}, "coeff must be positive and finite, got 1e-320; allowed is 1e-30 to 1e30"),
        ({"variant": "lipschitz", "head_coeff": math.inf}, "head_coeff must be .* got inf"),
        ({"slopes": [10**5000] * 4}, "slopes must be 4 positive numbers, got list"),
        ({"variant": ["l2_untied"]}, r"variant must be one of .* got \['l2_untied'\]"),
    ],
)
def test_an_absurd_number_is_named_before_memory_is_taken(options: dict[str, Any], message: str) -> None:
    entries = {"variant": "contractive", "vocab_size": 50, **options}
    with pytest.raises(ValueError, match=message) as caught:
        LanguageModelConfig(**entries)
    assert len(str(caught.value)) < 300


def test_unknown_and_missing_entries_are_named() -> None:
    with pytest.raises(ValueError, match="unknown entries width, depth; allowed are variant, "):
        LanguageModelConfig.from_dict({"variant": "l2_untied", "vocab_size": 3, "width": 1, "depth": 2})
    with pytest.raises(ValueError, match="missing entries: vocab_size"):
        LanguageModelConfig.from_dict({"variant": "l2_untied"})
    with pytest.raises(ValueError, match="a mapping of names to values, got list"):
        LanguageModelConfig.from_dict([])  # type: ignore[arg-type]
