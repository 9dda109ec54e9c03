"""Dot-product attention of an existing model replaced by L2 attention that starts near it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lipformer.certificate.rules import kind_of
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.attention.null_key import NullKeyAttention
from lipformer.layers.attention.self_attention import SelfAttention
from lipformer.layers.convert.foreign import Parts, known, linear_map
from lipformer.layers.convert.hosts import HostedAttention
from lipformer.layers.convert.start import DotProduct, start_near, start_near_untied

RECORD = "convert_attention"
"""The entry of a Hugging Face config that keeps the options of a conversion."""

# Names under which attention over another sequence is kept.
_CROSS = ("multihead_attn", "cross_attn", "cross_attention", "crossattention", "encoder_attn")
# Arguments of L2MultiheadAttention that each layer gives.
_FIXED = ("embed_dim", "num_heads", "dropout", "bias", "batch_first", "device", "dtype")
_KNOWN = (
    "torch.nn.MultiheadAttention, Hugging Face's attention of BERT, RoBERTa, ELECTRA, DistilBERT, ViT "
    "and GPT-2 type, timm's and x-transformers' Attention"
)


@dataclass(frozen=True)
class Conversion:
    """Report of :func:`convert_attention`: converted layers, and those left with the reason.

    Attributes:
        model: the model, converted.
        converted: the class that each converted layer had, by its path.
        left: why each other attention layer was not converted, by its path.
    """

    model: nn.Module
    converted: Mapping[str, str]
    left: Mapping[str, str]

    def __str__(self) -> str:
        """A table: module path, what became of it."""
        rows = [(path, f"{kind} -> {self._new(path)}") for path, kind in self.converted.items()]
        rows += [(path, f"left: {reason}") for path, reason in self.left.items()]
        width = max(len(path) for path, _ in rows)
        head = f"{len(self.converted)} of {len(rows)} attention layers converted"
        return "\n".join([head, *(f"{path:<{width}}  {what}" for path, what in rows)])

    def _new(self, path: str) -> str:
        """The class of the attention at a path."""
        layer = self.model.get_submodule("" if path == "(all)" else path)
        return type(layer.attention if isinstance(layer, HostedAttention) else layer).__name__


class Site(NamedTuple):
    """A module, its path, and the modules above it, nearest first."""

    path: str
    module: nn.Module
    above: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def convert_attention(model: nn.Module, **kwargs: Any) -> Conversion:
    r"""Replaces the self-attention of a model by L2MultiheadAttention.

    Supported: torch.nn.MultiheadAttention (also in nn.TransformerEncoder), Hugging Face's attention of
    BERT, RoBERTa, ELECTRA, MiniLM, DistilBERT, ViT and GPT-2 type (transformers 5), timm's Attention and
    x-transformers' Attention. The model calls the new layers as it called the old ones, with its masks
    and caches (:mod:`lipformer.layers.convert.hosts`).

    Each head starts as the tied L2 attention closest to its dot-product attention:

    * Its logits are :math:`x_i S x_j^\top / \sqrt d` with :math:`S = W_Q W_K^\top`, those of L2
      attention :math:`2t\,x_i W W^\top x_j^\top` minus a term of the key's norm (and a constant per
      row). W comes from the eigendecomposition of the symmetric part of S, its d largest eigenvalues
      kept: the nearest positive semidefinite matrix of rank d. The antisymmetric part, the negative
      eigenvalues and the biases of query and key have no counterpart and are lost.
    * Values must be linear in the keys, so the head's map :math:`W_V W_O` becomes
      :math:`W M` with the least-squares :math:`M = W^+ W_V W_O`; what is orthogonal to W is lost.
    * The bias of the values passes through attention unchanged and joins the output's bias.

    With ``null_key=True`` all weights are kept, with :math:`t = s/2` for the logits
    :math:`s\,q_i \cdot k_j`; the norm of the keys in the logits and the null key are new.

    The result is a starting point for fine-tuning, not the same function. Where a model calls the
    attention with two different sequences, the new layer raises ValueError.

    Args:
        model: any module; it is changed in place (unless it is itself an attention layer). Not
            converted: cross-attention, layers that add extra keys, normalise queries or have positions
            in their logits, layers with hooks, and unsupported classes.
        kwargs: options of L2MultiheadAttention, such as causal or positions. Or ``null_key=True``: each
            layer becomes a :class:`NullKeyAttention`, with its options, which keeps the four
            matrices, starts several times closer to the original and has a larger bound.

    Returns:
        The model and a list of the conversions; it prints as a table. Each layer keeps its device,
        dtype, dropout and mode.

    Raises:
        ValueError: nothing can be converted; lists what was found.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> print(convert_attention(layer))
        1 of 1 attention layers converted
        self_attn  MultiheadAttention -> L2MultiheadAttention
        >>> type(layer.self_attn).__name__
        'L2MultiheadAttention'
    """
    return replace_attention(model, kwargs)


def replace_attention(model: nn.Module, options: Mapping[str, Any], start: bool = True) -> Conversion:
    """:func:`convert_attention`, if not ``start`` with fresh weights, to be loaded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_attention takes a torch.nn.Module, got {type(model).__name__}")
    fixed = [name for name in _FIXED if name in options]
    if fixed:
        raise ValueError(f"{', '.join(fixed)} is taken from each layer and cannot be given")
    done: dict[nn.Module, tuple[Parts, nn.Module]] = {}
    before = {path or "(all)": part for path, part in model.named_modules() if _is_converted(part)}
    sites, left = {}, {}
    for site in attention_sites(model):
        path, layer = site.path or "(all)", site.module
        try:
            if layer not in done:
                parts = attention_parts(site)
                done[layer] = parts, _converted(layer, parts, options, start)
            sites[path] = site
        except Left as reason:
            left[path] = str(reason)
    if not sites:
        hosted = {part.attention for part in before.values() if isinstance(part, HostedAttention)}
        paths = [path for path, part in before.items() if part not in hosted]
        if paths and not left:
            some = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
            raise ValueError(f"{kind_of(model)} is already converted: {len(paths)} layers ({some})")
        listed = "".join(f"\n  {path}: {reason}" for path, reason in left.items())
        raise ValueError(
            f"no attention of {kind_of(model)} can be converted; known are {_KNOWN}; found "
            f"{'these:' + listed if left else 'no module that is called attention'}"
        )
    for site in sites.values():
        parts, new = done[site.module]
        if site.above:
            site.above[0]._modules[site.name] = new
        else:
            model = new
        if parts.outside is not None:
            holder, name = parts.outside
            holder._modules[name] = nn.Identity()
    _note(model, options, {*before.values()})
    return Conversion(model, {path: kind_of(site.module) for path, site in sites.items()}, left)


def _note(model: nn.Module, options: Mapping[str, Any], before: set[nn.Module]) -> None:
    """Keeps the options in the model's Hugging Face config, for load_converted to build it by.

    In a copy of it: other models may be built by the config that was given. Beside layers that were
    converted ``before``, by options that may be others, it keeps None: these alone do not build it.
    """
    holders: dict[int, list[nn.Module]] = {}
    for part in model.modules():
        if hasattr(vars(part).get("config"), "to_dict"):
            holders.setdefault(id(part.config), []).append(part)
    for parts in holders.values():
        inside = {layer for part in parts for layer in part.modules() if _is_converted(layer)}
        if inside - before:
            own: Any = copy.deepcopy(parts[0].config)
            setattr(own, RECORD, None if inside & before else dict(options))
            for part in parts:
                part.config = own


def _is_converted(part: nn.Module) -> bool:
    """Whether it is a converted layer, or what hosts one."""
    return isinstance(part, (SelfAttention, HostedAttention))


class Left(Exception):
    """Why a layer is left as it is."""


def attention_sites(model: nn.Module) -> Iterator[Site]:
    """Every module known as attention, or called so and made of none; each use of a shared one."""
    sites = [*_walk(Site("", model, ()))]
    for i, site in enumerate(sites):
        inside = f"{site.path}." if site.path else ""
        nested = any(other.path.startswith(inside) for other in sites[i + 1 :])
        nested = nested or any(map(_is_converted, site.module.modules()))
        if known(site.module) is not None or not nested:
            yield site


def _walk(site: Site) -> Iterator[Site]:
    if _is_converted(site.module):
        return
    if known(site.module) is not None or "attention" in type(site.module).__name__.lower():
        yield site
    if known(site.module) is None:
        for name, child in site.module._modules.items():
            if child is not None:
                path = f"{site.path}.{name}".lstrip(".")
                yield from _walk(Site(path, child, (site.module, *site.above)))


def attention_parts(site: Site) -> Parts:
    """The parts of an attention layer; ``Left`` if it cannot be converted."""
    layer, read = site.module, known(site.module)
    if site.name in _CROSS or "cross" in type(layer).__name__.lower():
        raise Left("cross-attention")
    if read is None:
        raise Left(f"{type(layer).__module__}.{type(layer).__name__} is not known")
    for part in layer.modules():
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        # Those of transformers record what passes, and no more.
        if any(not (h.__module__ or "").startswith("transformers.") for h in hooks):
            raise Left("it has hooks, which would be lost")
        if "forward" in vars(part):
            raise Left("its forward was replaced on the instance")
    try:
        parts = read(layer, site.above)
        weights = [linear_map(linear)[0] for linear in (*parts.qkv, parts.out)]
    except ValueError as reason:
        raise Left(str(reason)) from reason
    width, out = weights[0].shape[0], weights[-1].shape[1]
    if width % parts.heads or out != width or any(w.shape[0] != width for w in weights[:-1]):
        raise Left(f"it maps {width} features to {out} with {parts.heads} heads")
    return parts


@torch.no_grad()
def _converted(layer: nn.Module, parts: Parts, options: Mapping[str, Any], start: bool) -> nn.Module:
    """What takes the place of a layer."""
    maps = [linear_map(linear) for linear in parts.qkv]
    weights, biases = [w for w, _ in maps], [b for _, b in maps]
    if len(maps) == 1:
        weights = [*weights[0].chunk(3, -1)]
        biases = [None] * 3 if biases[0] is None else [*biases[0].chunk(3)]
    out, bias = linear_map(parts.out)
    chosen = dict(options)
    kind: Any = NullKeyAttention if chosen.pop("null_key", False) else L2MultiheadAttention
    if kind is NullKeyAttention and any(weight.shape != out.shape for weight in weights):
        raise Left(f"its heads are of another width than {out.shape[1] // parts.heads}")
    if parts.causal is not None:
        chosen.setdefault("causal", parts.causal)
    # Biases of queries and keys have no counterpart in tied attention.
    kept = (biases[2], bias) if kind is L2MultiheadAttention else (*biases, bias)
    new = kind(
        out.shape[1],
        parts.heads,
        parts.dropout,
        bias=any(b is not None for b in kept),
        batch_first=parts.host is not None or bool(getattr(layer, "batch_first", False)),
        device=out.device,
        dtype=out.dtype,
        **chosen,
    )
    if start:
        q, k, v = (weight.unflatten(1, (parts.heads, -1)).transpose(0, 1) for weight in weights)
        o = out.unflatten(0, (parts.heads, -1))
        given = DotProduct(q, k, v, o, biases[0], biases[1], biases[2], bias, parts.scale)
        (start_near if kind is L2MultiheadAttention else start_near_untied)(new, given)
    new.requires_grad_(out.requires_grad)
    if parts.host is None:
        return new.train(layer.training)
    index = getattr(layer, "layer_idx", None)
    return parts.host(new, parts.causal, parts.after, index).train(layer.training)
