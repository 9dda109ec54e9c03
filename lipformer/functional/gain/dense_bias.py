r"""Theorems G, C, C+, D and E for a dense bias: a tensor (*, N, N) added to the logits.

P_ij is proportional to :math:`e^{b_{ij}} K_{ij}`; -inf hides a key. Everything is computed in
float64, one (N, N) matrix of the batch at a time, and a batch gets its largest gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lipformer.functional.attention.checks import OWN_KEY_RULE
from lipformer.functional.gain.lambertw import wright_omega_tensor
from lipformer.functional.gain.pointwise import pointwise
from lipformer.functional.gain.rows import spread, theorem_d, theorem_e
from lipformer.functional.gain.table import tabulated_any
from lipformer.functional.rounding import enlarge

# Values of the free parameter x that Theorem C+ tries: with them it is within 1% of its best.
_TRIED_X = (1.0, 1.5, 2.2, 3.2)
# Knots of the table of q(b) between the linear part and the largest bias.
_KNOTS = 64


def check_bias(bias: Tensor, n: float) -> None:
    """Raises unless ``bias`` broadcasts to (*, n, n), can be a logit and shows every own key."""
    fits = n < math.inf and bias.numel() > 0 and all(size in (1, n) for size in bias.shape[-2:])
    if not fits or not bias.is_floating_point():
        raise ValueError(
            "bias must be floating point, added to the logits (-inf hides a key), and broadcast to "
            f"(*, N, N) with N = n finite, got n={n} and a bias of {bias.dtype} {tuple(bias.shape)}"
        )
    if not bool((bias < math.inf).all()):
        odd = bias[~(bias < math.inf)].flatten()[0].item()
        raise ValueError(f"bias must hold finite numbers or -inf, got {odd}")
    own = bias.expand(*bias.shape[:-2], int(n), int(n)).diagonal(dim1=-2, dim2=-1)
    hidden = (own == -math.inf).nonzero()
    if len(hidden):
        raise ValueError(
            f"bias hides query {int(hidden[0, -1])}'s own key (its diagonal entry is -inf): "
            f"{OWN_KEY_RULE}"
        )


def _matrices(bias: Tensor, n: int) -> Iterator[Tensor]:
    """The (N, N) matrices of a batch (*, N, N), expanded but not copied."""
    while bias.ndim < 2:
        bias = bias[None]
    for matrix in bias.detach().reshape(-1, *bias.shape[-2:]):
        yield matrix.expand(n, n)


def logit_biases(bias: Tensor, n: int, is_causal: bool, window: float, slope: float) -> Iterator[Tensor]:
    r"""Adds the masks to a bias and takes each row's own entry off it.

    :math:`b_{ij} \leftarrow b_{ij} - b_{ii}` leaves the softmax of row i as it is and makes the
    diagonal zero, as Theorem C asks.

    Args:
        bias: Broadcastable to (*, N, N), checked by `check_bias`.
        n: Number of tokens N.
        is_causal: Whether the keys j > i are hidden.
        window: Number of latest keys kept, ``math.inf`` for all.
        slope: ALiBi slope, 0 for none.

    Yields:
        A float64 (N, N) tensor for each matrix of the batch; its own entries are -inf, since all
        sums of Theorem C leave them out.
    """
    if bias.device.type == "mps":
        bias = bias.cpu()  # it has no float64
    position = torch.arange(n, device=bias.device, dtype=torch.float64)
    distance = position[:, None] - position[None, :]
    hidden = distance == 0
    if is_causal:
        hidden = hidden | (distance < 0) | (distance >= window)
    for matrix in _matrices(bias, n):
        b = matrix.double()
        b = b - b.diagonal()[:, None]
        if slope:
            b = b - slope * distance
        yield b.masked_fill(hidden, -math.inf)


def dense_log_mass(b: Tensor) -> float:
    r"""Computes :math:`\max_i \ln \sum_{j \ne i} e^{b_{ij}}`.

    Args:
        b: (N, N) with own entries -inf.
    """
    return torch.logsumexp(b, dim=-1).max().item()


def dense_theorem_d(b: Tensor) -> float:
    """Bounds the gain in the token norm under a bias (N, N) (docs/theory, Theorem D)."""
    return _round_up_sum(theorem_d(dense_log_mass(b)), b)


def dense_theorem_e(b: Tensor) -> float:
    """Bounds the own-token gain under a bias (N, N) (docs/theory, Theorem E)."""
    return _round_up_sum(theorem_e(dense_log_mass(b)), b)


def dense_theorem_g(b: Tensor) -> float:
    """Bounds the gain in the l2 norm under a bias (N, N) by its two masses (docs/theory, Theorem G)."""
    masses = [_round_up_sum(b.exp().sum(dim).max().item(), b) for dim in (1, 0)]
    return 1.0 if masses[0] == 0 else tabulated_any(*masses)


def dense_theorem_c(b: Tensor) -> float:
    r"""Bounds the gain in the l2 norm under a bias: :math:`\sqrt S + 2 m + 2 \sqrt{m c}`.

    :math:`m = W_0(B/e)`, :math:`S = 1 + \max_j \sum_{i \ne j} \sigma(b_{ij})` with the logistic
    function, :math:`c = \max_j \sum_{i \ne j} W_0(e^{b_{ij} - 1})` (docs/theory, Theorem C).

    Args:
        b: (N, N) with own entries -inf.

    Returns:
        The gain, rounded up.
    """
    m = spread(dense_log_mass(b))
    s = 1 + torch.sigmoid(b).sum(dim=0).max().item()
    c = wright_omega_tensor(b - 1).sum(dim=0).max().item()
    return _round_up_sum(math.sqrt(s) + 2 * m + 2 * math.sqrt(m * c), b)


def dense_theorem_c_plus(b: Tensor) -> float:
    """Bounds the gain in the l2 norm under a bias, entry by entry (docs/theory, Theorem C+).

    q(b) is tabulated: since e^-b q(b) decreases in b, an entry is at most e^(b - knot) times q at
    the nearest knot below it. An entry on a knot, such as 0 of a 0/1 mask, is exact.

    Args:
        b: (N, N) with own entries -inf.

    Returns:
        The gain, rounded up.
    """
    log_b = dense_log_mass(b)
    if log_b == -math.inf:
        return 1.0
    largest = b.max().item()
    column = math.inf
    for x in _TRIED_X:
        q = pointwise(x, log_b)
        entries = (b + (q.log_ratio + q.log_kappa)).exp()
        if largest > q.linear:
            step = (largest - q.linear) / (_KNOTS - 1)
            knots = [largest - i * step for i in reversed(range(_KNOTS))]
            grid = torch.tensor(knots, dtype=torch.float64, device=b.device)
            table = torch.tensor([q.entry(knot) for knot in knots], dtype=torch.float64, device=b.device)
            place = (torch.bucketize(b, grid, right=True) - 1).clamp_min(0)
            tabulated = (b - grid[place]).exp() * table[place]
            entries = torch.where(b >= grid[0], tabulated, entries)
        column = min(column, entries.sum(dim=0).max().item())
    return _round_up_sum(theorem_e(log_b) + math.sqrt(column), b)


def structured_mask(b: Tensor) -> str | None:
    """Says whether a bias is no mask at all ("full") or the causal mask ("causal"), for Theorem G.

    Args:
        b: (N, N) with own entries -inf.
    """
    seen = b != -math.inf
    if bool((b[seen] != 0).any()):
        return None
    n = b.shape[-1]
    if torch.equal(seen, ~torch.eye(n, dtype=torch.bool, device=b.device)):
        return "full"
    lower = torch.ones(n, n, dtype=torch.bool, device=b.device).tril(-1)
    return "causal" if torch.equal(seen, lower) else None


def _round_up_sum(value: float, b: Tensor) -> float:
    """Rounds up for the formula and for a float64 sum of N entries with errors of 1e-13 each."""
    return enlarge(value, 5000 + b.shape[-1])
