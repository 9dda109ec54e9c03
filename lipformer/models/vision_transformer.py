"""Vision Transformers that can be certified: around each image, or by one constant for all.

First the parts from pixels to tokens and from tokens to features, then the model.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from einops import rearrange
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers import (
    BallProjection,
    Contractive,
    ConvexResidual,
    FeedForward,
    MaxMin,
    SpectralLinear,
    TokenMean,
)
from lipformer.layers.one_pass import OnePass
from lipformer.models.self_attention import DotProductSelfAttention, l2_self_attention
from lipformer.models.vision_config import VisionTransformerConfig
from lipformer.saving.saved_model import SavedModel


class PixelNorm(nn.Module):
    r"""(x - mean) / std of each channel, of constant :math:`1 / \min \mathrm{std}`.

    Inside the model, so that its certificate counts in pixels of [0, 1].

    Args:
        mean: one number for each channel.
        std: one positive number for each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        if x.shape[-3] != len(self.mean):
            raise ValueError(f"images must have {len(self.mean)} channels, got shape {tuple(x.shape)}")
        return (x - self.mean) / self.std


@register_bound(PixelNorm)
def _(module: PixelNorm, ask: Ask) -> Bound:
    ask.only("l2", "linf")
    return Bound(ROUND_UP / module.std.double().min(), "1 / smallest std")


class Patches(nn.Module):
    """Cuts images into patches that do not overlap: one token of C p p pixels for each.

    Args:
        channels: C.
        image_size: pixels in each direction.
        patch_size: p.
    """

    batch_first = True

    def __init__(self, channels: int, image_size: int, patch_size: int) -> None:
        super().__init__()
        self.shape = (channels, image_size, image_size)
        self.patch_size = patch_size

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, C p p), row by row."""
        if x.ndim != 4 or x.shape[1:] != self.shape:
            allowed = ", ".join(str(size) for size in self.shape)
            raise ValueError(f"images must be (B, {allowed}), got {tuple(x.shape)}")
        return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch_size, q=self.patch_size)

    def extra_repr(self) -> str:
        return f"{self.shape}, patch_size={self.patch_size}"


@register_bound(Patches)
def _(module: Patches, ask: Ask) -> Bound:
    ask.only("l2", "linf")
    count = (module.shape[1] // module.patch_size) ** 2
    return Bound(1.0, "rearrangement of pixels", tokens=count, dims=3)


class Positions(nn.Module):
    """Adds a learned vector to each token: a constant shift, of constant 1.

    Args:
        tokens: the most there are.
        dim: D.
        std: of the initial vectors.
    """

    def __init__(self, tokens: int, dim: int, std: float) -> None:
        super().__init__()
        self.vectors = nn.Parameter(std * torch.randn(tokens, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        count, dim = self.vectors.shape
        if x.ndim != 3 or x.shape[1] > count or x.shape[2] != dim:
            raise ValueError(f"tokens must be (B, N <= {count}, {dim}), got {tuple(x.shape)}")
        return x + self.vectors[: x.shape[1]]

    def extra_repr(self) -> str:
        return f"{self.vectors.shape[0]} tokens"


@register_bound(Positions)
def _(module: Positions, ask: Ask) -> Bound:
    return Bound(1.0, "constant shift")


class VisionTransformer(OnePass, SavedModel):
    r"""Classifies images with pixels in [0, 1].

    All but the attention has a known constant: patches that do not overlap, an embedding of norm 1,
    convex residuals around branches of norm at most 1, no class token and no LayerNorm. The last module
    of ``body`` is the plain linear head, so that a certificate can compare pairs of its rows: a logit's
    lead over class j moves by at most :math:`\|w_y - w_j\|` times what its input moves by.

    * "l2": L2 attention divided by its bound; ``lipformer.certify(model)`` is one number for all images.
    * "dot_product": dot-product attention after a projection of the tokens on a ball; certified around
      each image by ``lipformer.analysis.certified_radius(model, images, labels)`` (LoFAST).

    Args:
        config: what to build; weights are drawn from torch's global generator.

    Attributes:
        config: the config, with every default filled in.
        body: images (B, C, H, W) to logits (B, K), an nn.Sequential of single steps.

    Example:
        >>> import torch, lipformer as lf
        >>> _ = torch.manual_seed(0)
        >>> model = VisionTransformer(VisionTransformerConfig("l2", 8, 1, 2, num_classes=10, dim=16))
        >>> model(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 10])
        >>> lf.certify(model.body[:-1]).bound
        1.0
    """

    config_class = VisionTransformerConfig
    config: VisionTransformerConfig

    def __init__(self, config: VisionTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.body = nn.Sequential(_steps(config))
        self.remember_parts()

    @property
    def head(self) -> nn.Linear:
        """The last linear map, features to logits."""
        return self.body[-1]  # type: ignore[return-value]

    def forward(self, images: Tensor) -> Tensor:
        """Logits: (B, C, H, W) -> (B, K)."""
        with self.one_pass():
            return self.body(images)

    def features(self, images: Tensor) -> Tensor:
        """The head's input: (B, C, H, W) -> (B, F)."""
        with self.one_pass():
            return self.body[:-1](images)

    def extra_repr(self) -> str:
        return f"variant={self.config.variant!r}, {self.config.tokens} tokens"


def _steps(config: VisionTransformerConfig) -> OrderedDict[str, nn.Module]:
    """The body in order: flat, so that a perturbation can be followed step by step."""
    assert config.mean is not None
    assert config.std is not None
    assert config.hidden is not None
    pixels = config.channels * config.patch_size**2
    steps: OrderedDict[str, nn.Module] = OrderedDict(
        pixels=PixelNorm(config.mean, config.std),
        patches=Patches(config.channels, config.image_size, config.patch_size),
        embedding=SpectralLinear(pixels, config.dim, mode="normalize"),
        positions=Positions(config.tokens, config.dim, config.position_std),
    )
    for i in range(config.num_layers):
        if config.radius is not None:
            # Before the residual, not inside it: identity and attention then have the same input, and
            # LoFAST bounds their sum at once.
            steps[f"ball_{i}"] = BallProjection(config.radius)
        steps[f"attention_{i}"] = _residual(_attention(config), config.attention_weight)
        feed_forward = FeedForward(config.dim, config.hidden, mode=config.feed_forward_mode)
        steps[f"feed_forward_{i}"] = _residual(feed_forward, config.feed_forward_weight)
    features = config.dim
    if config.pooling == "mean":
        steps["pooling"] = TokenMean(config.tokens)
    else:
        steps["pooling"] = nn.Flatten()
        features *= config.tokens
    if config.readout is not None:
        steps["readout"] = SpectralLinear(features, config.readout, mode="normalize")
        steps["activation"] = MaxMin()
        features = config.readout
    steps["head"] = head = nn.Linear(features, config.num_classes)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return steps


def _residual(branch: nn.Module, weight: float) -> nn.Module:
    return branch if weight == 1.0 else ConvexResidual(branch, weight)


def _attention(config: VisionTransformerConfig) -> nn.Module:
    if config.variant == "dot_product":
        return DotProductSelfAttention(
            config.dim, config.num_heads, logit_coeff=config.logit_coeff, value_coeff=1.0
        )
    attention = l2_self_attention(config.dim, config.num_heads, config.tokens, config.key_radius)
    return Contractive(attention, 1.0, norm="l2")


@register_bound(VisionTransformer)
def _(model: VisionTransformer, ask: Ask) -> Bound:
    body = ask.child(model.body, "body")
    return Bound(body.value, "from images to logits", (body,))
