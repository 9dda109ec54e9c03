r"""The log-determinant as a power series with Hutchinson's probes, truncated or by Russian roulette.

.. math:: \log\det(I + J) = \sum_{k \ge 1} \frac{(-1)^{k+1}}{k} \mathrm{tr}(J^k)

Roulette takes a random number of terms whose weights make the series unbiased, with the settings of
Chen, Behrmann, Duvenaud, Jacobsen 2019 (two exact terms, then geometric) and the parameter tied to the
certified rate. The gradient takes the memory of one backward pass. Source: docs/theory, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lipformer.functional.pullback import pull
from lipformer.functional.rounding import enlarge

# Terms that roulette always takes.
EXACT_TERMS = 2


def truncation_error(rate: float, terms: int) -> float:
    r"""Bound of the omitted part of the series, per dimension: :math:`L^{n+1}/((n+1)(1-L))`.

    Proof in docs/theory, section 6. It bounds the error of the expectation over the probes, not the
    noise of a probe.

    Args:
        rate: L < 1.
        terms: n.
    """
    # The factor makes up for the roundings of the three operations.
    return enlarge(rate ** (terms + 1) / ((terms + 1) * (1.0 - rate)), 64)


def default_terms(rate: float, target: float = 1e-2, most: int = 40) -> int:
    """The fewest terms with a truncation error of at most ``target`` nats per dimension."""
    return next((n for n in range(1, most) if truncation_error(rate, n) <= target), most)


def signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Rademacher probes v of the shape, dtype and device of ``like``: independent entries +1 or -1.

    Drawn on the generator's device, so that a CPU generator serves events on a GPU.
    """
    device = like.device if generator is None else generator.device
    draw = torch.randint(0, 2, like.shape, generator=generator, device=device)
    return (2 * draw - 1).to(device=like.device, dtype=like.dtype)


def token_ramp(x: Tensor) -> Tensor:
    """Growing weights d_i of the tokens, (T, 1), that lower the noise in causal branches.

    D^-1 J D has the traces of J, whatever the diagonal matrix D. In a causal branch its block (i, j),
    j < i, is d_j / d_i of that of J: as the weights grow, what remains are the own-token blocks, whose
    powers cannot grow on the way to zero as those of J may. The weights grow as fast as the range of
    the dtype allows.
    """
    count = x.shape[-2]
    growth = min(8.0, 0.4 * math.log2(torch.finfo(x.dtype).max) / max(1, count - 1))
    place = torch.arange(count, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.exp2(growth * place)[:, None].to(x.dtype)


class Terms(NamedTuple):
    """The terms of the series: the host knows how many, the device which sample has which.

    So the loop over the terms neither reads from the device nor copies to it.

    Attributes:
        weights: c_k for each term k.
        running: the number of samples that have term k; it never grows.
        rank: (B,) a permutation: sample b has term k if rank[b] < running[k].
    """

    weights: Sequence[float]
    running: Sequence[int]
    rank: Tensor


def all_terms(count: int, like: Tensor) -> Terms:
    """``count`` terms of weight one for every sample of ``like`` (B, *)."""
    batch = len(like)
    return Terms([1.0] * count, [batch] * count, torch.arange(batch, device=like.device))


def weighted_series(
    out: Tensor,
    x: Tensor,
    probe: Tensor,
    terms: Terms,
    *,
    ramp: Tensor | None = None,
    restrict: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    gradient: bool,
) -> Tensor:
    r"""One probe's estimate :math:`\sum_k \frac{(-1)^{k+1}}{k} c_k\, v^\top J^k v` of each sample, (B,).

    Its gradient is that of the surrogate :math:`u^\top J v` with the constant vector
    :math:`u = \sum_{k \ge 1} (-1)^{k-1} c_k (J^\top)^{k-1} v`. The two agree in the mean over v:
    :math:`d\,\mathrm{tr}(J^k)/k = \mathrm{tr}(J^{k-1} dJ)`. Only the last of the backward passes
    leaves a graph, so memory does not grow with the number of terms. Derivatives beyond the first are
    not those of the log-determinant.

    Args:
        out: f(x) (B, T, D), in a graph that x is in.
        x: (B, T, D).
        probe: v (B, T, D).
        terms: c_k, zero in a sample that has stopped.
        ramp: D of :func:`token_ramp`, (T, 1): J is replaced by D^-1 J D.
        restrict: evaluates f for the samples of an index (b,) alone and returns their f(x) and x. It
            is called whenever half of the samples have stopped, which then cost no more.
        gradient: attach the gradient.
    """
    scale = torch.ones((), dtype=x.dtype, device=x.device) if ramp is None else ramp
    wide = torch.promote_types(x.dtype, torch.float32)
    longest = terms.rank.argsort()
    row = torch.arange(len(x), device=x.device)
    here, at, power = out, x, probe
    mixed = torch.zeros_like(probe)
    total = torch.zeros(len(x), dtype=wide, device=x.device)
    for k, (weight, running) in enumerate(zip(terms.weights, terms.running, strict=True), start=1):
        if restrict is not None and 2 * running <= len(row):
            # Once restricted, the samples stand in the order in which they stop.
            power = power[longest[:running]] if len(row) == len(x) else power[:running]
            row = longest[:running]
            here, at = restrict(row)
        signed = (terms.rank[row] < running).to(wide) * (weight if k % 2 else -weight)
        if gradient:
            mixed.index_add_(0, row, signed[:, None, None].to(mixed.dtype) * power)
        power = scale * pull(here, at, power / scale)
        total.index_add_(0, row, signed / k * _inner(probe[row], power))
    if not gradient:
        return total
    surrogate = _inner(probe, scale * pull(out, x, mixed / scale, create_graph=True))
    return total + surrogate - surrogate.detach()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of each sample, (B, T, D) -> (B,), summed in at least float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) * b.to(wide)).sum(dim=(-2, -1))


def continuation(rate: float) -> float:
    r"""The probability q = 1 - p of going on after each term: q = L.

    Finite variance needs :math:`L^2 < q`; why q = L: docs/theory, section 6.
    """
    return rate


def draw_counts(batch: int, rate: float, exact: int, generator: torch.Generator | None = None) -> Tensor:
    r"""The number of terms of each sample, n = m + Geometric with :math:`P(n \ge m + j) = q^j`.

    One draw for each sample: a common one would be cheaper by the largest of B draws over one, but
    leaves noise that averages over no batch.

    Args:
        batch: B.
        rate: L.
        exact: m.
        generator: torch's default generator of the CPU if None.

    Returns:
        (B,) int64 on the CPU, so that reading the largest waits for no GPU.
    """
    device = torch.device("cpu") if generator is None else generator.device
    uniform = torch.rand(batch, generator=generator, device=device, dtype=torch.float64).cpu()
    # 1 - u is in (0, 1]: its logarithm is finite.
    return exact + (torch.log1p(-uniform) / math.log(continuation(rate))).floor().long()


def roulette_weight(k: int, rate: float, exact: int) -> float:
    r""":math:`c_k = 1 / P(n \ge k)`: with it term k has mean one, being left out where n < k.

    Args:
        k: the term, from 1.
        rate: L.
        exact: m.
    """
    return continuation(rate) ** -max(0, k - exact)


def roulette_terms(like: Tensor, rate: float, exact: int, generator: torch.Generator | None) -> Terms:
    """A random number of terms for each sample of ``like`` (B, *).

    The host draws the numbers and sorts them, the device draws which sample gets which.

    Args:
        like: gives B and the device.
        rate: L.
        exact: m.
        generator: of both draws; torch's default ones if None.
    """
    counts = draw_counts(len(like), rate, exact, generator)
    most = int(counts.max()) if len(counts) else exact
    running = (counts >= torch.arange(1, most + 1)[:, None]).sum(1).tolist()
    device = like.device if generator is None else generator.device
    rank = torch.randperm(len(like), generator=generator, device=device).to(like.device)
    return Terms([roulette_weight(k, rate, exact) for k in range(1, most + 1)], running, rank)
