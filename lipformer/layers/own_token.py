r"""Derivatives of each token's output by that token alone, composed as the modules compose.

In a causal (or token-wise) module the Jacobian is block lower triangular in token order, and so is
that of each of its parts. The diagonal blocks of a product are the products of diagonal blocks, those
of a sum the sums: one rule for each class of module pushes tangents (R, B, T, width), R directions for
every token at once, through its own-token blocks :math:`J_{ii}` (docs/theory, section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate.rules import Rules, refuse_hooks
from lipformer.certificate.torch_rules import parts_of
from lipformer.functional.pullback import pull, pull_all
from lipformer.functional.tracing import values_readable
from lipformer.layers.branch import Call, call_branch

_P = TypeVar("_P", bound=Callable[..., "tuple[Tensor, Tensor]"])


class OwnToken(NamedTuple):
    """How tangents go through a class of modules.

    Attributes:
        push: (module, x, tangents, call) -> (module(x), tangents pushed forward).
        parts: the names and modules that it goes through.
        causal: whether this very module is causal, its parts aside.
    """

    push: Callable[..., tuple[Tensor, Tensor]]
    parts: Callable[..., dict[str, nn.Module]]
    causal: Callable[..., bool]


_rules: Rules[OwnToken] = Rules("own-token derivative", "lipformer.layers.register_own_token")


def register_own_token(
    module_class: type[nn.Module],
    *,
    parts: Callable[..., dict[str, nn.Module]] = lambda module: {},
    causal: Callable[..., bool] = lambda module: True,
) -> Callable[[_P], _P]:
    r"""Decorator that registers the own-token derivative of a class for causal log-determinants.

    The rule gets the module, tokens x (B, T, in), tangents u (R, B, T, in) and a :class:`Call`, and
    returns the output (B, T, out) and :math:`J_{ii} u_i` (R, B, T, out).

    Args:
        module_class: the class.
        parts: the modules by name that the rule passes tangents on to with :func:`push_own`.
        causal: whether a module of the class is causal, its parts aside.
    """

    def register(push: _P) -> _P:
        _rules.register(module_class)(OwnToken(push, parts, causal))
        return push

    return register


class _NotServed(Exception):
    pass


def _rule_of(module: nn.Module) -> OwnToken | None:
    """The rule of a module, or None if it is not known to be causal.

    A module that no rule serves may say itself that it treats tokens alone (``token_wise = True``) or
    that no token influences earlier ones (``causal = True``); hooks may make that untrue.
    """
    says: object = module
    try:
        rule = _rules.find(module, _NotServed)
    except _NotServed:
        # A forward of its own: its class has to say what it is. A setting is about the one it replaces.
        rule, says = None, type(module)
    if rule is not None:
        return rule if rule.causal(module) else None
    try:
        refuse_hooks(module, _NotServed)
    except _NotServed:
        return None
    for attribute, push in (("token_wise", push_token_wise), ("causal", push_causal)):
        if getattr(says, attribute, None) is True:
            return OwnToken(push, lambda module: {}, lambda module: True)
    return None


def unknown_parts(module: nn.Module, path: str = "branch") -> Iterator[tuple[str, nn.Module]]:
    """The path and module of each part that is not known to be causal."""
    rule = _rule_of(module)
    if rule is None:
        yield path, module
    else:
        for name, part in rule.parts(module).items():
            yield from unknown_parts(part, f"{path}.{name}")


def push_own(
    module: nn.Module,
    x: Tensor,
    tangents: Tensor,
    key_padding_mask: Tensor | None = None,
    head_scale: Tensor | None = None,
    context: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The module's output and :math:`J_{ii} u_i` for every token i and direction u.

    Args:
        module: causal all the way down (:func:`unknown_parts` is empty).
        x: (B, T, in).
        tangents: u (R, B, T, in).
        key_padding_mask: (B, T) or None.
        head_scale: a factor for each head (see :class:`Call`).
        context: (B, C), likewise.

    Returns:
        (B, T, out) and (R, B, T, out).
    """
    rule = _rule_of(module)
    if rule is None:
        raise ValueError(f"{type(module).__name__} is not known to be causal")
    return rule.push(module, x, tangents, Call(key_padding_mask, head_scale, context))


def _evaluated(module: nn.Module, x: Tensor, call: Call) -> tuple[Tensor, Tensor, bool]:
    """The module's output, the point in its graph, and whether derivatives need a graph of their own.

    Derivatives are taken in reverse mode: differentiated once more, torch's forward mode of LayerNorm
    forgets that mean and deviation depend on x, without a word.
    """
    tracked = torch.is_grad_enabled()
    with torch.enable_grad():
        point = x if tracked and x.requires_grad else x.detach().requires_grad_()
        out = call_branch(module, point, *call.inside())
    return out, point, tracked


def push_elementwise(
    module: nn.Module, x: Tensor, tangents: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """One backward pass: each entry depends on itself alone."""
    out, point, tracked = _evaluated(module, x, call)
    return out, pull(out, point, torch.ones_like(out), create_graph=tracked) * tangents


def push_token_wise(module: nn.Module, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """One backward pass for each output feature serves all tokens: none influences another."""
    out, point, tracked = _evaluated(module, x, call)
    rows = pull_all(out, point, _features(out).expand(-1, *out.shape), create_graph=tracked)
    return out, torch.einsum("obti,rbti->rbto", rows, tangents)


def push_causal(module: nn.Module, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """One backward pass for each output feature of each token.

    The way of last resort, T times the cost of a token-wise module. What the module says of itself is
    checked: later tokens must have no influence. Where values are not read (on a GPU), they give NaN.
    """
    out, point, tracked = _evaluated(module, x, call)
    place = torch.arange(x.shape[1], device=x.device)
    blocks = []
    for i in range(x.shape[1]):
        one_token = (_features(out) * (place == i)[:, None]).expand(-1, *out.shape)
        rows = pull_all(out, point, one_token, create_graph=tracked)
        moved = (rows[:, :, i + 1 :] != 0).any()
        if not values_readable(moved):
            rows = rows.masked_fill(moved, torch.nan)
        elif bool(moved):
            raise ValueError(
                f"{type(module).__name__} says causal=True, but a later token moves its token {i}: "
                "use method 'series', 'roulette' or 'exact'"
            )
        blocks.append(rows[:, :, i])
    return out, torch.einsum("obti,rbti->rbto", torch.stack(blocks, dim=2), tangents)


def _features(out: Tensor) -> Tensor:
    """The unit vectors of the output features, (width, 1, 1, width)."""
    return torch.eye(out.shape[-1], dtype=out.dtype, device=out.device)[:, None, None]


@register_own_token(nn.Linear)
def _(module: nn.Linear, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    weight = module.weight  # read once: it may be derived from the raw one
    return F.linear(x, weight, module.bias), F.linear(tangents, weight)


@register_own_token(nn.Sequential, parts=parts_of)
def _(module: nn.Sequential, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    for part in parts_of(module).values():
        x, tangents = push_own(part, x, tangents, *call)
    return x, tangents
