r"""A branch evaluated a second time, in float64 and with every operand disturbed, to tell its rounding.

The function that is inverted is the branch in exact arithmetic, with the weights that it multiplies by
as they stand after all normalising and rounding. :class:`Wide` tokens find its values without a copy of
the branch: they say that they have the dtype of the tokens they stand for, so that whatever is derived
from weights alone is the same to the last bit, and they are float64, so that whatever happens to them
happens in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Relative size of the disturbances: 16 roundings of float64. Each operand of each operation is off by
# up to it, which is more than the operation's own rounding, and sums of many terms err no worse.
DISTURBANCE = 2.0**-49

# Operations that round nothing: what they give is disturbed when it is used.
_MOVES = """
    __get__ __getitem__ cat chunk clone contiguous detach dim expand expand_as flatten flip
    is_floating_point masked_fill movedim new_empty new_full new_ones new_zeros numel ones_like permute
    relu repeat reshape roll select size split squeeze stack stride t transpose tril triu unbind
    unflatten unsqueeze view view_as where zeros_like
"""
_CASTS = "to type_as float double half bfloat16 type"
_moves, _casts = frozenset(_MOVES.split()), frozenset(_CASTS.split())


class NotWide(TypeError):
    """Says that wide tokens were written into, or became, a tensor of another precision."""


class _Noise:
    """Factors that disturb: one sequence of random numbers, read from another place each time."""

    _PLACES = 4096

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.numbers = torch.empty(0, dtype=torch.float64, device=device)
        self.uses = 0

    def disturb(self, x: Tensor) -> Tensor:
        """x times factors near 1, in float64."""
        x = x.as_subclass(Tensor).double()
        if not x.numel():
            return x
        size = x.numel() + self._PLACES
        if len(self.numbers) < size:
            shape, like = (size,), self.numbers
            uniform = torch.rand(shape, generator=self.generator, dtype=like.dtype, device=like.device)
            self.numbers = uniform.sub_(0.5).mul_(2.0 * DISTURBANCE).add_(1.0)
        start = self.uses * 1543 % self._PLACES
        self.uses += 1
        return x * self.numbers[start : start + x.numel()].view(x.shape)


class Wide(Tensor):
    """Tokens in float64 that say they are of another dtype."""

    claim: torch.dtype
    noise: _Noise

    @classmethod
    def of(cls, x: Tensor, claim: torch.dtype, noise: _Noise) -> Wide:
        """x as wide tokens; raises NotWide unless it is float64."""
        if x.is_floating_point() and x.as_subclass(Tensor).dtype != torch.float64:
            raise NotWide(f"an operation on float64 tokens gave {x.dtype}")
        wide: Wide = Tensor._make_subclass(cls, x)
        wide.claim, wide.noise = claim, noise
        return wide

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """What the tokens stand for."""
        return self.claim

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation in float64, with disturbed operands unless it only moves them."""
        name, kwargs = func.__name__, kwargs or {}
        like = _first((*args, *kwargs.values()))
        assert like is not None
        with torch._C.DisableTorchFunctionSubclass():
            if name in _casts:
                return _cast(args[0], like)
            written = kwargs.get("out", args[0] if _writes(name) else None)
            if written is not None and not isinstance(written, Wide):
                raise NotWide(f"{name} would round float64 tokens into a tensor that is given")
            exact = name in _moves

            def operand(value: Any) -> Any:
                if isinstance(value, Tensor):
                    if value is written or not value.is_floating_point():
                        return value
                    return value.as_subclass(Tensor).double() if exact else like.noise.disturb(value)
                if isinstance(value, torch.dtype) and value.is_floating_point:
                    return torch.float64
                if type(value) in (list, tuple):
                    return type(value)(map(operand, value))
                return value

            out = func(*map(operand, args), **{key: operand(value) for key, value in kwargs.items()})

        def wrap(value: Any) -> Any:
            if isinstance(value, Tensor):
                if isinstance(value, Wide) or not value.is_floating_point():
                    return value
                return cls.of(value, like.claim, like.noise)
            return type(value)(map(wrap, value)) if isinstance(value, (list, tuple)) else value

        return wrap(out)


def _first(args: Any) -> Wide | None:
    """The first wide tokens among arguments."""
    for value in args:
        found = _first(value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, Wide):
            return found
    return None


def _writes(name: str) -> bool:
    """Whether a method changes its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")


def _cast(x: Tensor, like: Wide) -> Tensor:
    """Wide tokens stay as they are; other tensors take the dtype that wide ones stand for."""
    return x if isinstance(x, Wide) else x.to(device=like.device, dtype=like.claim)


@torch.no_grad()
def evaluate_widely(branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    """The branch at x in float64, disturbed; None where it cannot be evaluated so.

    Args:
        branch: f, of torch's operations; it was evaluated at x before.
        x: points, in any floating-point dtype.

    Returns:
        f(x) in float64, up to its rounding and the disturbances.
    """
    try:
        out = branch(Wide.of(x.detach().double(), x.dtype, _Noise(x.device)))
    except (TypeError, RuntimeError):
        # It ran in its own precision, so that what fails is the second one: there is no promise then.
        return None
    return out.as_subclass(Tensor) if isinstance(out, Wide) else None


def rounding_of(
    branch: Callable[[Tensor], Tensor], y: Tensor, x: Tensor, image: Tensor, together: int
) -> Tensor:
    r"""How far the computed image y - f(x) may lie from the exact one, entry by entry, estimated.

    Twice what it differs by from a second evaluation in float64. In float64 itself that shows the
    disturbances, larger than its rounding by an order of magnitude, but at random: of few numbers all
    may be small, so that more is allowed for them.

    Args:
        branch: f.
        y: (B, *).
        x: point (B, *).
        image: y - f(x) as computed in their dtype (B, *).
        together: how many tokens are measured together.

    Returns:
        (B, *) in float64; infinite where the branch cannot be evaluated in float64.
    """
    wide = evaluate_widely(branch, x)
    if wide is None:
        return torch.full_like(y, torch.inf, dtype=torch.float64)
    spare = 2.0 if torch.finfo(y.dtype).eps > DISTURBANCE else 2.0 + 6.0 / max(together, 1)
    terms = y.double().abs() + x.double().abs() + image.double().abs()
    gap = spare * (image.double() - (y.double() - wide)).abs() + 2.0**-51 * terms
    return torch.where(torch.isfinite(gap), gap, torch.inf)
