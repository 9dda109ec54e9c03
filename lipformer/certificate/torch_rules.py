"""Bounds of torch's containers, dropout, norms and Transformer encoder layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from lipformer.certificate.activations import slope_of_function
from lipformer.certificate.bounds import (
    KEPT,
    Ask,
    Bound,
    bound_rules,
    register_bound,
    times,
    weighted_sum,
)
from lipformer.certificate.paths import unchanged
from lipformer.functional.norms import max_abs
from lipformer.functional.rounding import ROUND_UP
from lipformer.functional.tracing import tracing


def token_axes(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """The parts that have an attribute ``batch_first``, with their paths and its value.

    Looked for inside torch's and lipformer's modules, which pass tokens on as they come; a module of
    anyone else may transpose them in between.
    """
    own = getattr(module, "batch_first", None)
    if isinstance(own, bool):
        yield path, module, own
    elif type(module).__module__.partition(".")[0] in ("torch", "lipformer"):
        for name, child in module.named_children():
            yield from token_axes(child, f"{path}.{name}" if path else name)


def mixed_axes(module: nn.Module) -> str | None:
    """What is wrong with a module that works along tokens in one part and along samples in another.

    Returns:
        A sentence that names two such parts, or None.
    """
    found = list(token_axes(module))
    first = next(((path, part) for path, part, batch_first in found if batch_first), None)
    other = next(((path, part) for path, part, batch_first in found if not batch_first), None)
    if first is None or other is None:
        return None
    return (
        f"{first[0]} ({type(first[1]).__name__}) takes tokens as (B, N, D), but {other[0]} "
        f"({type(other[1]).__name__}, batch_first=False) as (N, B, D): one of the two would mix samples"
    )


def _refuse_mixed_axes(module: nn.Module, ask: Ask) -> None:
    mixed = None if ask.in_forward or tracing() else mixed_axes(module)
    if mixed is not None:
        raise ask.refuse(mixed, "attention with batch_first=True")


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that a Sequential runs; unlike named_children(), a module's second use too."""
    return {name: part for name, part in module._modules.items() if part is not None}


@register_bound(nn.Sequential)
def sequential_bound(module: nn.Sequential, ask: Ask) -> Bound:
    """The product of the parts' bounds, or their sum over paths."""
    _refuse_mixed_axes(module, ask)
    rules = (partial(Ask.child, module=child, name=name) for name, child in parts_of(module).items())
    return ask.in_turn(rules, directly=True)


def chain(module: nn.Module, ask: Ask) -> list[nn.Module]:
    """The modules that run one after another, those of a Sequential in its place."""
    if bound_rules.find(module, ask.refuse) is not sequential_bound:
        return [module]
    return [leaf for part in parts_of(module).values() for leaf in chain(part, ask)]


def _dropout_rule(module: nn.Dropout, ask: Ask) -> Bound:
    if module.training and module.p > 0 and not ask.in_forward:
        raise ask.refuse(
            f"dropout with p={module.p} is random in training mode", "model.eval() before certify"
        )
    return Bound(1.0, "identity in eval mode", passage=unchanged if ask.follows else None)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
for _cls in DROPOUTS:
    register_bound(_cls)(_dropout_rule)


def _reshaped(ask: Ask, first: int, dims: int | None) -> Bound:
    """A rearrangement of entries from a dimension on, which leaves so many dimensions."""
    ask.only("l2", "linf", instead="norm='l2', since a reshape may merge tokens")
    ask.along(first)
    return Bound(1.0, "rearrangement of entries", tokens=None, dims=dims)


@register_bound(nn.Flatten)
def _(module: nn.Flatten, ask: Ask) -> Bound:
    if ask.dims is None:
        return _reshaped(ask, module.start_dim, None)
    start, end = (dim % ask.dims for dim in (module.start_dim, module.end_dim))
    return _reshaped(ask, start, ask.dims - max(0, end - start))


@register_bound(nn.Unflatten)
def _(module: nn.Unflatten, ask: Ask) -> Bound:
    if isinstance(module.dim, str):
        raise ask.refuse(f"its dimension has the name {module.dim!r}", "the number of the dimension")
    dims = None if ask.dims is None else ask.dims + len(module.unflattened_size) - 1
    return _reshaped(ask, module.dim, dims)


def norm_layer_bound(module: nn.LayerNorm | nn.RMSNorm | nn.GroupNorm, ask: Ask) -> Bound:
    r"""LayerNorm, RMSNorm and GroupNorm: :math:`\max|\gamma| / \sqrt{\epsilon}`, finite but useless.

    The Jacobian is :math:`\mathrm{diag}(\gamma) / s` times a projection, with
    :math:`s \ge \sqrt{\epsilon}`; in linf that projection has row sums of at most
    :math:`2 + \sqrt d`.
    """
    shape = () if isinstance(module, nn.GroupNorm) else module.normalized_shape
    if len(shape) > 1:
        ask.only("l2", "linf", instead="a norm over the last dimension alone")
        ask.along(-len(shape))
    # RMSNorm without eps takes that of the input's dtype, whatever it will be.
    eps = torch.finfo(torch.float64).eps if module.eps is None else module.eps
    if eps <= 0:
        raise ask.refuse(f"with eps={eps} its slope is unbounded", "lipformer.CenterNorm")
    gamma = 1.0 if module.weight is None else max_abs(module.weight)
    value = gamma / math.sqrt(eps) * ROUND_UP**4
    if ask.norm == "linf":
        value = value * (2.0 + math.sqrt(math.prod(shape)))
    return Bound(value, f"max|gamma| / sqrt(eps), eps={eps:g}")


register_bound(nn.LayerNorm)(norm_layer_bound)
register_bound(nn.RMSNorm)(norm_layer_bound)


@register_bound(nn.GroupNorm)
def _(module: nn.GroupNorm, ask: Ask) -> Bound:
    """As LayerNorm of a sample's groups; in linf it would depend on the number of pixels."""
    ask.only("l2")
    return norm_layer_bound(module, ask)


def _batch_norm_rule(module: nn.BatchNorm1d | nn.BatchNorm2d, ask: Ask) -> Bound:
    if module.training or module.running_var is None:
        raise ask.refuse("it divides by statistics of the batch", "model.eval() with running statistics")
    gamma = 1.0 if module.weight is None else module.weight.double().abs()
    value = max_abs(gamma / (module.running_var.double() + module.eps).sqrt())
    return Bound(value * ROUND_UP**4, "max|gamma| / sqrt(running variance + eps)")


register_bound(nn.BatchNorm1d)(_batch_norm_rule)
register_bound(nn.BatchNorm2d)(_batch_norm_rule)


@register_bound(nn.MultiheadAttention)
def _(module: nn.MultiheadAttention, ask: Ask) -> Bound:
    raise ask.refuse(
        "dot-product attention has no finite Lipschitz constant (Kim et al. 2021)",
        "lipformer.L2MultiheadAttention",
    )


@register_bound(nn.Embedding)
def _(module: nn.Embedding, ask: Ask) -> Bound:
    raise ask.refuse(
        "a lookup of integers has no Lipschitz constant",
        "certify(model, example=ids), a bound in terms of the embedded tokens, or certify the rest of "
        "the model by itself",
    )


@register_bound(nn.TransformerEncoderLayer)
def _(module: nn.TransformerEncoderLayer, ask: Ask) -> Bound:
    slope = slope_of_function(module.activation)
    if slope is not None:
        name = getattr(module.activation, "__name__", "function")
        activation = Bound(slope, "largest slope", path=f"{ask.path}.activation".lstrip("."), kind=name)
    elif isinstance(module.activation, nn.Module):
        activation = ask.child(module.activation, "activation")
    else:
        raise ask.refuse(
            f"no slope is known for activation={module.activation!r}",
            "'relu', 'gelu' or an activation module",
        )
    names = ("self_attn", "dropout1", "linear1", "dropout", "linear2", "dropout2", "norm1", "norm2")
    parts = {name: ask.child(getattr(module, name), name) for name in names}
    for name, part in parts.items():
        if part.tokens != KEPT or part.dims != KEPT:
            raise ask.refuse(f"{name} ({part.kind}) changes the number of tokens", "parts that keep it")
    width = getattr(module.self_attn, "embed_dim", None)
    ends = {name: getattr(module, name) for name in names if name != "linear1"}
    ends["out_proj"] = getattr(module.self_attn, "out_proj", module.self_attn)
    for name, end in ends.items():
        outputs = [leaf.out_features for leaf in chain(end, ask) if hasattr(leaf, "out_features")]
        if outputs and outputs[-1] != width:
            # x + f(x) would broadcast, which has another constant.
            raise ask.refuse(
                f"{name} has {outputs[-1]} outputs for tokens of width {width}", f"{width} outputs"
            )
    attention = times(parts["self_attn"], parts["dropout1"])
    feed_forward = times(
        parts["linear1"],
        activation,
        parts["dropout"],
        parts["linear2"],
        parts["dropout2"],
        theorem="feed-forward",
    )
    blocks = []
    for branch, normed in ((attention, parts["norm1"]), (feed_forward, parts["norm2"])):
        if module.norm_first:
            inner = times(normed, branch)
            blocks.append(weighted_sum((1.0, 1.0), (None, inner), "residual 1 + L"))
        else:
            blocks.append(times(weighted_sum((1.0, 1.0), (None, branch), "residual 1 + L"), normed))
    return times(*blocks)


@register_bound(nn.TransformerEncoder)
def _(module: nn.TransformerEncoder, ask: Ask) -> Bound:
    _refuse_mixed_axes(module, ask)
    parts = {f"layers.{i}": layer for i, layer in enumerate(module.layers)}
    if module.norm is not None:
        parts["norm"] = module.norm
    return ask.in_turn(partial(Ask.child, module=part, name=name) for name, part in parts.items())
