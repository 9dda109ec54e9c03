"""Language models: an embedding, the body that the variant says, and the drawing of further tokens."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.flows import ActNorm, InvertibleSequential, NotConverged
from lipformer.layers import frozen, step_module
from lipformer.layers.one_pass import OnePass
from lipformer.models.config import LanguageModelConfig
from lipformer.models.parts import sinusoids
from lipformer.models.variants import BODIES
from lipformer.saving.saved_model import SavedModel


class LanguageModel(OnePass, SavedModel):
    """A causal Transformer over symbols: maps tokens to the logits of the next one.

    ``body`` maps embedded tokens to logits, and :func:`lipformer.certify` of the model bounds exactly
    this map: a lookup of integers has no Lipschitz constant. ``body.trunk`` ends at the hidden
    tokens, ``body.readout`` makes logits of them.

    Args:
        config: what to build; weights are drawn from torch's global generator.

    Attributes:
        config: the config, with every default filled in.
        embedding: the symbols' vectors (V, D).
        body: embedded tokens (B, N, D) to logits (B, N, V).

    Example:
        >>> import lipformer as lf
        >>> _ = torch.manual_seed(0)
        >>> model = lf.models.lipschitz(vocab_size=50, dim=16, num_heads=2, num_layers=1)
        >>> model(torch.randint(50, (2, 10))).shape
        torch.Size([2, 10, 50])
        >>> lf.certify(model).bound
        32.0
    """

    config_class = LanguageModelConfig
    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        body = BODIES[config.variant](config)
        self.body = nn.Sequential(OrderedDict(trunk=body.trunk, readout=body.readout))
        self.remember_parts()

    @property
    def trunk(self) -> nn.Sequential:
        """Embedded tokens to hidden tokens."""
        return self.body.get_submodule("trunk")  # type: ignore[return-value]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next token: (B, N) int64 -> (B, N, V)."""
        with self.one_pass():
            return self.body(self.embed(tokens))

    def embed(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """The input of the body: (B, N) -> (B, N, D); the first token stands at ``offset``."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be integers of shape (B, N), got {tuple(tokens.shape)}")
        end = offset + tokens.shape[1]
        if not self.config.any_length and end > self.config.max_len:
            raise ValueError(
                f"max_len is {self.config.max_len}, got {end} tokens; with positions='alibi' any length "
                "is allowed"
            )
        x = self.embedding(tokens)
        if self.config.embedding_rms is not None:
            # In float16 a square may overflow, and a row of zeros would be divided by zero.
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            length = self.config.embedding_rms * math.sqrt(self.config.dim)
            x = (F.normalize(wide, dim=-1) * length).to(x.dtype)
        if self.config.positions == "sinusoidal":
            place = torch.arange(offset, end, device=tokens.device)
            x = x + sinusoids(place, self.config.dim).to(x.dtype)
        return x

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden tokens of embedded ones: the trunk, without the readout; (B, N, D) both."""
        with self.one_pass():
            return self.trunk(x)

    def invert(self, hidden: Tensor, *, tol: float = 1e-6, max_iter: int = 1000) -> Tensor:
        """The embedded tokens of hidden ones, the inverse of :meth:`hidden`.

        Args:
            hidden: (B, N, D).
            tol: tolerance of each block's inverse, see :class:`lipformer.InvertibleResidual`.
            max_iter: most evaluations of a block's branch.

        Raises:
            ValueError: the model is not of the variant "invertible".
            NotConverged: a block's inverse missed the tolerance, or what the blocks are off by has grown
                to more than max(0.01, 1e4 tol) max(1, max|x|) behind ActNorms that shrink much, or x
                leads to other hidden tokens by as much.
        """
        if self.config.variant != "invertible":
            raise ValueError(f"invert needs the variant 'invertible', got {self.config.variant!r}")
        stack = InvertibleSequential(*self.trunk)
        with frozen(self):
            x = stack.inverse(hidden, tol=tol, max_iter=max_iter)
            self._check_inverse(x, hidden, stack, tol, max_iter)
        return x

    @torch.no_grad()
    def _check_inverse(
        self, x: Tensor, hidden: Tensor, stack: InvertibleSequential, tol: float, max_iter: int
    ) -> None:
        """Refuses an inverse that ActNorms have spoilt: each divides what blocks behind it are off by.

        The residual of the whole model does not show it: ActNorms shrink that again. It shows what large
        weights of a causal block make of an error in an early token.
        """
        growth, off, worst = 1.0, 0.0, None
        for block, record in zip(stack, stack.record, strict=True):
            if isinstance(block, ActNorm):
                growth *= float(block.log_scale.double().min().neg().exp())
            elif record is not None and record.residual.numel():
                off, worst = off + growth * float(record.residual.max()), record
        if worst is None:
            return
        allowed, helps = max(0.01, 1e4 * tol), f"in float64 a tol below {tol:g} helps"
        if not off <= allowed * max(1.0, float(x.abs().max())):
            told = (
                f"the inverse is off by about {off:.3g}: the model's ActNorms enlarge the errors of "
                f"its blocks {growth:.3g} times; {helps}"
            )
            raise NotConverged(worst, max_iter, told)
        missed = float((self.trunk(x) - hidden).abs().max())
        if not missed <= allowed * max(1.0, float(hidden.abs().max())):
            told = (
                f"the solution gives hidden tokens that differ by {missed:.3g}: errors of early "
                f"tokens grow along the sequence; {helps}, and so do smaller weights"
            )
            raise NotConverged(worst, max_iter, told)

    @torch.no_grad()
    def initialize(self, tokens: Tensor) -> None:
        """Sets what a first training batch decides (ActNorm, in "invertible"), unless it is set.

        The first forward pass in training mode does the same. Call this before torch.compile, under
        which no batch is taken, and before DDP with the same tokens in every process, else each
        process would be set by its own first batch.

        Args:
            tokens: (B, N).
        """
        with _mode(self, training=True):
            self(tokens)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Continues each prompt by ``max_new`` tokens, in eval mode.

        Args:
            prompt: (B, N), N >= 1.
            max_new: how many tokens to add.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw among the k likeliest tokens only.
            generator: of the draws, on the prompt's device.
            use_cache: keep the keys of earlier tokens (in L2 attention nothing else is needed); False
                computes all tokens anew at each step, for the same result.

        Returns:
            (B, N + max_new), the prompt included.
        """
        symbols = self.config.vocab_size
        fits = prompt.ndim == 2 and prompt.numel() > 0
        if not fits or not 0 <= int(prompt.min()) <= int(prompt.max()) < symbols:
            raise ValueError(
                "prompt must have shape (B, N), at least one token, all of the vocabulary "
                f"0..{symbols - 1}, got {prompt.tolist()}"
            )
        check_sampling(temperature, top_k, symbols)
        tokens, cache = prompt, None
        with _mode(self, training=False), frozen(self):
            for _ in range(max_new):
                if use_cache:
                    seen = 0 if cache is None else tokens.shape[1] - 1
                    logits, cache = step_module(self.body, self.embed(tokens[:, seen:], seen), cache)
                else:
                    logits = self(tokens)
                tokens = torch.cat(
                    [tokens, sample_tokens(logits[:, -1], temperature, top_k, generator)], dim=1
                )
        return tokens

    def extra_repr(self) -> str:
        return f"variant={self.config.variant!r}, positions={self.config.positions!r}"


@contextlib.contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or eval mode, and afterwards each module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@register_bound(LanguageModel)
def _(model: LanguageModel, ask: Ask) -> Bound:
    # It takes no mask.
    body = replace(ask, padded=False).child(model.body, "body")
    return Bound(body.value, "from embedded tokens to logits", (body,))


def check_sampling(temperature: float, top_k: int | None, vocab_size: int) -> None:
    """Raises ValueError for a temperature or a top_k that is not allowed."""
    if not 0.0 <= temperature < math.inf:
        raise ValueError(
            f"temperature must be 0 (the likeliest token) or positive and finite, got {temperature!r}"
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be None or an integer in 1..{vocab_size}, got {top_k!r}")


def sample_tokens(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token for each row: (B, V) -> (B, 1).

    Args:
        logits: (B, V).
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens only.
        generator: of the draw.
    """
    if temperature == 0.0 or top_k == 1:
        return logits.argmax(-1, keepdim=True)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest becomes 0: divided by a tiny temperature it stays so, and the others only fall.
    wide = wide - wide.amax(-1, keepdim=True)
    temperature = max(temperature, torch.finfo(wide.dtype).tiny)
    if top_k is None:
        return torch.multinomial((wide / temperature).softmax(-1), 1, generator=generator)
    best, tokens = wide.topk(top_k, dim=-1)
    index = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
    return tokens.gather(-1, index)
