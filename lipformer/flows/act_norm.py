"""A learned shift and scale of every feature, set by the first batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.paths import Passage, through
from lipformer.flows.linear import TokenWise, at_least_one
from lipformer.functional.rounding import ROUND_UP, UNIT, enlarge
from lipformer.functional.tracing import tracing

# A feature that varies less than this over the first batch keeps its scale.
_LEAST_DEVIATION = 1e-6


class FirstBatch(nn.Module, ABC):
    """What is set by the first batch in training mode; that it is set is saved with the weights.

    Under torch.compile and torch.func no batch is taken: run one without them first.
    """

    initialized: Tensor
    # Whether the flag was seen set: on a GPU it is read until then, and once after each load.
    _seen_set = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("initialized", torch.tensor(False))

    @abstractmethod
    def initialize(self, x: Tensor, padded: Tensor | None = None) -> None:
        """Sets it by a batch (B, T, D) whose tokens do not count where padded (B, T) is True."""

    def note(self) -> None:
        """Notes that it is set."""
        self.initialized.fill_(True)
        self._seen_set = True

    def prepare(self, x: Tensor, padded: Tensor | None) -> None:
        """Sets it by the first training batch (B, T, D)."""
        if self.training and not tracing() and not self.is_set():
            self.initialize(x, padded)

    def check_set(self, ask: Ask) -> None:
        """Raises where a bound would hold only until the first batch, which is still to come."""
        if ask.in_forward and self.training and not tracing() and not self.is_set():
            raise ask.refuse(
                "its first training batch would change its scale after it was divided by its bound",
                "initialize(x) before it goes into a contractive or invertible branch",
            )

    def is_set(self) -> bool:
        """Whether it is set."""
        if not self._seen_set or self.initialized.device.type == "cpu":
            self._seen_set = bool(self.initialized)
        return self._seen_set

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._seen_set = False
        super()._load_from_state_dict(*args, **kwargs)


class ActNorm(FirstBatch, TokenWise):
    r"""Scales features, :math:`y = (x + b)\,e^s`, to mean 0 and deviation 1 on the first training batch.

    :math:`\log|\det J| = T \sum_k s_k` with T the unpadded tokens of a sample, which alone count for
    mean and deviation too. Until a first batch has come (:class:`FirstBatch`) the map is the identity.
    Source: Kingma and Dhariwal 2018 (Glow).

    Args:
        dim: D, the number of features.

    Example:
        >>> layer = ActNorm(3)
        >>> y = layer(5.0 + 2.0 * torch.randn(8, 10, 3))
        >>> bool((y.mean((0, 1)).abs() < 1e-5).all()), bool(layer.initialized)
        (True, True)
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.shift = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))

    @torch.no_grad()
    def initialize(self, x: Tensor, padded: Tensor | None = None) -> None:
        """Sets shift and scale so that this batch gets mean 0 and deviation 1 for each feature.

        Args:
            x: (B, T, D).
            padded: (B, T) bool, True at tokens that do not count.
        """
        tokens = x.flatten(0, -2) if padded is None else x[~padded]
        if len(tokens) == 0:
            return  # nothing to learn from; the next batch may have tokens
        if not bool(torch.isfinite(tokens).all()):
            raise ValueError("ActNorm's first batch has entries that are NaN or infinite")
        tokens = tokens.double()
        deviation = tokens.std(0, correction=0)
        deviation = torch.where(deviation > _LEAST_DEVIATION, deviation, 1.0)
        self.shift.copy_(-tokens.mean(0))
        self.log_scale.copy_(-deviation.log())
        self.note()

    def token_map(self, x: Tensor) -> Tensor:
        """(x + b) e^s."""
        return ((x + self.shift) * self.log_scale.exp()).to(x.dtype)

    def token_inverse(self, y: Tensor) -> Tensor:
        """y e^-s - b."""
        return (y * (-self.log_scale).exp() - self.shift).to(y.dtype)

    def token_log_det(self) -> Tensor:
        """The sum of s."""
        return self.log_scale.sum()


@register_bound(ActNorm)
def _(module: ActNorm, ask: Ask) -> Bound:
    module.check_set(ask)
    # As forward has it, rounded to its dtype, and as it is.
    scales = torch.maximum(module.log_scale.exp().double(), module.log_scale.double().exp())
    largest = scales.max() * ROUND_UP**2
    if ask.padded:
        largest = at_least_one(largest)
    theorem = "max exp(s), 1 at padding" if ask.padded else "max exp(s)"
    return Bound(largest, theorem, passage=_passage(module, largest, ask) if ask.follows else None)


def _passage(module: ActNorm, largest: Tensor, ask: Ask) -> Passage:
    """A diagonal matrix, and beside it the identity of padded tokens."""
    own, wide = module.log_scale.exp().double(), module.log_scale.double().exp()
    matrix = torch.diag(own)
    if ask.padded:
        matrix = torch.stack([matrix, torch.eye(module.dim, dtype=own.dtype, device=own.device)])
    # Which of the two forward multiplies by is for autocast to say; exp is off by an ulp or so.
    error = enlarge((own - wide).norm() + 8.0 * UNIT * wide.norm())
    return partial(through, matrix=matrix, known=largest, error=error)
