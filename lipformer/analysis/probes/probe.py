"""The attention layers of a model with the tokens that enter them, checked on their own outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.analysis.inputs import check_finite
from lipformer.analysis.maps import Heads, attention_maps
from lipformer.analysis.probes.sites import (
    SUPPORTED,
    Site,
    find_sites,
    heads_of,
    logit_bias,
    unsupported,
)
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.models import LanguageModel

TOLERANCE = 1e-3
"""Largest relative difference that the check may leave; where rounding hides more, float64 decides."""

_WIDE_TOLERANCE = 1e-4
"""In float64: for layers that keep parts of their own (a softmax, angles) in float32."""

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class AttentionProbe:
    """The attention of one layer of a model as a function of its tokens, at one sequence.

    Calling it gives the layer's pure attention of other tokens (N, D): no residual, no normalisation,
    no dropout, with the mask of the layer's own call.

    Attributes:
        name: path of the layer in the model; from the second call of a shared layer on with ``#2``...
        index: 0, 1, ... in the order in which the model calls its layers.
        tokens: what entered the layer, (N, D), detached.
        attention: the pure attention as a function of its tokens.
        bias: added to its logits, broadcastable to (H, N, N), -inf where i may not see j; or None.
    """

    name: str
    index: int
    tokens: Tensor
    attention: Heads | AttentionMaps
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The pure attention of tokens x: (*, N, D) -> (*, N, E)."""
        return self.attention(x, self.bias)

    @property
    def mask(self) -> Tensor | None:
        """`bias` as a bool mask (1, N, N), True where i may see j."""
        return None if self.bias is None else self.bias == 0

    def maps(self) -> AttentionMaps | None:
        """The layer as `AttentionMaps`, to be used with `mask`.

        None where there are none: logits that depend on positions (ALiBi, rotary, any other float bias),
        normalised queries or keys, or a mask of its own for each head.
        """
        if isinstance(self.attention, Heads) and not self.attention.bilinear:
            return None
        if self.bias is not None and not _plain_mask(self.bias):
            return None
        return attention_maps(self.attention)

    def attention_maps(self) -> AttentionMaps:
        """`maps` for functions that take a layer, such as `ball_bound`.

        Raises:
            ValueError: where there are none, or the call had a mask other than causality, which maps
                alone would forget.
        """
        maps, mask = self.maps(), self.mask
        if maps is None:
            raise ValueError(
                f"{self.name} has no AttentionMaps: its logits depend on positions, normalise their "
                "queries and keys or differ in masks"
            )
        if mask is None or bool(mask.all()):
            return maps
        seen = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
        if maps.causal and bool((mask | ~seen).all()):
            return maps
        if bool((mask == seen).all()):
            return dataclasses.replace(maps, causal=True)
        raise ValueError(
            f"{self.name} was called with a mask: give probe.maps(), and mask=probe.mask where there is "
            "such an argument (any_mask=True for ball_bound)"
        )


def _plain_mask(bias: Tensor) -> bool:
    """Whether a bias is 0 or -inf everywhere, the same for all heads."""
    return bias.shape[0] == 1 and bool(((bias == 0) | (bias == -torch.inf)).all())


def probe_attention(
    model: nn.Module,
    tokens: Tensor,
    *,
    output_projection: bool = True,
    forward: Callable[[Tensor], Any] | None = None,
) -> list[AttentionProbe]:
    """Returns every self-attention layer of a model with its input tokens.

    The model runs once on the sequence, in evaluation mode and without gradient. For each layer the
    extracted attention is compared with the layer's own output on its own input, constants taken off,
    to one in a thousand at least; where rounding hides more (half precision, large biases) the layer is
    called once more with its weights in float64. What differs raises. The model is left as it was.

    Args:
        model: a `torch.nn.MultiheadAttention`, `torch.nn.TransformerEncoder`, a
            `lipformer.LanguageModel` of dot-product type, a Hugging Face model of BERT, DistilBERT,
            GPT-2 or Llama type, or any module that has such layers inside.
        tokens: one sequence without padding: ids (N,), or embedded tokens (N, D).
        output_projection: whether attention includes the layer's output projection. Without it the
            heads are concatenated.
        forward: calls the model on a batch of one, (1, N) or (1, N, D), where ``model(batch)`` is not
            the way (a mask to give, another name of the argument).

    Returns:
        The probes in the order in which the layers are called, in the model's dtype, float32 at least.

    Raises:
        ValueError: if the model has no attention that is known here, calls none of it with one sequence
            as query, key and value, or a layer computes something else than what was read from it.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
        >>> probe, = probe_attention(layer, torch.randn(5, 8))
        >>> probe.name, probe(probe.tokens).shape
        ('self_attn', torch.Size([5, 8]))
    """
    if tokens.ndim != (2 if tokens.is_floating_point() else 1) or tokens.numel() == 0:
        raise ValueError(
            "tokens must be ids (N,) or embedded tokens (N, D) of one sequence, got "
            f"{tokens.dtype} {tuple(tokens.shape)}"
        )
    check_finite(tokens, "tokens")
    sites = find_sites(model)
    if not sites:
        named = ", ".join(unsupported(model)) or "no module with a name like attention"
        raise ValueError(
            f"no known attention in {type(model).__name__} (it has: {named}). Known: {SUPPORTED}"
        )
    calls: list[_Call] = []
    with _as_it_was(model), _hooks(sites, calls), torch.no_grad():
        (forward or _default_forward(model, tokens))(tokens[None])
    probes: list[AttentionProbe] = []
    left, seen = [], dict.fromkeys((site.name for site in sites), 0)
    for call in calls:
        seen[call.site.name] += 1
        count = seen[call.site.name]
        name = call.site.name if count == 1 else f"{call.site.name}#{count}"
        if call.crosses():
            left.append(name)
            continue
        probe = _probe(call, name, len(probes))
        if not output_projection:
            if not isinstance(probe.attention, Heads):
                raise ValueError(f"{name} gives AttentionMaps alone: output_projection must be True")
            probe = dataclasses.replace(probe, attention=probe.attention.without_projection())
        probes.append(probe)
    left += [name for name, count in seen.items() if not count]
    if not probes:
        raise ValueError(f"{type(model).__name__} made no call of self-attention; left out: {left}")
    if left:
        warnings.warn(f"left out, not called as self-attention: {', '.join(left)}", stacklevel=2)
    return probes


@dataclass
class _Call:
    """What the hooks saw of one call of a layer."""

    site: Site
    arguments: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None

    def crosses(self) -> bool:
        """Whether keys or values came from another sequence than queries."""
        given = self.arguments
        if given.get("encoder_hidden_states") is not None:
            return True
        if not isinstance(self.site.module, nn.MultiheadAttention):
            return False
        query, key, value = given["query"], given["key"], given["value"]
        return not all(other is query or _same(other, query) for other in (key, value))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))


def _default_forward(model: nn.Module, tokens: Tensor) -> Callable[[Tensor], Any]:
    """How a model takes a batch (1, N) of ids or (1, N, D) of embedded tokens."""
    if isinstance(model, nn.MultiheadAttention):
        return lambda x: model(*[x if model.batch_first else x.transpose(0, 1)] * 3)
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        layers = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        first = all(layer.batch_first for layer in layers)
        return lambda x: model(x if first else x.transpose(0, 1))
    if tokens.is_floating_point():
        if isinstance(model, LanguageModel):
            return model.hidden
        if "inputs_embeds" in inspect.signature(model.forward).parameters:
            return lambda x: model(inputs_embeds=x)
    return model


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no fused encoder layers (they pass the hooks by); afterwards as before."""
    training = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def _hooks(sites: list[Site], calls: list[_Call]) -> Iterator[None]:
    """Appends every call of the sites to `calls`, with its arguments by name and its result."""

    def watch(site: Site) -> list[Any]:
        signature = inspect.signature(site.module.forward)

        def called(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = dict(signature.bind_partial(*args, **kwargs).arguments)
            more = given.pop("kwargs", {})
            calls.append(_Call(site, {**given, **more}, args, kwargs, output))

        def resulted(module: nn.Module, args: Any, output: Any) -> None:
            calls[-1].result = output

        handles = [site.module.register_forward_hook(called, with_kwargs=True)]
        if site.result is not site.module:
            handles.append(site.result.register_forward_hook(resulted))
        return handles

    handles: list[Any] = []
    try:
        for site in sites:
            handles += watch(site)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _probe(call: _Call, name: str, index: int) -> AttentionProbe:
    """The layer of a call, checked on its own input and output."""
    first = next(iter(call.arguments.values()))
    x, expected = _sequence(call, name, first), _sequence(call, name, _tensor(call.result))
    work = torch.promote_types(x.dtype, torch.float32)
    made = heads_of(call.site, x.shape[0], call.arguments).each(Tensor.detach)
    attention, bias = made, None
    if isinstance(made, Heads):
        attention = made.to(work)
        bias = logit_bias(call.site, made.query.shape[0], x.shape[0], call.arguments)
    # Maps stay in float64: bounds are those of them, and a call converts them to its tokens' dtype.
    probe = AttentionProbe(name, index, x.to(work), attention, bias)
    _check_probe(call, probe, made.to(torch.float64), expected)
    return probe


@torch.no_grad()
def _check_probe(
    call: _Call, probe: AttentionProbe, made: Heads | AttentionMaps, expected: Tensor
) -> None:
    """ValueError unless a probe is what its layer computes in its own precision, else in float64."""
    wide = AttentionProbe(probe.name, probe.index, probe.tokens.double(), made, probe.bias)
    found = wide(wide.tokens)
    constant = torch.zeros_like(found[0]) if made.constant is None else made.constant
    size = made.largest_logit(wide.tokens)
    if agrees(found, expected.double(), constant, size, torch.finfo(expected.dtype).eps):
        return
    title = f"{probe.name} ({type(call.site.module).__name__})"
    try:
        with _as_it_was(call.site.module):
            again = in_float64(call.site.module, call.site.result, call.args, call.kwargs)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{title} in {expected.dtype} must be checked in float64, where it fails: {error}"
        ) from error
    exact = _sequence(call, probe.name, _tensor(again)).double()
    if not agrees(found, exact, constant, size, torch.finfo(torch.float64).eps):
        raise ValueError(
            f"{title} computes something else than the attention read from its weights: difference "
            f"{float((found - exact).norm()):.1e} beside {float((found - constant).norm()):.1e}, the "
            "norm of what depends on tokens. Positions inside its logits, adapters or hooks are not "
            "known here"
        )


def _sequence(call: _Call, name: str, x: Tensor) -> Tensor:
    """(N, D) of the one sequence of a call."""
    x = x.detach()
    if x.ndim == 3:
        seq_first = (
            isinstance(call.site.module, nn.MultiheadAttention) and not call.site.module.batch_first
        )
        x = x.transpose(0, 1) if seq_first else x
    elif x.ndim == 2:
        x = x[None]
    if x.ndim != 3 or len(x) != 1:
        raise ValueError(f"{name} must be called on one sequence (1, N, D), got {tuple(x.shape)}")
    return x[0]


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def agrees(found: Tensor, expected: Tensor, constant: Tensor, size: float, eps: float) -> bool:
    """Whether two results (N, E) in float64 agree to rounding in a precision; not if it hides too much.

    Constants are taken off both sides: a large bias would hide any difference of what depends on tokens.

    Args:
        found: what the extracted attention gives, exact.
        expected: the layer's own.
        constant: what of it does not depend on tokens, (E,).
        size: that of the logits, which rounding errors grow with.
        eps: of the precision.
    """
    part = found - constant
    scale = float(part.norm())
    allowed = 32 * eps * ((1 + size) * scale + float(constant.norm()) * math.sqrt(len(part)))
    if eps <= torch.finfo(torch.float64).eps:
        allowed += _WIDE_TOLERANCE * scale
    elif allowed > TOLERANCE * scale:
        return False
    return float((found - expected).norm()) <= allowed


def in_float64(
    module: nn.Module, result: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What a call of a layer gives with its weights and arguments in float64; hooks run as in the call.

    Args:
        module: the layer, in evaluation mode.
        result: the module that projects its output, or the layer itself.
        args: of the call; None in the place of caches and other objects.
        kwargs: likewise.
    """
    named = {name: _wide(value) for name, value in kwargs.items()}
    output = torch.func.functional_call(module, _weights(module), tuple(map(_wide, args)), named)
    if result is module:
        return output
    mixed = output[0] if isinstance(output, (tuple, list)) else output
    return torch.func.functional_call(result, _weights(result), (mixed,))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: t.detach().double() for name, t in tensors if t.is_floating_point()}


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(_wide, value))
    return value if isinstance(value, _PLAIN) else None
