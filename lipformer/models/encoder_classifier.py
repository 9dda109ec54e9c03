"""Classifiers of sequences whose certificate is small by construction."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.layers import (
    BallProjection,
    Contractive,
    ConvexResidual,
    FeedForward,
    Residual,
    SpectralLinear,
    TokenMean,
    TokenShift,
)
from lipformer.layers.branch import call_branch
from lipformer.layers.one_pass import OnePass
from lipformer.models.encoder_config import EncoderClassifierConfig
from lipformer.models.self_attention import DotProductSelfAttention, l2_self_attention
from lipformer.models.vision_transformer import Positions
from lipformer.saving.saved_model import SavedModel


class EncoderClassifier(OnePass, SavedModel):
    r"""Classifies sequences of symbols or vectors; padding is ignored.

    ``body`` maps embedded tokens to logits, and :func:`lipformer.certify` of the model bounds exactly
    this map: a lookup of integers has no Lipschitz constant. In the variant "l2" every part has a known
    constant: learned positions (a shift), L2 attention divided by its bound and feed-forward parts of
    norm 1 in convex residuals, the mean of the tokens (at most :math:`1/\sqrt{n_0}`), a head of norm at
    most head_coeff. Symbols' vectors lie in a ball, so that a radius of 2 ``token_radius`` covers
    every exchange of one token for another.

    ``lipformer.analysis.certified_radius(model, model.embed(tokens), labels, key_padding_mask=mask)`` is
    the distance within which no change of the embedded input turns the answer; with ``tokens=k`` the
    distance that each of k tokens may move by.

    Args:
        config: what to build; weights are drawn from torch's global generator.

    Attributes:
        config: the config, with every default filled in.
        embedding: the symbols' vectors, or None for continuous input.
        body: tokens (B, N, D) to logits (B, K), an nn.Sequential of single steps.

    Example:
        >>> import torch, lipformer as lf
        >>> _ = torch.manual_seed(0)
        >>> config = EncoderClassifierConfig("l2", num_classes=3, vocab_size=50, dim=16)
        >>> model = EncoderClassifier(config)
        >>> tokens = torch.randint(50, (2, 10))
        >>> padding = torch.arange(10) >= torch.tensor([[10], [7]])
        >>> model(tokens, padding).shape
        torch.Size([2, 3])
        >>> torch.allclose(model(tokens, padding)[1:], model(tokens[1:, :7]), atol=1e-6)
        True
        >>> lf.certify(model).bound
        1.0
    """

    config_class = EncoderClassifierConfig
    config: EncoderClassifierConfig
    embedding: nn.Sequential | None

    def __init__(self, config: EncoderClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = None if config.vocab_size is None else _embedding(config)
        self.body = nn.Sequential(_steps(config))
        self.remember_parts()

    @property
    def head(self) -> nn.Linear:
        """The last linear map, features to logits."""
        return self.body[-1]  # type: ignore[return-value]

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits: (B, N) symbols, or (B, N, D) embedded tokens or continuous input -> (B, K).

        Args:
            x: the tokens.
            key_padding_mask: (B, N), True where there is none; nothing depends on what stands there.
        """
        with self.one_pass():
            return call_branch(self.body, self._tokens(x), key_padding_mask)

    def features(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The head's input: the forward's arguments -> (B, D)."""
        with self.one_pass():
            return call_branch(self.body[:-1], self._tokens(x), key_padding_mask)

    def embed(self, tokens: Tensor) -> Tensor:
        """The input of the body: (B, N) symbols -> (B, N, D)."""
        if self.embedding is None or tokens.ndim != 2 or tokens.is_floating_point():
            wanted = "vectors (B, N, features)" if self.embedding is None else "integers (B, N)"
            raise ValueError(f"the model takes {wanted}, got {tokens.dtype} {tuple(tokens.shape)}")
        return self.embedding(tokens)

    def _tokens(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else self.embed(x)

    def extra_repr(self) -> str:
        return f"variant={self.config.variant!r}, {self.config.num_classes} classes"


def _embedding(config: EncoderClassifierConfig) -> nn.Sequential:
    assert config.vocab_size is not None
    table = nn.Embedding(config.vocab_size, config.dim)
    nn.init.normal_(table.weight, std=config.dim**-0.5)
    ball = nn.Identity() if config.token_radius is None else BallProjection(config.token_radius)
    return nn.Sequential(OrderedDict(table=table, ball=ball, dropout=nn.Dropout(config.dropout)))


def _steps(config: EncoderClassifierConfig) -> OrderedDict[str, nn.Module]:
    """The body in order: flat, so that a perturbation can be followed step by step."""
    certified = config.variant == "l2"
    steps: OrderedDict[str, nn.Module] = OrderedDict()
    if config.features is not None:
        linear = SpectralLinear if certified else nn.Linear
        steps["input"] = linear(config.features, config.dim)
    steps["positions"] = Positions(config.max_len, config.dim, config.position_std)
    for i in range(config.num_layers):
        block = _certified_block(config) if certified else _plain_block(config)
        steps[f"attention_{i}"], steps[f"feed_forward_{i}"] = block
    if not certified:
        steps["norm"] = nn.LayerNorm(config.dim)
    steps["pooling"] = TokenMean(config.least)
    if certified:
        assert config.head_coeff is not None
        steps["head"] = SpectralLinear(config.dim, config.num_classes, coeff=config.head_coeff)
    else:
        steps["head"] = nn.Linear(config.dim, config.num_classes)
    return steps


def _certified_block(config: EncoderClassifierConfig) -> tuple[nn.Module, nn.Module]:
    """Attention and feed-forward, of constant 1 each."""
    assert config.hidden is not None
    assert config.attention_weight is not None
    assert config.feed_forward_weight is not None
    attention = l2_self_attention(config.dim, config.num_heads, config.max_len, config.key_radius)
    branch = nn.Sequential(TokenShift(config.dim), attention) if config.token_shift else attention
    feed_forward = FeedForward(config.dim, config.hidden, mode="orthogonal")
    return (
        ConvexResidual(Contractive(branch, 1.0, norm="l2"), config.attention_weight),
        ConvexResidual(feed_forward, config.feed_forward_weight),
    )


def _plain_block(config: EncoderClassifierConfig) -> tuple[nn.Module, nn.Module]:
    """Attention and feed-forward, pre-norm, without any constant."""
    assert config.hidden is not None
    attention = DotProductSelfAttention(config.dim, config.num_heads)
    feed_forward = FeedForward(
        config.dim, config.hidden, None, activation=nn.GELU(), dropout=config.dropout
    )
    return (
        Residual(nn.Sequential(nn.LayerNorm(config.dim), attention)),
        Residual(nn.Sequential(nn.LayerNorm(config.dim), feed_forward)),
    )


@register_bound(EncoderClassifier)
def _(model: EncoderClassifier, ask: Ask) -> Bound:
    body = ask.child(model.body, "body")
    return Bound(body.value, "from embedded tokens to logits", (body,))
