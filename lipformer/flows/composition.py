"""Stacks of invertible blocks, and the densities that they make of noise."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound, times
from lipformer.flows.act_norm import FirstBatch
from lipformer.flows.context import Context, encode_context
from lipformer.flows.continuation import check_follows, check_prefix
from lipformer.flows.log_det.methods import LogDet
from lipformer.flows.solve.fixed_point import Record
from lipformer.layers import frozen
from lipformer.layers.branch import Call, check_context
from lipformer.layers.decoding import Cache, register_step, select_cache, step_module
from lipformer.layers.layer import Layer
from lipformer.layers.layout import padding, without_padding
from lipformer.layers.one_pass import OnePass

DIRECTIONS = ("forward", "inverse", "forward_and_log_det", "inverse_and_log_det")


def check_block(block: nn.Module) -> nn.Module:
    """Returns the block; raises unless it has the four methods of an invertible module."""
    missing = [name for name in DIRECTIONS if not callable(getattr(block, name, None))]
    if not isinstance(block, nn.Module) or missing:
        raise TypeError(
            f"an invertible module has the methods {', '.join(DIRECTIONS)}, such as "
            f"InvertibleResidual or AttentionFlow, got {type(block).__name__}"
        )
    return block


def same_number(name: str, found: Iterable[int | None]) -> int | None:
    """The number that all agree on who have one; raises if they do not."""
    numbers = [n for n in found if n is not None]
    if len(set(numbers)) > 1:
        raise ValueError(f"a flow has one {name}, got parts with {name}={', '.join(map(str, numbers))}")
    return numbers[0] if numbers else None


@functools.cache
def _takes(function: Callable[..., Any], option: str) -> bool:
    parameters = inspect.signature(function).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def run(
    block: nn.Module,
    direction: str,
    x: Tensor,
    mask: Tensor | None,
    context: Tensor | None = None,
    **options: Any,
) -> Any:
    """One of a block's four methods, with those of the options that it takes and that are not None.

    A mask is never left out: a block that cannot take it raises. A context is for the blocks whose
    ``context_dim`` is not None.
    """
    function = getattr(type(block), direction)
    given = {k: v for k, v in options.items() if v is not None and _takes(function, k)}
    if mask is not None:
        given["key_padding_mask"] = mask
    if context is not None and getattr(block, "context_dim", None) is not None:
        given["context"] = context
    # Called as a module, so that hooks run.
    return (block if direction == "forward" else getattr(block, direction))(x, **given)


class InvertibleSequential(OnePass, nn.Sequential):
    """Composes invertible blocks, one after another; it has the same four methods as they have.

    Args:
        blocks: modules with forward, inverse, forward_and_log_det and inverse_and_log_det, such as
            InvertibleResidual, ActNorm, InvertibleLinear, Permutation, or another InvertibleSequential.

    Attributes:
        dim: D, if one of the blocks has a ``dim``, which all that have one share; else None.
        context_dim: C of the contexts (B, C) that blocks take, likewise.
        log_det_record: the :class:`LogDet` of the last log-determinant, its errors added up; or None.

    Example:
        >>> import lipformer as lf
        >>> block = lf.InvertibleResidual(lf.FeedForward(4, 8), 0.5)
        >>> stack = InvertibleSequential(lf.ActNorm(4), block).eval()
        >>> x = torch.randn(2, 3, 4)
        >>> y, log_det = stack.forward_and_log_det(x)
        >>> log_det.shape, bool((stack.inverse(y) - x).abs().max() < 1e-4), stack.record[1].converged
        (torch.Size([2]), True, True)
    """

    log_det_record: LogDet | None = None

    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        for block in self:
            check_block(block)
        self.dim, self.context_dim = (
            same_number(name, (getattr(block, name, None) for block in self))
            for name in ("dim", "context_dim")
        )
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "log_det_record": None}

    @property
    def record(self) -> tuple[Record | None, ...]:
        """The blocks' records of the last inverse, in their order; None where it takes no solve."""
        return tuple(getattr(block, "record", None) for block in self)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D).

        Args:
            x: (B, T, D).
            key_padding_mask: (B, T), True at padded tokens.
            context: (B, C), which goes to the blocks that take one.
        """
        check_context(self, context, x)
        with self.one_pass():
            for block in self:
                x = run(block, "forward", x, key_padding_mask, context)
        return x

    def inverse(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        tol: float | None = None,
        max_iter: int | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); tol and max_iter hold for each block, None is its default."""
        check_context(self, context, y)
        with self.one_pass():
            for block in reversed(self):
                y = run(block, "inverse", y, key_padding_mask, context, tol=tol, max_iter=max_iter)
        return y

    def forward_and_log_det(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output (B, T, D) and log|det| (B,).

        Args:
            x: (B, T, D).
            key_padding_mask: (B, T), True (or -inf) at padded tokens.
            context: (B, C), which goes to the blocks that take one.
            method: of the blocks' log-determinants, instead of their own; a block built with
                log_det="causal" keeps it, as an estimate would only add noise.
            generator: of random log-determinants.
        """
        with self.one_pass():
            return self._add_up(
                "forward_and_log_det", x, key_padding_mask, context, method, generator=generator
            )

    def inverse_and_log_det(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
        tol: float | None = None,
        max_iter: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The input (B, T, D) and log|det| of the inverse (B,); arguments as above."""
        options = {"generator": generator, "tol": tol, "max_iter": max_iter}
        with self.one_pass():
            return self._add_up("inverse_and_log_det", y, key_padding_mask, context, method, **options)

    @torch.no_grad()
    def inverse_step(
        self,
        y: Tensor,
        cache: Cache = None,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        tol: float | None = None,
        max_iter: int | None = None,
    ) -> tuple[Tensor, Cache]:
        """inverse of new tokens (B, T, D) of causal blocks, and the new cache.

        See :meth:`InvertibleResidual.inverse_step`; the caches are those of :meth:`step`.
        """
        news: list[Cache] = []
        olds = (None,) * len(self) if cache is None else cache
        for block, old in zip(reversed(self), reversed(olds), strict=True):
            given: dict[str, Any] = {"tol": tol, "max_iter": max_iter}
            if getattr(block, "token_wise", False) is True:
                y, new = run(block, "inverse", y, key_padding_mask, context, **given), None
            else:
                y, new = run(block, "inverse_step", y, key_padding_mask, context, cache=old, **given)
            news.append(new)
        return y, tuple(reversed(news))

    def _add_up(
        self,
        direction: str,
        x: Tensor,
        mask: Tensor | None,
        context: Tensor | None,
        method: str | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        check_context(self, context, x)
        total = x.new_zeros(x.shape[0])
        records: list[LogDet] = []
        for block in self if direction == "forward_and_log_det" else reversed(self):
            fixed = getattr(block, "log_det_method", None) == "causal"
            chosen = None if fixed else method
            x, log_det = run(block, direction, x, mask, context, method=chosen, **options)
            total = total + log_det
            record = getattr(block, "log_det_record", None)
            if record is not None:
                records.append(record)
        self.log_det_record = LogDet.total(total.detach(), records)
        return x, total


@register_bound(InvertibleSequential)
def _(module: InvertibleSequential, ask: Ask) -> Bound:
    # Not named_children(), which leaves out a module's second use.
    rules = (functools.partial(Ask.child, module=part, name=str(i)) for i, part in enumerate(module))
    return ask.in_turn(rules, directly=True)


@register_step(InvertibleSequential)
def _(module: InvertibleSequential, x: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Cache]:
    news: list[Cache] = []
    for block, old in zip(module, (None,) * len(module) if cache is None else cache, strict=True):
        takes = getattr(block, "context_dim", None) is not None
        x, new = step_module(block, x, old, *(call if takes else call._replace(context=None)))
        news.append(new)
    return x, tuple(news)


def standard_normal_log_prob(z: Tensor) -> Tensor:
    r""":math:`-\tfrac12 (z^2 + \log 2\pi)`, elementwise."""
    return -0.5 * (z.square() + math.log(2.0 * math.pi))


class Flow(Layer):
    r"""Density of sequences or sets (B, T, D), defined by invertible blocks from data to noise.

    .. math:: \log p(x) = \log p_0(f(x)) + \log|\det f'(x)|

    f, from data to noise, is the stack of blocks; sampling inverts it. In eval mode ``log_prob`` is
    deterministic: exact where that is affordable, else a series whose errors ``log_det_record`` tells;
    in training mode an unbiased estimate (see :func:`residual_log_det`, "auto").

    A flow whose blocks take a context c is a density p(x | c) for every c. Its methods take ``context``:
    vectors (B, C), one for each event; with an encoder also tokens (B, S, C), or the pair of tokens and
    their padding mask (B, S). A batch of one, or a vector (C,), is the context of all events.

    Args:
        blocks: a stack, or its blocks in the order from data to noise.
        base: distribution of the noise, an object with ``log_prob`` and ``sample``: of numbers, of
            tokens (D,) or of events (T, D), as its ``batch_shape`` and ``event_shape`` say. None is the
            standard normal. On a GPU the parameters of a torch distribution must be there, and without
            ``validate_args=False`` torch makes the host wait for each check.
        dim: D; None for that of the base or of the first block that has one.
        seq_len: the largest T; None for that of the base, or any.
        encoder: makes of context tokens the vectors that the blocks take, such as
            :class:`ContextEncoder`; it has an attribute ``context_dim``.

    Example:
        >>> import lipformer as lf
        >>> flow = Flow([lf.ActNorm(2), lf.InvertibleResidual(lf.FeedForward(2, 8))], seq_len=5).eval()
        >>> flow.log_prob(torch.randn(3, 5, 2)).shape, flow.sample(4).shape
        (torch.Size([3]), torch.Size([4, 5, 2]))
    """

    def __init__(
        self,
        blocks: InvertibleSequential | Iterable[nn.Module],
        base: Any = None,
        *,
        dim: int | None = None,
        seq_len: int | None = None,
        encoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        stack = isinstance(blocks, InvertibleSequential)
        self.blocks = cast(InvertibleSequential, blocks) if stack else InvertibleSequential(*blocks)
        self.base = base
        self.encoder = encoder
        shape = _shape(base)
        if len(shape) > 2:
            raise ValueError(f"a base is of numbers (), tokens (D,) or events (T, D), got {shape}")
        self.dim = same_number("dim", (dim, *shape[-1:], self.blocks.dim))
        self.seq_len = same_number("seq_len", (seq_len, *shape[:-1]))

    @property
    def log_det_record(self) -> LogDet | None:
        """Of the last log-determinant, its value and errors; None before."""
        return self.blocks.log_det_record

    @property
    def record(self) -> tuple[Record | None, ...]:
        """The blocks' records of the last inverse or sample."""
        return self.blocks.record

    @property
    def context_dim(self) -> int | None:
        """C of the contexts that the flow takes, or None."""
        if self.encoder is None:
            return self.blocks.context_dim
        return cast(int, self.encoder.context_dim)

    @torch.no_grad()
    def initialize(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Context = None
    ) -> None:
        """Sets every ActNorm that is not set yet by a batch of data (B, T, D).

        The first batch in training mode does the same. Call this before torch.compile, under which no
        batch is taken, and before DDP with the same data in every process.
        """
        norms = [(part, part.training) for part in self.modules() if isinstance(part, FirstBatch)]
        try:
            for part, _ in norms:
                part.training = True
            self(x, key_padding_mask, context)
        finally:
            for part, training in norms:
                part.training = training

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Context = None
    ) -> Tensor:
        """Data to noise, (B, T, D) -> (B, T, D)."""
        return self.blocks(*self._given(x, key_padding_mask, context))

    def inverse(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Context = None,
        **options: Any,
    ) -> Tensor:
        """Noise to data, (B, T, D) -> (B, T, D); options of :meth:`InvertibleSequential.inverse`."""
        return self.blocks.inverse(*self._given(y, key_padding_mask, context), **options)

    def forward_and_log_det(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Context = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """The noise (B, T, D) and log|det| (B,); options of the stack's method of this name."""
        given = self._given(x, key_padding_mask, context)
        return self.blocks.forward_and_log_det(*given, **options)

    def inverse_and_log_det(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Context = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """The data (B, T, D) and log|det| of the inverse (B,); options of the stack's method."""
        given = self._given(y, key_padding_mask, context)
        return self.blocks.inverse_and_log_det(*given, **options)

    def _given(
        self, x: Tensor, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the blocks get: x (B, T, D), checked, its mask, and vectors (B, E) for the context."""
        return self._checked(x), mask, encode_context(context, x, self.context_dim, self.encoder)

    def log_prob(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        prefix: Tensor | None = None,
        context: Context = None,
        method: str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log p(x), or log p(x | context), of each sequence or set, (B,); padded tokens do not count.

        Args:
            x: data (B, T, D).
            key_padding_mask: (B, T), True (or -inf) at padded tokens.
            context: (B, C) or (B, S, C), see :class:`Flow`.
            prefix: (B, P, D): log p(x | prefix), of x as the tokens after these, by a causal flow (see
                :meth:`continue_`): log p of both together minus log p of the prefix. No padding.
            method: "exact", "causal", "series" or "roulette", see
                :meth:`InvertibleSequential.forward_and_log_det`.
            generator: of random log-determinants.
        """
        options: dict[str, Any] = {"context": context, "method": method, "generator": generator}
        if prefix is not None:
            if key_padding_mask is not None:
                raise ValueError("log_prob takes a prefix or a key_padding_mask, not both")
            check_follows(prefix, x)
            check_prefix(self.blocks, _shape(self.base), self.seq_len, prefix, x.shape[1])
            both = self.log_prob(torch.cat([prefix, x], 1), **options)
            return both - self.log_prob(prefix, **options)
        noise, log_det = self.forward_and_log_det(x, key_padding_mask, **options)
        return self._base_log_prob(noise, padding(key_padding_mask, x)) + log_det

    @torch.no_grad()
    def sample(
        self,
        n: int,
        seq_len: int | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        context: Context = None,
        generator: torch.Generator | None = None,
        tol: float | None = None,
        max_iter: int | None = None,
    ) -> Tensor:
        """Draws n sequences or sets, (n, seq_len, D), without gradients.

        Args:
            n: how many.
            seq_len: tokens of each; default the flow's own ``seq_len``.
            key_padding_mask: (n, seq_len), True at tokens to leave out: they are zero, and the others
                are drawn as samples of their number. Not for a base of whole events (T, D).
            context: of n samples (n, C) or (n, S, C), one for each; of one for all (C,), (1, C) or
                (1, S, C).
            generator: of the noise.
            tol: of the inverse, for each block.
            max_iter: of the inverse, for each block.
        """
        tokens = self.seq_len if seq_len is None else seq_len
        for name, number in (("seq_len", tokens), ("dim", self.dim)):
            if number is None:
                raise ValueError(f"sample needs {name}: the flow was built without one")
        event = getattr(self.base, "event_shape", ())
        if key_padding_mask is not None and len(event) == 2:
            raise _no_padding(self.base, tuple(event))
        noise = self._base_sample((n, cast(int, tokens), cast(int, self.dim)), generator)
        padded = padding(key_padding_mask, noise)
        x = self.inverse(noise, key_padding_mask, context, tol=tol, max_iter=max_iter)
        return without_padding(x, padded)

    @torch.no_grad()
    def continue_(
        self,
        prefix: Tensor,
        steps: int,
        context: Context = None,
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        tol: float | None = None,
        max_iter: int | None = None,
    ) -> Tensor:
        r"""Draws the tokens after a prefix from :math:`p(x_{P+1}, ..., x_{P+steps} \mid x_1, ..., x_P)`.

        For causal flows whose noise is independent from token to token. There the first P tokens of the
        noise are a function of the first P of the data, so the inverse of fresh noise for the later
        tokens is a sample given the prefix. All new tokens are solved for together;
        the prefix is evaluated once. ``log_prob(x, prefix=prefix)`` is the density of a sample x.

        Args:
            prefix: data (B, P, D), at least one token, without padding: sequences of one length.
            steps: new tokens.
            context: of the B sequences, see :class:`Flow`.
            num_samples: continuations of each prefix; None for one.
            generator: of the noise.
            tol: of the inverse, for each block.
            max_iter: of the inverse, for each block.

        Returns:
            The new tokens alone, (B, steps, D), or (num_samples, B, steps, D).

        Raises:
            ValueError: the flow is not causal, or the noise of its tokens is not independent.
        """
        if steps < 1 or (num_samples is not None and num_samples < 1):
            got = f"steps={steps}, num_samples={num_samples}"
            raise ValueError(f"steps and num_samples must be at least 1, got {got}")
        prefix, _, vectors = self._given(prefix, None, context)
        check_prefix(self.blocks, _shape(self.base), self.seq_len, prefix, steps)
        batch, count = len(prefix), 1 if num_samples is None else num_samples
        noise = self._base_sample((count * batch, steps, prefix.shape[-1]), generator)
        everyone = torch.arange(batch, device=prefix.device).repeat(count)
        with self.blocks.one_pass(), frozen(self):
            caches = step_module(self.blocks, prefix, None, None, None, vectors)[1]
            olds = select_cache(caches, everyone)
            chosen = None if vectors is None else vectors[everyone]
            x, _ = self.blocks.inverse_step(noise, olds, None, chosen, tol=tol, max_iter=max_iter)
        return x if num_samples is None else x.unflatten(0, (count, batch))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, seq_len={self.seq_len}, base={self.base}"

    def _checked(self, x: Tensor) -> Tensor:
        """x; raises unless it is (B, T, D) of the flow's width, length and dtype."""
        if not isinstance(x, Tensor):
            raise TypeError(f"a flow takes tensors (B, T, D), got {type(x).__name__}")
        if x.ndim != 3 or (self.dim is not None and x.shape[-1] != self.dim):
            dim = "D" if self.dim is None else self.dim
            hint = ": x[:, None] is events of one token, x[..., None] of tokens with one feature"
            raise ValueError(
                f"a flow of dim={dim} takes tensors (B, T, {dim}), got {tuple(x.shape)}"
                f"{hint if x.ndim == 2 else ''}"
            )
        if self.seq_len is not None and x.shape[1] > self.seq_len:
            raise ValueError(
                f"the flow has seq_len={self.seq_len}, got {x.shape[1]} tokens in {tuple(x.shape)}"
            )
        own = next((p.dtype for p in self.blocks.parameters()), x.dtype)
        if x.dtype != own and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"the flow's weights are {own}, got {x.dtype}")
        return x

    def _base_log_prob(self, noise: Tensor, padded: Tensor | None) -> Tensor:
        """log p_0 of noise (B, T, D) without its padded tokens, (B,)."""
        shape = _shape(self.base)
        if noise.shape[3 - len(shape) :] != shape:
            # It would fit by broadcasting, as numbers of no density.
            raise ValueError(f"the base is one of events {shape}, got noise {tuple(noise.shape)}")
        noise = without_padding(noise, padded)
        parts = standard_normal_log_prob(noise) if self.base is None else self.base.log_prob(noise)
        if parts.shape not in (noise.shape[:1], noise.shape[:2], noise.shape):
            raise ValueError(
                f"the base gives log_prob of shape {tuple(parts.shape)} for noise {tuple(noise.shape)}, "
                "not one number for each entry, token or event"
            )
        if padded is not None:
            if parts.ndim == 1:
                raise _no_padding(self.base, tuple(noise.shape[1:]))
            mask = padded if parts.ndim == 2 else padded.unsqueeze(-1)
            parts = torch.where(mask, 0.0, parts)
        return parts.flatten(1).sum(-1) if parts.ndim > 1 else parts

    def _base_sample(self, shape: tuple[int, int, int], generator: torch.Generator | None) -> Tensor:
        try:
            list(map(operator.index, shape))
        except TypeError as error:
            raise TypeError(f"n and T of samples (n, T, D) are whole numbers, got {shape}") from error
        like = next(self.blocks.parameters(), torch.empty(()))
        if self.base is None:
            return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        size = torch.Size(shape[: 3 - len(_shape(self.base))])
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


def _shape(base: Any) -> tuple[int, ...]:
    """What one draw of a base looks like: () a number, (D,) a token, (T, D) an event."""
    return (*getattr(base, "batch_shape", ()), *getattr(base, "event_shape", ()))


def _no_padding(base: Any, event: tuple[int, ...]) -> ValueError:
    """For a base of whole events: a part of its noise has no density of its own."""
    return ValueError(
        "with padding the base must be a distribution of numbers or tokens, got one of events "
        f"{event}: {base}"
    )


@register_bound(Flow)
def _(module: Flow, ask: Ask) -> Bound:
    return times(ask.child(module.blocks, "blocks"))
