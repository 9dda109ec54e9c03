r"""Derivatives of each token's output by that token alone, composed as the modules compose.

In a causal (or token-wise) branch the Jacobian is block lower triangular in token order, and so is
that of each of its parts. The diagonal blocks of a product are the products of diagonal blocks, those
of a sum the sums: one rule for each class of module pushes tangents (R, B, T, width), R directions for
every token at once, through its own-token blocks :math:`J_{ii}` (docs/theory, section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.flows.log_det.pullback import pull, pull_all
from lipformer.functional.attention.checks import values_readable
from lipformer.layers import (
    BallProjection,
    CenterNorm,
    Contractive,
    ConvexResidual,
    L2MultiheadAttention,
    LipSwish,
    MaxMin,
    Residual,
)
from lipformer.layers.attention.own_token import push_attention
from lipformer.layers.baking import FirstOutput, Scaled, round_down
from lipformer.layers.branch import call_branch
from lipformer.layers.residual import same_shape

Push = Callable[..., tuple[Tensor, Tensor]]


class _Rule(NamedTuple):
    """How tangents go through a class of modules.

    push: (module, x, tangents, padding) -> (module(x), tangents pushed forward).
    parts: the names and modules that it goes through.
    applies: whether this very module is causal, its parts aside.
    """

    push: Push
    parts: Callable[..., dict[str, nn.Module]] = lambda module: {}
    applies: Callable[..., bool] = lambda module: True


_rules: dict[type[nn.Module], _Rule] = {}


def own_rule(module_class: type[nn.Module], rule: _Rule) -> None:
    """Teaches the recursion a class; subclasses that keep its forward are served too."""
    _rules[module_class] = rule


def _rule_of(module: nn.Module) -> _Rule | None:
    """The rule of a module, or None if it is not known to be causal.

    A module of a class without a rule may say itself that it treats tokens alone (``token_wise = True``)
    or that no token influences earlier ones (``causal = True``).
    """
    for cls in type(module).__mro__:
        rule = _rules.get(cls)
        if rule is not None:
            kept = type(module).forward is cls.forward  # type: ignore[attr-defined]
            if kept:
                return rule if rule.applies(module) else None
            break  # a forward of its own: it has to say itself what it is
    if getattr(module, "token_wise", None) is True:
        return _Rule(_push_token_wise)
    if getattr(module, "causal", None) is True:
        return _Rule(_push_causal)
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
    module: nn.Module, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The module's output and :math:`J_{ii} u_i` for every token i and direction u.

    Args:
        module: causal all the way down (:func:`unknown_parts` is empty).
        x: (B, T, in).
        tangents: u (R, B, T, in).
        padding: (B, T) or None.

    Returns:
        (B, T, out) and (R, B, T, out).
    """
    rule = _rule_of(module)
    if rule is None:
        raise ValueError(f"{type(module).__name__} is not known to be causal")
    return rule.push(module, x, tangents, padding)


def _push_linear(
    module: nn.Linear, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    weight = module.weight  # read once: it may be derived from the raw one
    return F.linear(x, weight, module.bias), F.linear(tangents, weight)


def _evaluated(module: nn.Module, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """The module's output, the point in its graph, and whether derivatives need a graph of their own.

    Derivatives are taken in reverse mode: differentiated once more, torch's forward mode of LayerNorm
    forgets that mean and deviation depend on x, without a word.
    """
    tracked = torch.is_grad_enabled()
    with torch.enable_grad():
        point = x if tracked and x.requires_grad else x.detach().requires_grad_()
        out = call_branch(module, point, padding)
    return out, point, tracked


def _push_elementwise(
    module: nn.Module, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, point, tracked = _evaluated(module, x, padding)
    return out, pull(out, point, torch.ones_like(out), create_graph=tracked) * tangents


def _push_token_wise(
    module: nn.Module, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One backward pass for each output feature serves all tokens: none influences another."""
    out, point, tracked = _evaluated(module, x, padding)
    rows = pull_all(out, point, _features(out).expand(-1, *out.shape), create_graph=tracked)
    return out, torch.einsum("obti,rbti->rbto", rows, tangents)


def _push_causal(
    module: nn.Module, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One backward pass for each output feature of each token.

    The way of last resort, T times the cost of a token-wise module. What the module says of itself is
    checked: later tokens must have no influence. Where values are not read (on a GPU), they give NaN.
    """
    out, point, tracked = _evaluated(module, x, padding)
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


def _push_max_min(
    module: MaxMin, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A permutation of each pair of features, the identity where the two are equal."""
    a, b = x.detach().chunk(2, dim=-1)
    kept = (a >= b).to(x.dtype)
    first, second = tangents.chunk(2, dim=-1)
    larger, smaller = kept * first + (1 - kept) * second, (1 - kept) * first + kept * second
    return module(x), torch.cat([larger, smaller], dim=-1)


def _push_sequential(
    module: nn.Sequential, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    for part in _children(module).values():
        x, tangents = push_own(part, x, tangents, padding)
    return x, tangents


def _children(module: nn.Sequential) -> dict[str, nn.Module]:
    # Not named_children(), which leaves out a module's second use.
    return {name: part for name, part in module._modules.items() if part is not None}


def _push_residual(
    module: Residual, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, pushed = push_own(module.branch, x, tangents, padding)
    return x + same_shape(x, out), tangents + pushed


def _push_convex(
    module: ConvexResidual, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    a = module.weight
    out, pushed = push_own(module.branch, x, tangents, padding)
    return (1.0 - a) * x + a * same_shape(x, out), (1.0 - a) * tangents + a * pushed


def _push_contractive(
    module: Contractive, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    scales = module.scales()
    if isinstance(module.module, L2MultiheadAttention):
        return push_attention(module.module, x, tangents, padding, scales, scales.mean())
    if module.seq_len is not None and x.shape[-2] > module.seq_len:
        raise ValueError(f"seq_len is {module.seq_len}, got shape {tuple(x.shape)}")
    out, pushed = push_own(module.module, x, tangents, padding)
    scale = round_down(scales, out.dtype)
    return out * scale, pushed * scale


def _push_scaled(
    module: Scaled, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, pushed = push_own(module.module, x, tangents, padding)
    factor = round_down(module.factor, out.dtype)
    return out * factor, pushed * factor


def _push_inner(
    module: FirstOutput, x: Tensor, tangents: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    return push_own(module.module, x, tangents, padding)


own_rule(nn.Linear, _Rule(_push_linear))
own_rule(nn.Sequential, _Rule(_push_sequential, parts=_children))
own_rule(Residual, _Rule(_push_residual, parts=lambda module: {"branch": module.branch}))
own_rule(ConvexResidual, _Rule(_push_convex, parts=lambda module: {"branch": module.branch}))
own_rule(Scaled, _Rule(_push_scaled, parts=lambda module: {"module": module.module}))
own_rule(FirstOutput, _Rule(_push_inner, parts=lambda module: {"module": module.module}))
own_rule(Contractive, _Rule(_push_contractive, parts=lambda module: {"module": module.module}))
own_rule(L2MultiheadAttention, _Rule(push_attention, applies=lambda module: module.causal is True))
own_rule(MaxMin, _Rule(_push_max_min))
own_rule(CenterNorm, _Rule(_push_token_wise))
own_rule(BallProjection, _Rule(_push_token_wise))
own_rule(nn.LayerNorm, _Rule(_push_token_wise, applies=lambda module: len(module.normalized_shape) == 1))
own_rule(nn.RMSNorm, _Rule(_push_token_wise, applies=lambda module: len(module.normalized_shape) == 1))
own_rule(nn.Softmax, _Rule(_push_token_wise, applies=lambda module: module.dim == -1))
for _class in (
    *(LipSwish, nn.Identity, nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.Tanhshrink, nn.Softsign),
    *(nn.Softplus, nn.LogSigmoid, nn.Softshrink, nn.Sigmoid, nn.Hardsigmoid, nn.Hardswish, nn.SiLU),
    *(nn.Mish, nn.SELU, nn.GELU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),  # off: checked before
):
    own_rule(_class, _Rule(_push_elementwise))
