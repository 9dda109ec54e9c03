"""A normalising flow of invertible attention, on sequences and on sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from lipformer.certificate import Ask, Bound, register_bound, times
from lipformer.flows.act_norm import ActNorm
from lipformer.flows.invertible_residual import InvertibleResidual
from lipformer.flows.linear import InvertibleLinear, Permutation
from lipformer.layers import L2MultiheadAttention, LipSwish, SpectralLinear
from lipformer.layers.layout import padding, without_padding
from lipformer.layers.one_pass import OnePass

LINEAR = {"plu": InvertibleLinear, "permutation": Permutation}


def attention_branch(
    dim: int, num_heads: int, *, width: int | None, causal: bool, positions: str | None
) -> nn.Module:
    """Attention of tokens (B, T, D), if ``width`` is given on that many smooth features of them."""
    attention = L2MultiheadAttention(
        width or dim,
        num_heads,
        batch_first=True,
        causal=causal,
        positions=positions,
        proj_coeff=1.0,
    )
    if width is None:
        return attention
    return nn.Sequential(SpectralLinear(dim, width), LipSwish(), attention, SpectralLinear(width, dim))


def feed_forward_branch(dim: int, hidden: Sequence[int]) -> nn.Sequential:
    """SpectralLinear layers of these widths with LipSwish between: smooth, so that densities are."""
    widths = [dim, *hidden, dim]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [SpectralLinear(before, after), LipSwish()]
    return nn.Sequential(*layers[:-1])


def standard_normal_log_prob(z: Tensor) -> Tensor:
    r""":math:`-\tfrac12 (z^2 + \log 2\pi)`, elementwise."""
    return -0.5 * (z.square() + math.log(2.0 * math.pi))


class AttentionFlow(OnePass):
    r"""Density of sequences or sets (B, T, D): noise pulled through invertible attention.

    .. math:: \log p(x) = \log p_0(f(x)) + \log|\det f'(x)|

    f, from data to noise, is a stack of blocks: ActNorm, an optional linear map,
    :class:`InvertibleResidual` around attention and around a feed-forward network. Without a mask f is
    permutation equivariant: a density of sets. With ``mode="causal"`` each token sees the earlier ones
    only, which costs much less of the attention's strength (Theorem E) and makes the log-determinant
    exact and cheap: a density of sequences.

    Args:
        dim: D, the number of features of a token.
        depth: number of blocks, each of one attention.
        num_heads: heads of the attention.
        hidden: width, or widths, between the layers of the feed-forward networks.
        feed_forwards: feed-forward networks after each attention.
        width: features that the attention works on (a multiple of num_heads), if not on the tokens.
        coeff: contraction of every residual branch, in (0, 1).
        mode: "norm" or "causal", see :class:`InvertibleResidual`.
        causal: mask the attention; default: in mode "causal" only.
        positions: None, "alibi" or "rotary"; the default is "alibi" with a mask, else None.
        seq_len: the largest T; needed unless positions are "alibi".
        log_det: method of the attention's log-determinants; default "causal" with a mask, else
            "roulette". The feed-forward's are always exact, by D forward-mode probes.
        linear: None, "plu" (:class:`InvertibleLinear`) or "permutation".
        base: distribution of the noise: of numbers, of tokens (D,) or of events (T, D); default the
            standard normal. On a GPU its parameters must be there, and without ``validate_args=False``
            torch makes the host wait for each check.
        probes: random probes of an estimated log-determinant.
        terms: terms of the power series, see :class:`InvertibleResidual`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> flow = AttentionFlow(2, depth=2, num_heads=2, width=8, hidden=16, seq_len=5)
        >>> x = torch.randn(3, 5, 2)
        >>> flow.log_prob(x, method="exact").shape, flow.sample(4, 5).shape
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
        seq_len: int | None = None,
        log_det: str | None = None,
        linear: str | None = None,
        base: Distribution | None = None,
        probes: int = 1,
        terms: int | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("depth", depth), ("feed_forwards", feed_forwards)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count!r}")
        if linear is not None and linear not in LINEAR:
            raise ValueError(f"linear must be None or one of {', '.join(LINEAR)}, got {linear!r}")
        if (width or dim) % num_heads:
            advice = "width=W, a multiple of num_heads, or" if width is None else "another width or"
            raise ValueError(
                f"the attention works on {'dim' if width is None else 'width'}={width or dim} features, "
                f"which num_heads={num_heads} does not divide: give {advice} another num_heads"
            )
        self.dim = dim
        self.seq_len = seq_len
        self.base = base
        self.causal = mode == "causal" if causal is None else causal
        if positions == "auto":
            positions = "alibi" if self.causal else None
        widths = (hidden,) if isinstance(hidden, int) else tuple(hidden)
        blocks: list[nn.Module] = []
        for _ in range(depth):
            blocks.append(ActNorm(dim))
            if linear is not None:
                blocks.append(LINEAR[linear](dim))
            attention = attention_branch(
                dim, num_heads, width=width, causal=self.causal, positions=positions
            )
            options: dict[str, Any] = {"seq_len": seq_len, "probes": probes, "terms": terms}
            blocks.append(InvertibleResidual(attention, coeff, mode, log_det=log_det, **options))
            for _ in range(feed_forwards):
                feed_forward = feed_forward_branch(dim, widths)
                blocks.append(InvertibleResidual(feed_forward, coeff, log_det="causal"))
        blocks.append(ActNorm(dim))
        self.blocks = nn.ModuleList(blocks)
        self.refresh()

    @torch.no_grad()
    def initialize(self, x: Tensor, key_padding_mask: Tensor | None = None) -> None:
        """Sets every ActNorm that is not set yet by a batch of data (B, T, D).

        The first batch in training mode does the same. Call this before torch.compile, under which no
        batch is taken, and before DDP with the same data in every process.
        """
        self._check(x)
        padded = padding(key_padding_mask, x)
        for block in self.blocks:
            if isinstance(block, ActNorm) and not block.is_set():
                block.initialize(x, padded)
            x = block(x, key_padding_mask)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Data to noise, (B, T, D) -> (B, T, D)."""
        self._check(x)
        with self.one_pass():
            for block in self.blocks:
                x = block(x, key_padding_mask)
        return x

    def inverse(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        tol: float = 1e-6,
        max_iter: int = 1000,
    ) -> Tensor:
        """Noise to data, (B, T, D) -> (B, T, D); tol and max_iter hold for each block."""
        self._check(y)
        for block in reversed(self.blocks):
            options = {"tol": tol, "max_iter": max_iter} if _solves(block) else {}
            y = block.inverse(y, key_padding_mask, **options)  # type: ignore[operator]
        return y

    def forward_and_log_det(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The noise (B, T, D) and log|det| (B,).

        Args:
            x: data (B, T, D).
            key_padding_mask: (B, T), True (or -inf) at padded tokens.
            method: of the attention's log-determinants instead of the one chosen at construction.
            generator: of random log-determinants.
        """
        self._check(x)
        total = x.new_zeros(x.shape[0])
        with self.one_pass():
            for index, block in enumerate(self.blocks):
                options = self._density_options(index, method, generator)
                x, log_det = block.forward_and_log_det(x, key_padding_mask, **options)  # type: ignore[operator]
                total = total + log_det
        return x, total

    def inverse_and_log_det(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
        tol: float = 1e-6,
        max_iter: int = 1000,
    ) -> tuple[Tensor, Tensor]:
        """The data (B, T, D) and log|det| of the inverse (B,); arguments as above."""
        self._check(y)
        total = y.new_zeros(y.shape[0])
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            options = self._density_options(index, method, generator)
            if _solves(block):
                options |= {"tol": tol, "max_iter": max_iter}
            y, log_det = block.inverse_and_log_det(y, key_padding_mask, **options)  # type: ignore[operator]
            total = total + log_det
        return y, total

    def log_prob(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log p(x) of each sequence or set, (B,); padded tokens do not count.

        With the default of a flow on sets this is an unbiased estimate, for training; use
        ``method="exact"`` (small T D) or ``"series"`` to evaluate. With a causal flow it is exact.

        Args:
            x: data (B, T, D).
            key_padding_mask: (B, T), True (or -inf) at padded tokens.
            method: "exact", "causal", "series" or "roulette" for the attention's log-determinants.
            generator: of random log-determinants.
        """
        noise, log_det = self.forward_and_log_det(
            x, key_padding_mask, method=method, generator=generator
        )
        return self._base_log_prob(noise, padding(key_padding_mask, x)) + log_det

    @torch.no_grad()
    def sample(
        self,
        n: int,
        seq_len: int | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        tol: float = 1e-6,
        max_iter: int = 1000,
    ) -> Tensor:
        """Draws n sequences or sets, (n, seq_len, D), without gradients.

        Args:
            n: how many.
            seq_len: tokens of each; default the flow's own ``seq_len``.
            key_padding_mask: (n, seq_len), True at tokens to leave out: they are zero, and the others
                are drawn as samples of their number.
            generator: of the noise.
            tol: of the inverse, for each block.
            max_iter: of the inverse, for each block.
        """
        tokens = self.seq_len if seq_len is None else seq_len
        if tokens is None:
            raise ValueError("sample needs seq_len: the flow was built without one")
        for name, number in (("n", n), ("seq_len", tokens)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {number!r}")
        noise = self._base_sample((n, tokens, self.dim), generator)
        padded = padding(key_padding_mask, noise)
        drawn = self.inverse(noise, key_padding_mask, tol=tol, max_iter=max_iter)
        return drawn if padded is None else drawn.masked_fill(padded.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, causal={self.causal}, seq_len={self.seq_len}, base={self.base}"

    def _check(self, x: Tensor) -> None:
        """Raises unless x is (B, T, D) of the flow's width, length and dtype."""
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != self.dim:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"a flow of dim={self.dim} takes tensors (B, T, {self.dim}), got {given}")
        if self.seq_len is not None and x.shape[1] > self.seq_len:
            raise ValueError(f"the flow has seq_len={self.seq_len}, got {x.shape[1]} tokens")
        own = next(self.parameters()).dtype
        if x.dtype != own and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"the flow's weights are {own}, got {x.dtype}")

    def _density_options(
        self, index: int, method: str | None, generator: torch.Generator | None
    ) -> dict[str, Any]:
        block = self.blocks[index]
        if not _solves(block):
            return {}
        # Token-wise branches stay exact: that is cheap, and an estimate would only add noise.
        attends = any(isinstance(part, L2MultiheadAttention) for part in block.modules())
        return {"method": method if attends else None, "generator": generator}

    def _base_log_prob(self, noise: Tensor, padded: Tensor | None) -> Tensor:
        """log p_0 of noise (B, T, D) without its padded tokens, (B,)."""
        noise = without_padding(noise, padded)
        parts = standard_normal_log_prob(noise) if self.base is None else self.base.log_prob(noise)
        if padded is not None:
            if parts.ndim == 1:
                raise ValueError(
                    "with padding the base must be a distribution of numbers or tokens, got one of "
                    f"events {tuple(noise.shape[1:])}"
                )
            mask = padded if parts.ndim == 2 else padded.unsqueeze(-1)
            parts = torch.where(mask, 0.0, parts)
        return parts.flatten(1).sum(-1) if parts.ndim > 1 else parts

    def _base_sample(self, shape: tuple[int, int, int], generator: torch.Generator | None) -> Tensor:
        like = next(self.parameters())
        if self.base is None:
            return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        drawn = len(self.base.batch_shape) + len(self.base.event_shape)
        size = torch.Size(shape[: 3 - drawn])
        if generator is None:
            noise = self.base.sample(size)
        else:
            # Distributions draw from torch's global generator: seed it for this one draw.
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                noise = self.base.sample(size)
        if noise.shape != shape:
            raise ValueError(f"the base draws {tuple(noise.shape)} where noise is {shape}")
        return noise.to(like)


def _solves(block: nn.Module) -> bool:
    return isinstance(block, InvertibleResidual)


@register_bound(AttentionFlow)
def _(module: AttentionFlow, ask: Ask) -> Bound:
    return times(*(ask.child(block, f"blocks.{i}") for i, block in enumerate(module.blocks)))
