"""What tokens and masks mean is the same everywhere, and what would be read wrongly is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer import analysis
from lipformer.analysis import attention_maps, jasmin_loss, local_bound, lofast_bound

EQUAL = torch.ones(5)
AT_TOKENS: dict[str, Callable[[Any, Tensor], Any]] = {
    "local_bound": local_bound,
    "jasmin_loss": jasmin_loss,
    "lofast_bound": lambda layer, x: lofast_bound(layer, x, 0.1),
    "measure_attention": lambda layer, x: analysis.measure_attention(layer, x, EQUAL),
    "measure_gain": lambda layer, x: analysis.measure_gain(layer, x, EQUAL),
    "split_gain": lambda layer, x: analysis.split_gain(layer, x, EQUAL),
}
ONE_CLOUD: dict[str, Callable[[Any, Tensor], Any]] = {
    "measure_gain_estimate": lambda layer, x: analysis.measure_gain_estimate(layer, x, EQUAL),
    "split_attack": lambda layer, x: analysis.split_attack(layer, x, EQUAL),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, nn.MultiheadAttention) for name in AT_TOKENS),
        *((name, lf.L2MultiheadAttention) for name in ("measure_attention", "split_gain")),
    ],
)
def test_a_layer_with_its_batch_second_takes_no_batch(name: str, kind: type[nn.Module]) -> None:
    layer = kind(4, 2, batch_first=False, dtype=torch.float64)
    x = torch.randn(5, 5, 4, dtype=torch.float64)  # both readings fit
    instead = "transpose x" if kind is nn.MultiheadAttention else "build the layer"
    with pytest.raises(ValueError, match=f"batch_first=False: {instead} .* got x of shape .5, 5, 4"):
        AT_TOKENS[name](layer, x)
    assert bool(torch.as_tensor(AT_TOKENS[name](layer, x[0])).isfinite().all())
    if kind is nn.MultiheadAttention:
        assert len(AT_TOKENS[name](attention_maps(layer), x.transpose(0, 1))) == 5


@pytest.mark.parametrize("name", [*AT_TOKENS, *ONE_CLOUD])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tokens_must_be_finite(name: str, value: float) -> None:
    x = torch.randn(5, 4)
    x[2, 1] = value
    with pytest.raises(ValueError, match="x must be finite, got 1 of 20 entries"):
        (AT_TOKENS | ONE_CLOUD)[name](nn.MultiheadAttention(4, 2, batch_first=True), x)


def test_images_and_hidden_states_must_be_finite() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    images = torch.full((3, 1, 2, 2), float("nan"))
    with pytest.raises(ValueError, match="must be finite, got 12 of 12"):
        analysis.certified_radius(model, images, torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="must be finite, got 12 of 12"):
        analysis.perturbation_bound(model, images, 0.1)
    with pytest.raises(ValueError, match="tokens must be finite, got 4 of 4"):
        analysis.layer_gains(nn.MultiheadAttention(4, 2), torch.full((1, 1, 4), float("nan")))


@pytest.mark.parametrize("name", ["local_bound", "jasmin_loss", "lofast_bound", "weights"])
def test_a_mask_leaves_each_token_a_key(name: str) -> None:
    maps, x = attention_maps(nn.MultiheadAttention(4, 2)), torch.randn(5, 4)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "local_bound": lambda mask: local_bound(maps, x, mask),
        "jasmin_loss": lambda mask: jasmin_loss(maps, x, mask),
        "lofast_bound": lambda mask: lofast_bound(maps, x, 0.1, mask=mask),
        "weights": lambda mask: maps.weights(x, mask),
    }
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)  # what torch calls attn_mask
    assert bool(functions[name](~hidden).isfinite().all())
    with pytest.raises(ValueError, match=r"1 of 5 rows .* give ~attn_mask"):
        functions[name](hidden)
    with pytest.raises(ValueError, match=r"broadcastable to .* N = 5, got torch.bool \(3, 3\)"):
        functions[name](hidden[:3, :3])


def test_causality_may_take_the_last_key() -> None:
    maps = analysis.AttentionMaps(torch.eye(4)[None], torch.eye(4)[None], causal=True)
    left_padding = torch.tensor([False, True, True, True, True])
    with pytest.raises(ValueError, match="1 of 5 rows of the mask, with causality"):
        local_bound(maps, torch.randn(5, 4), left_padding)


def test_the_checks_do_not_stand_in_the_way_of_vmap() -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    x, mask = torch.randn(3, 5, 4, dtype=torch.float64), torch.ones(3, 5, 5, dtype=torch.bool).tril()
    each = torch.func.vmap(torch.func.grad(lambda y, seen: jasmin_loss(layer, y, seen)))(x, mask)
    one = torch.func.grad(lambda y: jasmin_loss(layer, y, mask[1]))(x[1])
    torch.testing.assert_close(each[1], one)
