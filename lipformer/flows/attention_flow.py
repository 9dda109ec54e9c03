"""A normalising flow of invertible attention, on sequences and on sets."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributions import Distribution

from lipformer.flows.act_norm import ActNorm
from lipformer.flows.composition import Flow
from lipformer.flows.context import ContextAffine, ContextEncoder
from lipformer.flows.equivariant import equivariant_blocks
from lipformer.flows.invertible_residual import InvertibleResidual
from lipformer.flows.linear import InvertibleLinear, Permutation
from lipformer.flows.mean_free import MeanFreeNormal
from lipformer.layers import (
    ContextBias,
    L2MultiheadAttention,
    LipSwish,
    PastBias,
    SpectralLinear,
    TokenShift,
)
from lipformer.saving.saved_model import SavedModel

LINEAR = {"plu": InvertibleLinear, "permutation": Permutation}
_F = TypeVar("_F", bound="AttentionFlow")


def attention_branch(
    dim: int,
    num_heads: int,
    *,
    width: int | None,
    causal: bool,
    positions: str | None,
    key_radius: float | None,
    context_dim: int | None,
    past_bias: bool = False,
) -> nn.Module:
    """Attention of tokens (B, T, D), if ``width`` is given on that many smooth features of them.

    These depend on the context as well. Attention alone does not: it does not see a common translation.
    With ``past_bias`` the attention is inside the features: it sees earlier tokens only, two neighbours
    in each key, and what it finds, through one more layer, is added to W x before the activation.
    """
    attention = L2MultiheadAttention(
        width or dim,
        num_heads,
        batch_first=True,
        causal=causal,
        positions=positions,
        proj_coeff=None if past_bias else 1.0,
        key_radius=key_radius,
        smooth_radius=key_radius is not None,
    )
    if width is None:
        return attention
    if past_bias:
        found = [TokenShift(width), attention, LipSwish(), nn.Linear(width, width)]
        past = PastBias(width, nn.Sequential(LipSwish(), *found))
        return nn.Sequential(*smooth_features(dim, width, context_dim, past), SpectralLinear(width, dim))
    features = smooth_features(dim, width, context_dim)
    return nn.Sequential(*features, attention, SpectralLinear(width, dim))


def smooth_features(
    dim: int, width: int, context_dim: int | None, *biases: nn.Module
) -> list[nn.Module]:
    """LipSwish(W x + w), or LipSwish(W x + w + U c) with a context c: smooth, so that densities are."""
    context = [] if context_dim is None else [ContextBias(width, context_dim)]
    return [SpectralLinear(dim, width), *context, *biases, LipSwish()]


def feed_forward_branch(dim: int, hidden: Sequence[int], context_dim: int | None) -> nn.Sequential:
    """Smooth features of these widths, one made of another, and a linear map back."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([dim, *hidden]):
        layers += smooth_features(before, after, context_dim)
    return nn.Sequential(*layers, SpectralLinear([dim, *hidden][-1], dim))


def normalising(dim: int, context_dim: int | None) -> list[nn.Module]:
    """A shift and scale of every feature; with a context a second one, which depends on it."""
    return [ActNorm(dim), *([] if context_dim is None else [ContextAffine(dim, context_dim)])]


def _blocks(
    config: Mapping[str, Any], options: dict[str, Any], context_dim: int | None
) -> list[nn.Module]:
    """The blocks of a flow that is not equivariant: its weights are free."""
    dim, coeff = config["dim"], config["coeff"]
    names = ("width", "causal", "positions", "key_radius", "past_bias")
    blocks: list[nn.Module] = []
    for _ in range(config["depth"]):
        blocks += normalising(dim, context_dim)
        if config["linear"] is not None:
            blocks.append(LINEAR[config["linear"]](dim))
        attention = attention_branch(
            dim, config["num_heads"], context_dim=context_dim, **{name: config[name] for name in names}
        )
        blocks.append(InvertibleResidual(attention, coeff, config["mode"], **options))
        for _ in range(config["feed_forwards"]):
            feed_forward = feed_forward_branch(dim, config["hidden"], context_dim)
            blocks.append(InvertibleResidual(feed_forward, coeff, log_det="causal"))
    return blocks + normalising(dim, context_dim)


def _check_equivariant(config: Mapping[str, Any]) -> None:
    """Raises for arguments that an equivariant flow does not take."""
    needed = {"mode": "norm", "causal": False, "positions": None}
    for name in (*needed, "width", "linear", "context_dim", "base"):
        if config[name] != needed.get(name):
            raise ValueError(
                f"equivariant=True needs {name}={needed.get(name)!r}, got {name}={config[name]!r}"
            )
    if config["seq_len"] is None or len(config["hidden"]) != 1:
        raise ValueError(
            "equivariant=True needs a seq_len and one number for hidden, got "
            f"seq_len={config['seq_len']}, hidden={config['hidden']}"
        )


class AttentionFlow(SavedModel, Flow):
    """A :class:`Flow` of invertible attention: a density of sequences or sets (B, T, D).

    Its blocks, from data to noise: ActNorm, an optional linear map,
    :class:`InvertibleResidual` around attention and around a feed-forward network. Without a mask f is
    permutation equivariant: a density of sets. With ``mode="causal"`` each token sees the earlier ones
    only, which costs much less of the attention's strength (Theorem E) and makes the log-determinant
    exact and cheap: a density of sequences. With ``context_dim`` it is a density for each context,
    p(x | c): an encoder makes one vector of the context, on which the branches' features depend, and
    beside every ActNorm stands a :class:`ContextAffine`.

    Args:
        dim: D, the number of features of a token.
        depth: number of blocks, each of one attention.
        num_heads: heads of the attention.
        hidden: width, or widths, between the layers of the feed-forward networks; of an equivariant flow
            the number of knots of each :class:`PairRadial`.
        feed_forwards: feed-forward networks after each attention, or PairRadial maps.
        width: features that the attention works on (a multiple of num_heads), if not on the tokens.
        coeff: contraction of every residual branch, in (0, 1).
        mode: "norm" or "causal", see :class:`InvertibleResidual`.
        causal: mask the attention; default: in mode "causal" only.
        positions: None, "alibi" or "rotary"; "auto" is "alibi" with a mask, else None.
        key_radius: initial radius of the balls that bound each head's keys, smoothly (Theorem F): the
            attention is then divided by less. None: no balls.
        past_bias: mode "causal" with a width: the attention sees the earlier tokens only and is added to
            the features of each, see :class:`lipformer.layers.PastBias`. It then needs no bound and is
            not divided, and chooses how the block stretches a token: the stronger form for series.
        seq_len: the largest T; needed unless positions are "alibi".
        log_det: method of the attention's log-determinants; None for "auto", see
            :class:`InvertibleResidual`. The feed-forward's are always exact, by derivatives of single
            tokens.
        linear: None, "plu" (:class:`InvertibleLinear`) or "permutation".
        context_dim: C of contexts (B, C) or (B, S, C), see :class:`Flow`; None for none. The encoder
            makes vectors of as many features as the feed-forward's first layer has.
        base: distribution of the noise, see :class:`Flow`.
        equivariant: a density of sets up to translation, rotation, reflection and order: attention with
            scalar weights, pair maps in place of feed-forward networks, one scale in place of ActNorm.
            ``log_prob`` is then a density in the subspace of mean zero, of (T - 1) D dimensions, and
            does not depend on the mean of x; samples have mean zero. Takes no width, linear, context,
            base, mask or positions.
        probes: random probes of an estimated log-determinant.
        terms: terms of the power series, see :class:`InvertibleResidual`.

    Attributes:
        config: the arguments it was built with, which ``save_pretrained`` writes beside the weights.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> flow = AttentionFlow(2, depth=2, num_heads=2, width=8, hidden=16, seq_len=5)
        >>> x = torch.randn(3, 5, 2)
        >>> flow.eval().log_prob(x).shape, flow.sample(4, 5).shape
        (torch.Size([3]), torch.Size([4, 5, 2]))
    """

    def __init__(
        self,
        dim: int,
        *,
        depth: int = 4,
        num_heads: int = 4,
        hidden: int | Sequence[int] = 64,
        feed_forwards: int = 1,
        width: int | None = None,
        coeff: float = 0.9,
        mode: str = "norm",
        causal: bool | None = None,
        positions: str | None = "auto",
        key_radius: float | None = None,
        past_bias: bool = False,
        seq_len: int | None = None,
        log_det: str | None = None,
        linear: str | None = None,
        context_dim: int | None = None,
        base: Distribution | None = None,
        equivariant: bool = False,
        probes: int = 1,
        terms: int | None = None,
    ) -> None:
        if linear is not None and linear not in LINEAR:
            raise ValueError(f"linear must be None or one of {', '.join(LINEAR)}, got {linear!r}")
        if not equivariant and (width or dim) % num_heads:
            advice = "width=W, a multiple of num_heads, or" if width is None else "another width or"
            raise ValueError(
                f"the attention works on {'dim' if width is None else 'width'}={width or dim} features, "
                f"which num_heads={num_heads} does not divide: give {advice} another num_heads"
            )
        if past_bias and (mode != "causal" or causal is False or width is None):
            raise ValueError(
                "past_bias=True needs mode='causal', with its mask, and a width, got "
                f"mode={mode!r}, causal={causal}, width={width}"
            )
        causal = mode == "causal" if causal is None else causal
        if positions == "auto":
            positions = "alibi" if causal else None
        hidden = [hidden] if isinstance(hidden, int) else list(hidden)
        # Every argument, with what "auto" and None stand for: no list of them to keep in step.
        config = {name: value for name, value in locals().items() if name in _ARGUMENTS}
        encoder = None if context_dim is None else ContextEncoder(context_dim, (*hidden, dim)[0])
        options: dict[str, Any] = {"log_det": log_det, "probes": probes, "terms": terms}
        options["seq_len"] = seq_len
        noise: Any = base
        if equivariant:
            _check_equivariant(config)
            assert seq_len is not None
            noise = MeanFreeNormal(seq_len, dim)
            blocks = equivariant_blocks(
                dim,
                depth=depth,
                num_heads=num_heads,
                knots=hidden[0],
                pairs=feed_forwards,
                coeff=coeff,
                key_radius=key_radius,
                options=options,
            )
        else:
            blocks = _blocks(config, options, None if encoder is None else encoder.width)
        super().__init__(blocks, noise, dim=dim, seq_len=seq_len, encoder=encoder)
        self.causal = causal
        self.config = config
        self.remember_parts()

    def entries(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON values; a base of one's own is none."""
        built: Any = None
        if self.config["equivariant"]:
            built = MeanFreeNormal(self.config["seq_len"], self.config["dim"])
        for base, default in ((self.base, built), (self.config["base"], None)):
            if repr(base) != repr(default):
                raise ValueError(
                    f"save_pretrained writes flows of the default base, base=None, got {base}: save "
                    "flow.state_dict() by torch.save, and load it into a flow built with this base"
                )
        return dict(self.config)

    @classmethod
    def from_entries(cls: type[_F], entries: Mapping[str, Any]) -> _F:
        """A flow of these arguments."""
        return cls(**entries)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, causal={self.causal}, context_dim={self.context_dim}"


_ARGUMENTS = inspect.signature(AttentionFlow).parameters
