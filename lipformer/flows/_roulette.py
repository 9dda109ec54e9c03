r"""Russian roulette: a random number of terms whose weights make the series unbiased.

Source: docs/theory, section 6. The settings of Chen, Behrmann, Duvenaud, Jacobsen 2019 (two exact
terms, then geometric) with the parameter tied to the certified rate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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


def roulette_weights(counts: Tensor, rate: float, exact: int) -> Tensor:
    r""":math:`c_k = 1[n \ge k] / P(n \ge k)`, of mean one for every k.

    Args:
        counts: n of each sample, (B,).
        rate: L.
        exact: m.

    Returns:
        (max n, B) float64, the weight of term k in row k - 1.
    """
    k = torch.arange(1, (int(counts.max()) if len(counts) else exact) + 1)[:, None]
    log_reached = math.log(continuation(rate)) * (k - exact).clamp_min(0).double()
    return torch.exp(-log_reached).where(counts >= k, 0.0)
