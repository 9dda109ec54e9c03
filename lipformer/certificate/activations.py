"""Largest slopes of torch's activations (docs/theory, section 4): the same in every norm."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

from lipformer.certificate.bounds import Ask, Bound, register_bound
from lipformer.certificate.paths import unchanged
from lipformer.functional.norms import max_abs
from lipformer.functional.rounding import ROUND_UP

# GELU' = Phi(x) + x phi(x) is largest at x = sqrt(2), in closed form there.
GELU_SLOPE = (0.5 * (1.0 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi)) * ROUND_UP**2
# The rest are maxima of one-dimensional functions, rounded up in the last digit; tests find them
# anew with SciPy.
GELU_TANH_SLOPE = 1.1289932
SILU_SLOPE = 1.0998394
MISH_SLOPE = 1.0885
SELU_SLOPE = 1.7580994


def _at_least_one(slope: float) -> float:
    """max(1, |slope|), and NaN if the slope is."""
    return 1.0 if abs(slope) <= 1.0 else abs(slope)


SLOPES: dict[type[nn.Module], float | Callable[..., float]] = {
    nn.Identity: 1.0,
    nn.ReLU: 1.0,
    nn.ReLU6: 1.0,
    nn.Tanh: 1.0,
    nn.Hardtanh: 1.0,
    nn.Tanhshrink: 1.0,
    nn.Softsign: 1.0,
    # Beyond its threshold torch's softplus is the identity; at 20 the jump there is 2e-9 / beta.
    nn.Softplus: lambda m: 1.0 if m.threshold >= 20 and m.beta >= 0.1 else math.inf,
    nn.LogSigmoid: 1.0,
    nn.Softshrink: 1.0,
    nn.Sigmoid: 0.25,
    nn.Hardsigmoid: 1.0 / 6.0 * ROUND_UP**2,
    nn.Hardswish: 1.5,
    nn.SiLU: SILU_SLOPE,
    nn.Mish: MISH_SLOPE,
    nn.SELU: SELU_SLOPE,
    nn.GELU: lambda m: GELU_SLOPE if m.approximate == "none" else GELU_TANH_SLOPE,
    nn.LeakyReLU: lambda m: _at_least_one(m.negative_slope),
    nn.PReLU: lambda m: _at_least_one(float(max_abs(m.weight.detach()))),
    nn.ELU: lambda m: _at_least_one(m.alpha),
    nn.CELU: lambda m: 1.0 if m.alpha > 0 else math.inf,
}


def _register(cls: type[nn.Module], slope: float | Callable[..., float]) -> None:
    @register_bound(cls)
    def _(module: nn.Module, ask: Ask) -> Bound:
        passage = unchanged if cls is nn.Identity and ask.follows else None
        return Bound(slope(module) if callable(slope) else slope, "largest slope", passage=passage)


for _cls, _slope in SLOPES.items():
    _register(_cls, _slope)


def slope_of_function(fn: object) -> float | None:
    """Largest slope of a functional activation that torch's Transformer layers store."""
    return {F.relu: 1.0, F.gelu: GELU_SLOPE}.get(fn)  # type: ignore[call-overload]


@register_bound(nn.Softmax)
def _(module: nn.Softmax, ask: Ask) -> Bound:
    # Over another dimension than the last one softmax mixes tokens.
    if module.dim != -1:
        ask.only("l2", "linf", instead="nn.Softmax(dim=-1)")
        # Without a dimension torch takes the first of one or three, else the second.
        dim = (0 if ask.dims in (None, 1, 3) else 1) if module.dim is None else module.dim
        ask.along(dim)
    return Bound(0.5, "softmax is 1/2-Lipschitz in every l_p")
