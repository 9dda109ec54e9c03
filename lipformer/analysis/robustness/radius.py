"""Radii within which no perturbation of an image changes what a classifier says."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lipformer.analysis.inputs import check_samples, radii
from lipformer.analysis.robustness.lofast import Modulus
from lipformer.analysis.robustness.perturbation import modulus_of, tokens_for
from lipformer.certificate import Ask
from lipformer.certificate.rules import check_forward, kind_of, methods_behind, refuse_hooks
from lipformer.certificate.torch_rules import chain
from lipformer.functional.rounding import enlarge
from lipformer.functional.wide import plain
from lipformer.layers.scaled import Scaled

_DOUBT = 1e-9
"""Part of the largest logit that margins must exceed: for the rounding of a forward pass in float64."""


@torch.no_grad()
def certified_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    max_radius: float = 10.0,
    tol: float = 1e-3,
    batch_size: int = 128,
) -> Tensor:
    r"""A radius for each image within which the model's answer is certified to be the label.

    With the bound :math:`\delta(\epsilon)` of how far the last hidden vector h can move
    (:func:`perturbation_bound`) and logits :math:`f_j = \langle w_j, h\rangle + b_j`, the answer y
    stands if for all j

    .. math:: f_y - f_j > \min\{ \|w_y - w_j\|\,\delta(\epsilon),\; \sqrt2\, \delta_f(\epsilon) \},

    where :math:`\delta_f` bounds the logits; without a linear last layer only the second is used. The
    bounds grow with :math:`\epsilon`, so that bisection finds the largest radius, from below.

    The model is copied to float64 and the certificate is one for exact arithmetic with the weights that
    it multiplies by in its own dtype, as that of :func:`lipformer.certify`; margins must exceed their
    bound by 1e-9 of the largest logit, far more than the rounding of a forward pass in float64. A
    forward pass in float32 or less may give another answer where two logits are as close as its own
    rounding.

    Args:
        model: an ``nn.Sequential``, or a module with one as ``body`` that computes the same; in eval
            mode or without dropout. Its last module should be a linear layer, or one times a number.
            Dot-product attention is ``lipformer.models.DotProductSelfAttention`` there, by itself or in
            ``lf.Residual``, ``lf.ConvexResidual``; ``nn.TransformerEncoder`` is not followed.
        x: images, (B, *), or whatever the model takes; the radius is in their l2 norm.
        y: labels, (B,), integers.
        max_radius: where the search ends; larger radii are returned as this.
        tol: how far the radius may be below the largest that these bounds certify.
        batch_size: images at a time, which limits memory.

    Returns:
        (B,) in float64; 0 where the model's answer is not the label.

    Raises:
        NotCertifiable: the model has a module without bounds.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
        >>> model[1].weight = nn.Parameter(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> certified_radius(model, torch.tensor([[0.5, 3.0]]), torch.tensor([0])).item()
        0.499
    """
    if not (tol > 0 and 0 < max_radius < math.inf):
        raise ValueError(
            f"max_radius must be positive and finite, tol positive, got {max_radius} and {tol}"
        )
    found = []
    for test, part in _tests(model, x, y, batch_size):
        low = torch.zeros(len(part), dtype=torch.float64, device=part.device)
        high = torch.full_like(low, max_radius)
        low = torch.where(test(high), high, low)
        for _ in range(max(0, math.ceil(math.log2(max_radius / tol)))):
            middle = (low + high) / 2
            stands = test(middle)
            low, high = torch.where(stands, middle, low), torch.where(stands, high, middle)
        found.append(low)
    return torch.cat(found) if found else x.new_zeros(0, dtype=torch.float64)


@torch.no_grad()
def is_certified(
    model: nn.Module, x: Tensor, y: Tensor, eps: float | Tensor, *, batch_size: int = 128
) -> Tensor:
    """Whether the model's answer is certified to be the label within eps, (B,) bool.

    Args:
        model: as for :func:`certified_radius`.
        x: images, (B, *).
        y: labels, (B,).
        eps: l2 radius, a number or (B,).
        batch_size: images at a time.
    """
    radius = radii(eps, x.shape[:1], x.device, "eps")
    found: list[Tensor] = []
    for test, part in _tests(model, x, y, batch_size):
        first = sum(map(len, found))
        found.append(test(radius[first : first + len(part)]))
    return torch.cat(found) if found else x.new_zeros(0, dtype=torch.bool)


@torch.no_grad()
def certified_accuracy(
    model: nn.Module, x: Tensor, y: Tensor, eps: Sequence[float], *, batch_size: int = 128
) -> list[float]:
    """The share of images whose label is certified within each radius; at 0 the clean accuracy.

    Args:
        model: as for :func:`certified_radius`.
        x: images, (B, *), at least one.
        y: labels, (B,).
        eps: l2 radii.
        batch_size: images at a time.

    Returns:
        one share for each radius.
    """
    levels = [radii(level, x.shape[:1], x.device, "eps") for level in eps]
    totals = [0] * len(levels)
    for test, part in _tests(model, x, y, batch_size):
        for i, level in enumerate(levels):
            totals[i] += int(test(level[: len(part)]).sum())
    return [total / len(x) for total in totals]


def _tests(
    model: nn.Module, x: Tensor, y: Tensor, batch_size: int
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """For each batch the test of radii (B,) -> (B,) bool, and its labels."""
    check_samples(x)
    if y.shape != x.shape[:1] or y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(
            f"y must be integer labels of shape ({len(x)},), got {y.dtype} {tuple(y.shape)}"
        )
    if len(x) == 0:
        return
    parts = _parts(model, x)
    *body, head = parts.values()
    weight = _head_weight(head)
    hidden_part = nn.Sequential(OrderedDict(list(parts.items())[:-1]))
    for some, part in zip(x.split(batch_size), y.split(batch_size), strict=True):
        tokens = tokens_for(model, some)
        hidden, moved = modulus_of(hidden_part, tokens) if body else (tokens, torch.clone)
        logits, spread = modulus_of(head, hidden)
        if logits.ndim != 2:
            raise ValueError(f"the model must give logits (B, K), got shape {tuple(logits.shape)}")
        yield _test(plain(logits), part.long(), moved, spread, weight), part


def _test(
    logits: Tensor, y: Tensor, moved: Modulus, spread: Modulus, weight: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """The test of a batch: logits (B, K), the moduli of hidden vectors and head, its matrix (K, D)."""
    rival = torch.arange(logits.shape[1], device=y.device) != y[:, None]
    margin = logits.gather(1, y[:, None]) - logits
    margin = margin - _DOUBT * logits.abs().amax(1, keepdim=True)
    apart = None
    if weight is not None:
        apart = enlarge(torch.linalg.vector_norm(weight[y][:, None] - weight, dim=-1))

    def test(eps: Tensor) -> Tensor:
        delta = moved(eps)
        needed = enlarge(math.sqrt(2.0) * spread(delta))[:, None]
        if apart is not None:
            needed = torch.minimum(needed, apart * delta[:, None])
        return ((margin > needed) | ~rival).all(1)

    return test


def _parts(model: nn.Module, image: Tensor) -> dict[str, nn.Module]:
    """The modules that a model runs one after another."""
    body = model if isinstance(model, nn.Sequential) else getattr(model, "body", model)
    if not isinstance(body, nn.Sequential):
        raise TypeError(
            "the model must be an nn.Sequential or have one as its attribute body, got "
            f"{type(model).__name__}"
        )
    relied = methods_behind(nn.Sequential, ("forward", "__iter__"))
    check_forward(body, nn.Sequential, relied, Ask("l2", kind=kind_of(body)).refuse, "parts")
    if body is not model and not _only_calls(model, body, image):
        raise ValueError(f"{type(model).__name__} computes something else than its body")
    parts = {name: child for name, child in body._modules.items() if child is not None}
    # The head may be the last module of a Sequential that is itself the last.
    name, last = parts.popitem()
    for i, leaf in enumerate(chain(last, Ask("l2"))):
        parts[f"{name}_{i}" if leaf is not last else name] = leaf
    return parts


class _Stand(nn.Module):
    """Notes what it is called with, and returns something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[object, ...]] = []
        # Numbers that an operation in place changes.
        self.out = torch.tensor([-1e30, -0.7, 0.0, 0.3, 1e30])

    def forward(self, *args: object) -> Tensor:
        self.seen.append(args)
        return self.out


def _only_calls(model: nn.Module, part: nn.Module, image: Tensor) -> bool:
    """Whether a model gives its input to one of its parts, once, and returns what that gives."""
    refuse_hooks(model, Ask("l2", kind=kind_of(model)).refuse)
    stand, x = _Stand(), image.clone()
    given = stand.out.clone()
    places = [(m, name) for m in model.modules() for name, child in m._modules.items() if child is part]
    try:
        for module, name in places:
            module._modules[name] = stand
        out = model(x)
    except Exception:  # it does something with what the part gives
        return False
    finally:
        for module, name in places:
            module._modules[name] = part
    passed = out is stand.out and [[*map(id, args)] for args in stand.seen] == [[id(x)]]
    return passed and torch.equal(x, image) and torch.equal(stand.out, given)


def _head_weight(head: nn.Module) -> Tensor | None:
    """The matrix (K, D) of a linear last layer; None for other layers."""
    if isinstance(head, Scaled) and head.factor.numel() == 1:
        inner = _head_weight(head.module)
        return None if inner is None else inner * head.factor.double()  # at least what runs
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head.weight.detach().double()
    return None
