r"""A module as the function that it is in exact arithmetic, evaluated in float64.

That function multiplies by the weights as they stand after all normalising and rounding in the module's
own dtype (docs/certificates, "The function"). :class:`Wide` tokens find its values without a copy of the
module: they say that they have the dtype of the tokens they stand for, so that whatever is derived from
weights alone is the same to the last bit, and they are float64, so that whatever happens to them happens
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Relative size of the disturbances that show how an evaluation rounds: 16 roundings of float64. Each
# operand of each operation is off by up to it, which is more than the operation's own rounding, and sums
# of many terms err no worse.
DISTURBANCE = 2.0**-49

# Operations that round nothing: what they give is disturbed when it is used.
_MOVES = """
    __get__ __getitem__ cat chunk clone contiguous detach dim expand expand_as flatten flip
    is_floating_point masked_fill movedim new_empty new_full new_ones new_zeros numel ones_like permute
    relu repeat reshape roll select size split squeeze stack stride t transpose tril triu unbind
    unflatten unsqueeze view view_as where zeros_like
"""
_CASTS = "to type_as float double half bfloat16 type"
# What is done to numbers that have left torch is not seen, and may come back rounded.
_LEAVES = "numpy tolist __array__ __dlpack__"
_moves, _casts, _leaves = (frozenset(names.split()) for names in (_MOVES, _CASTS, _LEAVES))


class NotWide(TypeError):
    """Says that wide tokens were written into, or became, a tensor of another precision."""


class Noise:
    """Factors that disturb: one sequence of random numbers, read from another place each time."""

    _PLACES = 4096

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.numbers = torch.empty(0, dtype=torch.float64, device=device)
        self.uses = 0

    def disturb(self, x: Tensor) -> Tensor:
        """x times factors near 1, in float64."""
        x = x.as_subclass(Tensor)
        if not x.numel():
            return x.double()
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
    noise: Noise | None

    @classmethod
    def of(cls, x: Tensor, claim: torch.dtype, noise: Noise | None = None) -> Wide:
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
            if name in _leaves:
                raise NotWide(f"{name} would take float64 tokens out of torch")
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
                    if exact or like.noise is None:
                        return value.as_subclass(Tensor).double()
                    return like.noise.disturb(value)
                if isinstance(value, torch.dtype) and value.is_floating_point:
                    return torch.float64
                if type(value) in (list, tuple):
                    return type(value)(map(operand, value))
                return value

            if name == "rms_norm" and kwargs.get("eps", (*args, None, None)[3]) is None:
                # Its default is that of the precision it is computed in, at least float32.
                computed = torch.promote_types(like.claim, torch.float32)
                args, kwargs = args[:3], {**kwargs, "eps": torch.finfo(computed).eps}
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


def alongside(value: Tensor, x: Tensor) -> Tensor:
    """A tensor that goes with tokens x: as wide as they are."""
    return Wide.of(value.detach().double(), x.claim, x.noise) if isinstance(x, Wide) else value


def plain(x: Tensor) -> Tensor:
    """Tokens as an ordinary tensor: wide ones in float64."""
    return x.as_subclass(Tensor)
