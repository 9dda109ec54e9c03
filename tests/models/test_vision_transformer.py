"""Vision Transformers: the battery of a certified layer, what is refused, and saved models."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import attention_maps
from lipformer.models import (
    DotProductSelfAttention,
    LanguageModel,
    VisionTransformer,
    VisionTransformerConfig,
)
from lipformer.models.vision_transformer import Patches, PixelNorm, Positions
from tests.layers.battery import CertifiedLayer, dense_jacobians, error, slow_compile

SMALL: dict[str, Any] = {"dim": 8, "num_heads": 2, "num_layers": 1, "hidden": 8}


def config(variant: str = "l2", **options: Any) -> VisionTransformerConfig:
    return VisionTransformerConfig(variant, 4, 1, 2, 3, **{**SMALL, **options})


def images(count: int, channels: int = 1, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(count, channels, size, size, generator=generator)


class _Image(CertifiedLayer):
    """The battery for images: tokens is the shape of one, and there are no tokens to ask for."""

    tokens = (1, 4, 4)
    norms = ("l2",)
    least = 0.1

    def starts(self, module: nn.Module) -> Tensor:
        noise = torch.randn(4, *self.tokens, dtype=torch.float64)
        return torch.cat([s * noise for s in (1e-2, 0.3, 1.0, 10.0, 1e3)])

    def bound(self, module: nn.Module, norm: str = "l2") -> float:
        return lf.certify(module, norm=norm).bound


class TestFlatten(_Image):
    def make(self) -> nn.Module:
        return VisionTransformer(config(attention_weight=0.3, mean=(0.2,), std=(0.4,)))

    test_compile = slow_compile


class TestMean(_Image):
    tokens = (2, 4, 4)
    least = 0.02
    test_compile = None  # type: ignore[assignment]

    def make(self) -> nn.Module:
        shape = {"pooling": "mean", "readout": 6, "feed_forward_weight": 1.0}
        return VisionTransformer(
            VisionTransformerConfig("l2", 4, 2, 2, 3, **SMALL, **shape, std=(0.5, 2.0))  # type: ignore[arg-type]
        )


class TestParts(_Image):
    """The new parts alone, whose product is reached."""

    least = 0.99

    def make(self) -> nn.Module:
        return nn.Sequential(
            PixelNorm((0.3,), (0.25,)), Patches(1, 4, 2), Positions(4, 4, 1.0), lf.TokenMean(4)
        )


@pytest.mark.parametrize("std", [(1.0,), (0.25,)])
def test_one_number_from_images_to_features(std: tuple[float, ...]) -> None:
    for pooling, factor in (("flatten", 1.0), ("mean", 0.5)):
        model = VisionTransformer(config(pooling=pooling, std=std))
        bound = lf.certify(model.body[:-1]).bound
        assert bound == pytest.approx(factor / std[0], rel=1e-9)
        assert bound >= factor / std[0]
        jacobian = dense_jacobians(model.double().features(x := images(3).double().requires_grad_()), x)
        assert torch.linalg.matrix_norm(jacobian, 2).max() <= bound


def test_patches_are_the_blocks_of_the_image() -> None:
    x = images(2, 3)
    tokens = Patches(3, 4, 2)(x)
    assert tokens.shape == (2, 4, 12)
    assert torch.equal(tokens[:, 1], x[:, :, :2, 2:].flatten(1))
    with pytest.raises(ValueError, match=r"images must be \(B, 3, 4, 4\), got \(2, 1, 4, 4\)"):
        Patches(3, 4, 2)(x[:, :1])


def test_dot_products_are_refused_with_what_to_use() -> None:
    model = VisionTransformer(config("dot_product", num_layers=2))
    with pytest.raises(lf.NotCertifiable, match="lipformer.analysis.certified_radius") as refusal:
        lf.certify(model)
    assert refusal.value.path == "body.attention_0.branch"
    assert [name for name, _ in model.body.named_children() if name.startswith("ball")] == [
        "ball_0",
        "ball_1",
    ]


@pytest.mark.parametrize("coeff", [None, 0.7])
def test_the_maps_of_dot_product_attention(coeff: float | None) -> None:
    layer = DotProductSelfAttention(12, 3, logit_coeff=coeff, value_coeff=coeff).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    maps = attention_maps(layer)
    assert error(layer(x), maps(x)) <= 1e-12
    twin = nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        twin.in_proj_weight.copy_(
            torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
        )
        twin.in_proj_bias.zero_()[:12].copy_(layer.q_proj.bias)
        twin.out_proj.weight.copy_(layer.out_proj.weight)
        twin.out_proj.bias.copy_(layer.out_proj.bias)
    assert error(layer(x), twin(x, x, x, need_weights=False)[0]) <= 1e-12
    if coeff is not None:
        a = torch.linalg.matrix_norm(maps.logits, 2)
        assert bool((a <= coeff**2 / 2).all())


@pytest.mark.parametrize("variant", ["l2", "dot_product"])
def test_dtypes_copies_and_gradients(variant: str) -> None:
    model = VisionTransformer(config(variant))
    x = images(3)
    expected = copy.deepcopy(model).double()(x.double())
    assert error(model(x), expected) <= 1e-5
    assert error(copy.deepcopy(model).bfloat16()(x.bfloat16()), expected) <= 0.1
    assert error(lf.bake(model)(x), expected) <= 1e-5
    model(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("variant", ["l2", "dot_product"])
def test_a_saved_model_comes_back(variant: str, tmp_path: Path) -> None:
    model, x = VisionTransformer(config(variant, mean=(0.1,), std=(0.3,))).eval(), images(2)
    model.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    again = VisionTransformer.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config == model.config
    assert not again.training
    assert torch.equal(again(x), model(x))
    with pytest.raises(ValueError, match='"format" is not "lipformer.LanguageModel"'):
        LanguageModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("variant", ["dot_product", "l2"])
def test_a_baked_model_is_not_saved(variant: str, tmp_path: Path) -> None:
    model = VisionTransformer(config(variant))
    with pytest.raises(ValueError, match="a model with .* at body.* got .*before lipformer.bake"):
        model.bake().save_pretrained(tmp_path / "new")  # type: ignore[operator]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 9}, "multiple of num_heads, got embed_dim=9, num_heads=2"),
        ({"hidden": 7}, "hidden must be even for MaxMin, got 7"),
        ({"attention_weight": 0.0}, "attention_weight must be positive and finite, got 0.0"),
        ({"attention_weight": 1.5}, r"weight must be in \[0, 1\], got 1.5"),
        ({"std": (0.0,)}, r"std must be positive and finite, got \(0.0,\)"),
        ({"pooling": "max"}, "pooling must be one of flatten, mean, got 'max'"),
        ({"radius": 2.0}, "the variant 'l2' has no option radius, got radius=2.0"),
        ({"variant": "lipschitz"}, "variant must be one of dot_product, l2, got 'lipschitz'"),
        ({"variant": "dot_product", "radius": -1}, "radius must be positive and finite, got -1"),
    ],
)
def test_a_config_is_told_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionTransformer(config(**options))


def test_a_config_comes_back_from_its_entries() -> None:
    for variant in ("l2", "dot_product"):
        whole = config(variant)
        assert VisionTransformerConfig.from_dict(whole.to_dict()) == whole
    assert dataclasses.replace(config(), dim=16).dim == 16
    with pytest.raises(ValueError, match="wrong entries .* 'flavour'"):
        VisionTransformerConfig.from_dict({**config().to_dict(), "flavour": 1})
    with pytest.raises(
        ValueError, match="missing .* 'image_size', 'channels', 'patch_size', and 'num_classes'"
    ):
        VisionTransformerConfig.from_dict({"variant": "l2"})
