"""Radii within which no perturbation of an image changes what a classifier says."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipformer.analysis.inputs import check_samples, radii
from lipformer.analysis.robustness.lofast import Modulus
from lipformer.analysis.robustness.perturbation import Step, modulus_of, tokens_for
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
    bounds grow with :math:`\epsilon`, so that a search finds the largest radius, from below (`_search`).

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
        >>> radius = certified_radius(model, torch.tensor([[0.5, 3.0]]), torch.tensor([0])).item()
        >>> 0.499 <= radius < 0.5
        True
    """
    if not (tol > 0 and 0 < max_radius < math.inf):
        raise ValueError(
            f"max_radius must be positive and finite, tol positive, got {max_radius} and {tol}"
        )
    found = []
    for test, _ in _tests(model, x, y, batch_size):
        found.append(_search(test, max_radius, tol))
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
        found.append(test.slack(radius[first : first + len(part)]) > 0)
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
            totals[i] += int((test.slack(level[: len(part)]) > 0).sum())
    return [total / len(x) for total in totals]


class _Test(NamedTuple):
    """The test of radii of a batch.

    Attributes:
        slack: of radii (B,) by how much margins exceed their bounds, (B,); certified where positive.
        margin: the same at radius 0, (B,).
        first: radii that the global certificate alone gives, (B,); zero where there is none.
    """

    slack: Callable[[Tensor], Tensor]
    margin: Tensor
    first: Tensor


def _search(test: _Test, most: float, tol: float) -> Tensor:
    """The largest radii that pass a test, from below: within tol, at most `most`.

    From the radius of the global certificate outwards along the line through the margins at 0 and there,
    at most eightfold; once the end is enclosed, where the line through both sides meets zero, moved by
    tol/2 to the middle so that both sides close in, and every third time the middle.
    """
    low, high = torch.zeros_like(test.margin), torch.full_like(test.margin, most)
    above, below = test.margin, torch.full_like(test.margin, torch.nan)  # slack at low and high
    high = torch.where(above > 0, high, low)  # a wrong answer has no radius
    point = torch.where(test.first > 0, test.first, math.sqrt(tol * most)).clamp_max(most)
    count = 0
    while bool((going := high - low > tol).any()):
        count += 1
        found = test.slack(torch.where(going, point, low))
        stands = found > 0
        up, down = going & stands, going & ~stands
        low, above = torch.where(up, point, low), torch.where(up, found, above)
        high, below = torch.where(down, point, high), torch.where(down, found, below)
        ahead = low * test.margin / (test.margin - above)
        ahead = torch.where(ahead.isfinite(), ahead, torch.inf).clamp_max(8 * low) + tol / 2
        between = low + (high - low) * above / (above - below)
        middle = (low + high) / 2
        between = between + (tol / 2) * (middle - between).sign()
        enclosed = below.isfinite() & (count % 3 > 0)
        between = torch.where(enclosed, between, middle)
        point = torch.where(below.isnan(), torch.where(low > 0, ahead, middle), between)
        # The last point outwards is the end itself.
        point = torch.minimum(point, high)
        point = torch.where((point <= low) | (point >= high) & ~below.isnan(), middle, point)
    return low


def _tests(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Iterator[tuple[_Test, Tensor]]:
    """For each batch the test of radii, and its labels."""
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


def _test(logits: Tensor, y: Tensor, moved: Modulus, spread: Modulus, weight: Tensor | None) -> _Test:
    """The test of a batch: logits (B, K), the moduli of hidden vectors and head, its matrix (K, D)."""
    rival = torch.arange(logits.shape[1], device=y.device) != y[:, None]
    margin = logits.gather(1, y[:, None]) - logits
    margin = margin - _DOUBT * logits.abs().amax(1, keepdim=True)
    apart = None
    if weight is not None:
        apart = enlarge(torch.linalg.vector_norm(weight[y][:, None] - weight, dim=-1))

    def slack(delta: Tensor) -> Tensor:
        """What is left of the margins where hidden vectors move by delta."""
        needed = enlarge(math.sqrt(2.0) * spread(delta))[:, None]
        if apart is not None:
            needed = torch.minimum(needed, apart * delta[:, None])
        return (margin - needed).masked_fill(~rival, torch.inf).amin(1)

    zero = torch.zeros_like(logits[:, 0])
    left = slack(zero)
    first = zero
    constant = moved.whole.bound if isinstance(moved, Step) and moved.whole is not None else 0.0
    if constant > 0:
        # Where the margins would be gone at the pace of the first unit.
        fall = left - slack(zero + 1.0)
        first = torch.where(fall > 0, left / (fall * constant), 0.0)
    return _Test(lambda eps: slack(moved(eps)), left, first)


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
