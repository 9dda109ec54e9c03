"""Flows come back from files the same, and what cannot be saved says what to do."""

from __future__ import annotations

import copy
import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import lipformer as lf
from lipformer.flows import ActNorm, AttentionFlow
from lipformer.saving import saved_model
from tests.flows.test_attention_flow import KINDS, events, made

SMALL: dict[str, Any] = {"depth": 1, "num_heads": 2, "hidden": 8, "mode": "causal"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_flow_comes_back(kind: str, tmp_path: Path) -> None:
    flow, x = made(kind, key_radius=2.0, probes=2), events(kind)
    flow.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    again = AttentionFlow.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.config == flow.config
    assert str(again) == str(flow)
    assert not again.training
    assert torch.equal(again.log_prob(x), flow.log_prob(x))


def test_the_config_has_every_argument() -> None:
    flow = AttentionFlow(4, **SMALL)
    assert list(flow.config) == list(inspect.signature(AttentionFlow).parameters)
    assert flow.config["positions"] == "alibi"
    assert flow.config["causal"] is True
    twin = AttentionFlow(**json.loads(json.dumps(flow.config)))
    assert twin.config == flow.config
    twin.load_state_dict(flow.state_dict())


@pytest.mark.parametrize("met", [False, True])
def test_a_first_batch_comes_once(met: bool, tmp_path: Path) -> None:
    flow, x = AttentionFlow(4, **SMALL), 3.0 + torch.randn(8, 5, 4)
    if met:
        flow.initialize(x)
    flow.save_pretrained(tmp_path)
    again = AttentionFlow.from_pretrained(tmp_path).train()
    norms = [part for part in again.modules() if isinstance(part, ActNorm)]
    assert [bool(norm.initialized) for norm in norms] == [met, met]
    shifts = [norm.shift.clone() for norm in norms]
    again(x + 5.0)
    assert all(map(torch.equal, shifts, [norm.shift for norm in norms])) == met


def test_a_file_of_fewer_arguments_has_their_defaults(tmp_path: Path) -> None:
    """As it will be when there are new ones."""
    flow = AttentionFlow(4, **SMALL)
    older = {name: value for name, value in flow.config.items() if name not in ("probes", "base")}
    saved_model._save(tmp_path, "lipformer.AttentionFlow", older, flow.state_dict())
    assert AttentionFlow.from_pretrained(tmp_path).config == flow.config
    saved_model._save(tmp_path, "lipformer.AttentionFlow", {**older, "colour": 1}, flow.state_dict())
    with pytest.raises(ValueError, match=r"config.json is damaged.*'colour'"):
        AttentionFlow.from_pretrained(tmp_path)


class Other(AttentionFlow):
    pass


def test_what_is_not_saved_says_what_to_do(tmp_path: Path) -> None:
    flow = AttentionFlow(4, base=Normal(0.0, 2.0), **SMALL)
    for base in (flow.base, None):
        flow.base = base
        with pytest.raises(ValueError, match=r"got Normal\(.*flow.state_dict\(\)"):
            flow.save_pretrained(tmp_path)
    flow = AttentionFlow(4, **SMALL)
    with pytest.raises(ValueError, match="baked or changed"):
        lf.bake(flow).save_pretrained(tmp_path)
    changed = copy.deepcopy(flow)
    changed.blocks[1].coeff = 0.5
    with pytest.raises(ValueError, match=r"coeff=0.9.* at blocks.1, got .*coeff=0.5"):
        changed.save_pretrained(tmp_path)
    estimated = copy.deepcopy(flow)
    estimated.blocks[1].terms = 3
    with pytest.raises(ValueError, match=r"at blocks.1, got .*terms=3"):
        estimated.save_pretrained(tmp_path)
    flow.config["coeff"] = 0.3
    with pytest.raises(ValueError, match=r"'coeff': 0.9.* at its root, got .*'coeff': 0.3"):
        flow.save_pretrained(tmp_path)
    sets = AttentionFlow(4, equivariant=True, depth=1, hidden=4, seq_len=3)
    sets.base = None
    with pytest.raises(ValueError, match="flows of the default base, .*got None"):
        sets.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    Other(4, **SMALL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='not "lipformer.AttentionFlow"'):
        AttentionFlow.from_pretrained(tmp_path)


def test_torch_save_names_the_way() -> None:
    flow = AttentionFlow(4, **SMALL)
    for module in (flow, nn.Sequential(lf.FeedForward(4, 8))):
        with pytest.raises(RuntimeError, match=r"save_pretrained\(directory\) of an AttentionFlow"):
            torch.save(module, io.BytesIO())
    file = io.BytesIO()
    torch.save(lf.bake(flow).eval(), file)
    file.seek(0)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), flow.eval()(x))
