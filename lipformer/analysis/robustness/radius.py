"""Radii within which no perturbation of an input changes what a classifier says."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipformer.analysis.inputs import check_samples, radii
from lipformer.analysis.robustness.few_tokens import few_tokens_modulus
from lipformer.analysis.robustness.lofast import Modulus
from lipformer.analysis.robustness.perturbation import (
    Step,
    modulus_of,
    theorem_l_is,
    times,
    tokens_for,
)
from lipformer.certificate import Ask, NotCertifiable
from lipformer.certificate.bounds import answer
from lipformer.certificate.rules import check_forward, kind_of, methods_behind, refuse_hooks
from lipformer.certificate.torch_rules import chain, parts_of
from lipformer.functional.rounding import ROUND_UP, enlarge
from lipformer.functional.wide import plain
from lipformer.layers import frozen
from lipformer.layers.branch import call_branch
from lipformer.layers.layout import padding
from lipformer.layers.scaled import Scaled

_DOUBT = 1e-9
"""Part of the largest logit that margins must exceed: for the rounding of a forward pass in float64."""


@torch.no_grad()
def certified_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    tokens: int | None = None,
    key_padding_mask: Tensor | None = None,
    theorem_l: bool = True,
    max_radius: float = 10.0,
    tol: float = 1e-3,
    batch_size: int = 128,
) -> Tensor:
    r"""Returns a radius for each sample within which the predicted class is certified to be the label.

    With the bound :math:`\delta(\epsilon)` of how far the last hidden vector h can move
    (:func:`perturbation_bound`) and logits :math:`f_j = \langle w_j, h\rangle + b_j`, the answer y
    stands if for all j

    .. math:: f_y - f_j > \min\{ \|w_y - w_j\|\,\delta(\epsilon),\; \sqrt2\, \delta_f(\epsilon) \},

    where :math:`\delta_f` bounds the logits; without a linear last layer only the second is used. The
    bounds grow with :math:`\epsilon`, so that a search finds the largest radius, from below (`_search`).

    With ``tokens=k`` the radius is one of single tokens: the answer stands if at most k of the N tokens
    move, each by at most :math:`\epsilon`. That is a step of at most :math:`\sqrt{\min(k, N)}\,\epsilon`
    in the l2 norm and of :math:`\epsilon` in the token norm, and what it leaves on the changed tokens
    alone counts less in a mean (:mod:`lipformer.analysis.robustness.few_tokens`); the best bound counts.

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
        x: images, (B, *), or whatever the model takes; the radius is in their l2 norm. Of a model of
            symbols their embedding, ``model.embed(tokens)``.
        y: labels, (B,), integers.
        tokens: k; default None, for all of x together.
        key_padding_mask: (B, N), True at padded tokens, which stand behind the others and count for
            nothing. A sample is certified without them, which must give what the model gives with the
            mask.
        theorem_l: bound L2 attention around each sample (Theorem L), not only by its global constant:
            larger radii, in a time that grows with the third power of the tokens.
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
    found = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for test, index in _tests(model, x, y, batch_size, tokens, key_padding_mask, theorem_l):
        found[index] = _search(test, max_radius, tol)
    return found


@torch.no_grad()
def is_certified(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    tokens: int | None = None,
    key_padding_mask: Tensor | None = None,
    batch_size: int = 128,
) -> Tensor:
    """Whether the predicted class is certified to be the label within eps, (B,) bool.

    Args:
        model: as for :func:`certified_radius`.
        x: images, (B, *).
        y: labels, (B,).
        eps: l2 radius, or that of single tokens; a number or (B,).
        tokens: as for :func:`certified_radius`.
        key_padding_mask: likewise.
        batch_size: images at a time.
    """
    radius = radii(eps, x.shape[:1], x.device, "eps")
    found = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for test, index in _tests(model, x, y, batch_size, tokens, key_padding_mask):
        found[index] = test.slack(radius[index]) > 0
    return found


@torch.no_grad()
def certified_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: Sequence[float],
    *,
    tokens: int | None = None,
    key_padding_mask: Tensor | None = None,
    batch_size: int = 128,
) -> list[float]:
    """The fraction of samples whose label is certified within each radius; at 0 the clean accuracy.

    Args:
        model: as for :func:`certified_radius`.
        x: images, (B, *), at least one.
        y: labels, (B,).
        eps: l2 radii, or those of single tokens.
        tokens: as for :func:`certified_radius`.
        key_padding_mask: likewise.
        batch_size: images at a time.

    Returns:
        one share for each radius.
    """
    levels = [radii(level, x.shape[:1], x.device, "eps") for level in eps]
    totals = [0] * len(levels)
    for test, index in _tests(model, x, y, batch_size, tokens, key_padding_mask):
        for i, level in enumerate(levels):
            totals[i] += int((test.slack(level[index]) > 0).sum())
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
    tol = min(tol, most / 2)  # a search that ends early looks at its end all the same
    low, high = torch.zeros_like(test.margin), torch.full_like(test.margin, most)
    above, below = test.margin, torch.full_like(test.margin, torch.nan)  # slack at low and high
    high = torch.where(above > 0, high, low)  # a wrong answer has no radius
    point = torch.where(test.first > 0, test.first, math.sqrt(tol * most)).clamp_max(most)
    count, middle = 0, high / 2
    # Between neighbouring numbers there is none, whatever tol.
    while bool((going := (high - low > tol) & (low < middle) & (middle < high)).any()):
        count += 1
        # What overflowed certifies nothing.
        found = test.slack(torch.where(going, point, low)).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        stands = found > 0
        up, down = going & stands, going & ~stands
        low, above = torch.where(up, point, low), torch.where(up, found, above)
        high, below = torch.where(down, point, high), torch.where(down, found, below)
        ahead = low * test.margin / (test.margin - above)
        ahead = torch.where(ahead.isfinite(), ahead, torch.inf).clamp_max(8 * low) + tol / 2
        between = low + (high - low) * above / (above - below)
        middle = low + (high - low) / 2
        between = between + (tol / 2) * (middle - between).sign()
        enclosed = below.isfinite() & (count % 3 > 0)
        between = torch.where(enclosed, between, middle)
        point = torch.where(below.isnan(), torch.where(low > 0, ahead, middle), between)
        # The last point outwards is the end itself.
        point = torch.minimum(point, high)
        point = torch.where((point <= low) | (point >= high) & ~below.isnan(), middle, point)
    return low


def _tests(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    tokens: int | None,
    key_padding_mask: Tensor | None,
    theorem_l: bool = True,
) -> Iterator[tuple[_Test, Tensor]]:
    """For each batch the test of radii, and the numbers of its samples."""
    check_samples(x)
    if y.shape != x.shape[:1] or y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(
            f"y must be integer labels of shape ({len(x)},), got {y.dtype} {tuple(y.shape)}"
        )
    whole = isinstance(tokens, int) and not isinstance(tokens, bool)
    if tokens is not None and (x.ndim != 3 or not whole or tokens < 1):
        raise ValueError(
            f"tokens must be an integer >= 1, for x of shape (B, N, D), got {tokens!r} and "
            f"{tuple(x.shape)}"
        )
    if len(x) == 0:
        return
    parts = _parts(model, x)
    _, head = parts.popitem()
    weight = _head_weight(head)
    hidden_part = nn.Sequential(OrderedDict(parts))
    for group, count in _groups(x, key_padding_mask):
        for index in group.split(batch_size):
            some = x[index] if count is None else x[index, :count]
            at = tokens_for(model, some)
            with theorem_l_is(theorem_l):
                hidden, step = modulus_of(hidden_part, at)
                logits, spread = modulus_of(head, hidden)
            if logits.ndim != 2:
                raise ValueError(f"the model must give logits (B, K), got shape {tuple(logits.shape)}")
            if not bool(((y[index] >= 0) & (y[index] < logits.shape[1])).all()):
                raise ValueError(
                    f"y must be labels from 0 to {logits.shape[1] - 1}, got {y[index].tolist()}"
                )
            if count is not None:
                behind = (torch.arange(x.shape[1], device=x.device) >= count).expand(len(index), -1)
                _check_padding(model, x[index], behind, plain(logits))
            moved: Modulus = step
            if tokens is not None:
                moved = _of_tokens(hidden_part, some, plain(hidden), step, tokens)
            yield _test(plain(logits), y[index].long(), moved, spread, weight), index


def _groups(x: Tensor, key_padding_mask: Tensor | None) -> Iterator[tuple[Tensor, int | None]]:
    """Numbers of samples that have equally many tokens, and how many; None without a mask."""
    every = torch.arange(len(x), device=x.device)
    if key_padding_mask is None:
        yield every, None
        return
    if x.ndim != 3:
        raise ValueError(f"key_padding_mask is for x of shape (B, N, D), got {tuple(x.shape)}")
    hidden = padding(key_padding_mask, x)
    assert hidden is not None
    counts = (~hidden).sum(1)
    behind = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
    if not torch.equal(hidden, behind) or not bool((counts > 0).all()):
        raise ValueError(
            "key_padding_mask must leave at least one token of each sample and hide what stands behind "
            f"its tokens; got {hidden.tolist()}"
        )
    for count in counts.unique().tolist():
        yield every[counts == count], count


def _check_padding(model: nn.Module, x: Tensor, mask: Tensor, logits: Tensor) -> None:
    """ValueError unless the model with its mask gives the logits (B, K) of the tokens alone."""
    with frozen(model):  # weights that it derives are then those of its parts alone, to the last bit
        with_mask = plain(call_branch(model, tokens_for(model, x), mask))
    if not torch.allclose(with_mask, logits, rtol=0.0, atol=_DOUBT * float(logits.abs().max())):
        raise ValueError(
            f"{type(model).__name__} gives something else with key_padding_mask than without the padded "
            "tokens: some part of it needs the mask and does not take it"
        )


def _of_tokens(module: nn.Sequential, x: Tensor, hidden: Tensor, moved: Step, tokens: int) -> Modulus:
    """The modulus of hidden vectors (B, D) for steps of at most k tokens, from that in the l2 norm."""
    few = few_tokens_modulus(module, moved, tokens, x.shape[1])
    root = math.sqrt(min(tokens, x.shape[1])) * ROUND_UP
    whole = times(math.inf)
    if hidden.ndim == 2:  # of one vector the token norm is the Euclidean norm
        ask = Ask("token", x.shape[1], alone=True, dims=3, padded=False)
        # Dot products have none in any norm; what the l2 norm gives is as certain.
        with suppress(NotCertifiable):
            whole = times(answer(module, ask).bound)
    return lambda eps: torch.stack([moved(root * eps), few(eps), whole(eps)]).amin(0)


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
    parts = parts_of(body)
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
