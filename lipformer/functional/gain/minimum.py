"""The gain of L2 attention: a bound of the Lipschitz constant of Z -> P(Z) Z for one head."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lipformer.functional.attention.checks import check_window
from lipformer.functional.gain.ball import Rows, ball_gain, dense_ball_gain
from lipformer.functional.gain.closed_form import closed_form, kim2021, theorem_c
from lipformer.functional.gain.dense_bias import (
    check_bias,
    dense_theorem_c,
    dense_theorem_c_plus,
    dense_theorem_d,
    dense_theorem_e,
    dense_theorem_g,
    logit_biases,
    structured_mask,
)
from lipformer.functional.gain.rows import check_tokens_count, log_mass, theorem_d, theorem_e
from lipformer.functional.gain.table import tabulated_any, tabulated_gain
from lipformer.functional.norms import NORMS, check_norm


def l2_gain(
    n: float,
    *,
    norm: str = "l2",
    is_causal: bool = False,
    window: int | None = None,
    slope: float | None = None,
    bias: Tensor | None = None,
    radius: float | None = None,
    theorem: str | None = None,
) -> float:
    r"""Bounds the Lipschitz constant of one head of L2 attention from above.

    The head maps :math:`Z \in \mathbb{R}^{N \times d}` to P(Z) Z, where :math:`P_{ij}` is
    proportional to :math:`\exp(b_{ij} - t \|z_i - z_j\|^2)`. The bound holds for every d, every
    temperature t > 0 and every input, or with ``radius`` those with :math:`\sqrt t \|z_i\|` up to it.
    Any tokens may be padded. The theorems are those of docs/theory, section 2.

        norm     applies to         theorems
        "l2"     no mask            G, closed, any mask, kim2021
        "l2"     causal, window     G, closed, any mask, kim2021 (no window)
        "l2"     causal with slope  G, closed
        "l2"     bias               G, C, C+
        "token"  any mask and bias  D
        "self"   any mask and bias  E
        each     radius             F

    Theorem G is read from a table that the package holds, of up to 2^24 keys and slopes down to 2^-16;
    "closed" is what is left beyond.

    Args:
        n: Number of tokens, an integer >= 1, or ``math.inf`` for any length: then the gain is
            finite only with a window or a slope.
        norm: "l2" (Frobenius norm over all tokens), "token" (the largest Euclidean norm of a
            token) or "self" (a token's effect on itself, the diagonal blocks of the Jacobian).
        is_causal: Query i sees the keys j <= i.
        window: Query i sees the `window` latest keys, its own included; needs ``is_causal``.
        slope: Causal ALiBi, :math:`b_{ij} = -\mathrm{slope}\,(i - j)`; needs ``is_causal``; 0 means
            none.
        bias: Tensor broadcastable to (*, N, N), added to the logits and to the masks above; -inf
            hides a key. A non-zero diagonal is subtracted from its row. A batch gets its largest
            gain. Its values are read, so this synchronises and does not run under torch.compile.
        radius: r > 0: all tokens, times :math:`\sqrt t`, lie in a ball of this radius. The gain is then
            finite also without a mask for ``n=math.inf``, and near 1 for small r. None: anywhere.
        theorem: None for the smallest of all theorems that apply, or the name of one. "any mask" is
            the bound for every 0/1 mask that keeps the diagonal and has at most n ones in a row or
            column (Theorem G, beyond its table C, and F). "kim2021" is the published value.

    Returns:
        The gain as a float, rounded up, never below the truth.

    Example:
        >>> l2_gain(64) < 9.1
        True
        >>> round(l2_gain(256, norm="token"), 2)
        12.83
        >>> round(l2_gain(math.inf, is_causal=True, slope=0.25), 1)
        3.0
        >>> round(l2_gain(math.inf, radius=0.5), 2)
        1.46
    """
    n = check_tokens_count(n)
    check_norm(norm, NORMS[:3])
    check_window(window, is_causal)
    slope = float(slope or 0.0)
    if not (slope == 0.0 or (1e-30 <= slope < math.inf and is_causal)):
        raise ValueError(
            "slope (ALiBi) must be 0, or at least 1e-30, finite and with is_causal=True, got "
            f"slope={slope}, is_causal={is_causal}"
        )
    if radius is not None and not (isinstance(radius, (int, float)) and radius > 0):
        raise ValueError(f"radius must be None or a number > 0, got {radius!r}")
    keys = float(n if window is None else min(n, window))
    question = _Question(keys, norm, is_causal, keys < n, slope, radius, theorem)
    if bias is None:
        _check_theorem(_scalar_theorems(question), theorem, norm)
        return _scalar_gain(*question)
    check_bias(bias, n)
    biases = logit_biases(bias, int(n), is_causal, keys, slope)
    return max(_dense_gain(b, question) for b in biases)


class _Question(NamedTuple):
    """What is asked of a head without a dense bias; one row sees at most `keys` keys."""

    keys: float
    norm: str
    is_causal: bool
    windowed: bool
    slope: float
    radius: float | None
    theorem: str | None


Theorems = dict[str, Callable[[], float]]


def _scalar_theorems(ask: _Question) -> Theorems:
    """Lists the theorems that apply without a dense bias, each ready to be evaluated."""
    keys, norm, is_causal, windowed, slope, radius, _ = ask
    if norm == "token":
        theorems: Theorems = {"D": lambda: theorem_d(log_mass(keys, slope))}
    elif norm == "self":
        theorems = {"E": lambda: theorem_e(log_mass(keys, slope))}
    else:
        theorems = {
            "G": lambda: tabulated_gain(keys, is_causal, slope),
            "closed": lambda: closed_form(keys, is_causal, slope),
        }
        if not slope:
            theorems["any mask"] = lambda: _any_mask(keys, radius)
        if not (slope or windowed):
            theorems["kim2021"] = lambda: kim2021(keys)
    if keys == math.inf and slope == 0:
        theorems = dict.fromkeys(theorems, lambda: math.inf)
    if radius is not None:
        rows = Rows(norm, keys, "causal" if is_causal else "none", slope)
        theorems["F"] = lambda: ball_gain(rows, radius)
    return theorems


def _any_mask(keys: float, radius: float | None) -> float:
    on_ball = math.inf if radius is None else ball_gain(Rows("l2", keys, "any"), radius)
    return min(tabulated_any(keys - 1, keys - 1), theorem_c(keys), on_ball)


def _check_theorem(theorems: Theorems, theorem: str | None, norm: str) -> None:
    """Raises unless ``theorem`` is None or one of those that apply."""
    if theorem is not None and theorem not in theorems:
        raise ValueError(
            f"theorem must be None or one that applies to norm={norm!r} with this mask: "
            f"{', '.join(map(repr, theorems))}; got {theorem!r}"
        )


def _scalar_gain(*ask: Any) -> float:
    """The gain without a dense bias, a constant for torch.compile; the entries of a _Question."""
    return _cached_gain(_Question(*ask))


# What torch.compiler.assume_constant_result sets; calling that here would import the compiler.
_scalar_gain._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _cached_gain(ask: _Question) -> float:
    """The gain without a dense bias."""
    if ask.keys == 1:
        return 1.0  # every token sees itself alone, P = I
    theorems = _scalar_theorems(ask)
    if ask.theorem is not None:
        return theorems[ask.theorem]()
    return min(evaluate() for evaluate in theorems.values())


def _dense_gain(b: Tensor, ask: _Question) -> float:
    """The gain for one (N, N) matrix of logit biases, own entries -inf."""
    norm, theorem, radius = ask.norm, ask.theorem, ask.radius
    theorems: Theorems = {
        "l2": {
            "G": lambda: dense_theorem_g(b),
            "C": lambda: dense_theorem_c(b),
            "C+": lambda: dense_theorem_c_plus(b),
        },
        "token": {"D": lambda: dense_theorem_d(b)},
        "self": {"E": lambda: dense_theorem_e(b)},
    }[norm]
    if radius is not None:
        theorems["F"] = lambda: dense_ball_gain(b, norm, radius)
    _check_theorem(theorems, theorem, norm)
    if theorem is not None:
        return theorems[theorem]()
    gain = min(evaluate() for evaluate in theorems.values())
    mask = structured_mask(b)
    if mask is None:
        return gain
    keys = float(b.shape[-1])
    return min(gain, _scalar_gain(keys, norm, mask == "causal", False, 0.0, radius, None))
