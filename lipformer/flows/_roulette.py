r"""Russian roulette: a random number of terms whose weights make the series unbiased.

Source: docs/theory, section 6. The settings of Chen, Behrmann, Duvenaud, Jacobsen 2019 (two exact
terms, then geometric) with the parameter tied to the certified rate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipformer.flows._log_det_series import Terms

EXACT_TERMS = 2


def continuation(rate: float) -> float:
    r"""The probability q = 1 - p of going on after each term: q = L.

    Finite variance needs :math:`L^2 < q` strictly. In the worst case (all eigenvalues -L) the variance
    that roulette adds is proportional to :math:`(1-q)/(q-L^2)`, that is 1/L at q = L, and variance
    times the expected number of terms only falls as q grows. At q = L the weighted power of term k is
    bounded by a constant, :math:`L^k/q^{k-m} = L^m`, so that no rare draw is large; q beyond L buys
    little but costs terms, 1/(1-q) in the mean. L = 1/2 gives the p = 1/2 of Residual Flows.
    """
    if not rate * rate < rate:
        raise ValueError(f"roulette has finite variance only for a rate in (0, 1), got {rate!r}")
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
