"""How wrappers call the module they hold."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lipformer.certificate import Ask
from lipformer.certificate.torch_rules import DROPOUTS, mixed_axes, parts_of
from lipformer.layers.per_head import per_head


class Call(NamedTuple):
    """Further arguments that are passed with the tokens to every module that takes them.

    Attributes:
        key_padding_mask: (B, N), True at padded tokens, or None.
        head_scale: a factor for each head (H,), or None; see :mod:`lipformer.layers.per_head`.
        context: what the map of tokens depends on besides them, one vector (B, C) for each sample, or
            None.
    """

    key_padding_mask: Tensor | None = None
    head_scale: Tensor | None = None
    context: Tensor | None = None

    def inside(self) -> Call:
        """What goes into a wrapper: factors are for the attention of the chain they were made for."""
        return self._replace(head_scale=None)

    def select(self, index: Tensor | slice) -> Call:
        """The same for the samples of an index (b,)."""
        mask, context = self.key_padding_mask, self.context
        return self._replace(
            key_padding_mask=None if mask is None else mask[index],
            context=None if context is None else context[index],
        )


def context_dim_of(module: nn.Module) -> int | None:
    """C of the contexts (B, C) that some part takes; None if none does.

    A module that takes one has an attribute ``context_dim``, and its forward an argument ``context``.
    """
    dims = (getattr(part, "context_dim", None) for part in module.modules())
    return next((dim for dim in dims if dim is not None), None)


def check_context(module: nn.Module, context: Tensor | None, x: Tensor) -> None:
    """Raises unless a module with an attribute ``context_dim`` gets a context (B, C) for x (B, *).

    With ``context_dim=None`` it takes none.
    """
    dim = getattr(module, "context_dim", None)
    if (context is None) if dim is None else (context is not None and context.shape == (len(x), dim)):
        return
    got = "no context" if context is None else f"context {tuple(context.shape)}"
    takes = f"a context (B, {dim}) with tokens (B, T, D)" if dim is not None else "no context"
    raise ValueError(f"{type(module).__name__} takes {takes}, got {got} with tokens {tuple(x.shape)}")


# inspect.signature takes longer than a small layer; a class keeps its forward.
_accepted: dict[type[nn.Module], frozenset[str]] = {}


def _accepts(cls: type[nn.Module]) -> frozenset[str]:
    if cls not in _accepted:
        _accepted[cls] = frozenset(inspect.signature(cls.forward).parameters)
    return _accepted[cls]


def call_branch(
    module: nn.Module,
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    head_scale: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """Runs a branch on x: the first element of a tuple, with what a :class:`Call` holds passed on.

    Mask and context go to every module whose forward takes them, the factors to every layer that can be
    divided head by head, also inside nn.Sequential. Attention weights are not asked for.
    """
    if type(module).forward is nn.Sequential.forward:
        for part in parts_of(module).values():
            x = call_branch(part, x, key_padding_mask, head_scale, context)
        return x
    rule = None if head_scale is None else per_head.find(module, Ask("l2").refuse)
    if rule is not None:
        return rule.forward(module, x, head_scale, key_padding_mask)
    accepted = _accepts(type(module))
    options: dict[str, object] = {}
    if key_padding_mask is not None:
        # torch's encoders have a name of their own for it.
        for name in ("key_padding_mask", "src_key_padding_mask"):
            if name in accepted:
                options[name] = key_padding_mask
    if context is not None and "context" in accepted:
        options["context"] = context
    if "need_weights" in accepted:
        options["need_weights"] = False
    out = module(x, **options)
    return out[0] if isinstance(out, tuple) else out


def overwrites(module: nn.Module) -> bool:
    """Whether a module writes into the tensor that it is given, as in-place activations do."""
    if getattr(module, "inplace", False) is True:
        return True
    if isinstance(module, nn.Sequential):
        for part in parts_of(module).values():
            if overwrites(part) or not isinstance(part, _PASSING):
                return overwrites(part)
    inner = module._modules.get("module")  # of a wrapper
    return inner is not None and overwrites(inner)


# What may give on the very tensor that it was given.
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Sequential, *DROPOUTS)


def apart(x: Tensor, branch: nn.Module) -> Tensor:
    """x for a branch beside which it is needed again: a copy, if the branch would overwrite it."""
    return x.clone() if overwrites(branch) else x


def one_layout(branch: nn.Module) -> nn.Module:
    """Returns the branch; raises if it takes tokens both as (B, N, D) and as (N, B, D)."""
    mixed = mixed_axes(branch)
    if mixed is not None:
        raise ValueError(f"{mixed}; build attention with batch_first=True")
    return branch


def active_dropout(module: nn.Module) -> dict[str, float]:
    """The parts that are random now, in training mode: their paths and probabilities."""
    found = {}
    for path, part in module.named_modules():
        p = part.p if isinstance(part, _DropoutNd) else getattr(part, "dropout", 0.0)
        if part.training and isinstance(p, (int, float)) and p > 0:
            found[path] = float(p)
    return found
