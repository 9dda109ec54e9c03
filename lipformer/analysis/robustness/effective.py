"""A model as the function that it runs: its effective weights, in exact arithmetic."""

from __future__ import annotations

import copy

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from lipformer.analysis.inputs import refuse_autocast
from lipformer.certificate import NotCertifiable
from lipformer.certificate.linear_rules import coefficients, known_coefficient
from lipformer.certificate.rules import kind_of
from lipformer.layers.layer import bake_in_place, make_plain


class _Bounded(nn.Module):
    """Parametrization of a weight that is as it is, and known to have at most this norm."""

    def __init__(self, coeff: float) -> None:
        super().__init__()
        self.coeff = coeff

    def forward(self, weight: Tensor) -> Tensor:
        return weight


coefficients.register(_Bounded)(lambda bounded: bounded.coeff)


@torch.no_grad()
def effective(module: nn.Module) -> nn.Module:
    """The module in float64 with the weights that it multiplies by: itself, or a copy.

    A bounded weight or a factor is derived in the module's own dtype and then widened, which is exact.
    Derived anew in float64 it would be another one, and in bfloat16 so far off that labels change.

    Raises:
        NotCertifiable: it cannot be had with plain weights, or autocast is on, which rounds them.
    """
    refuse_autocast(module)
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    if all(t.dtype == torch.float64 for t in tensors):
        return module
    made = copy.deepcopy(module)
    try:
        done = {part: bounded for part in made.modules() if (bounded := _bounded(part)) is not None}
        baked = bake_in_place(made, done)
    except TypeError as error:
        raise NotCertifiable(
            "", kind_of(module), str(error), "layers that lipformer.bake knows"
        ) from error
    for part in baked.modules():
        make_plain(part, lambda last: not isinstance(last, _Bounded))
    return baked.double()


def _bounded(part: nn.Module) -> nn.Module | None:
    """A layer with its bounded weight as a plain one whose bound stays known, None for other layers."""
    coeff = known_coefficient(part)
    if coeff is None:
        return None
    plain = bake_in_place(part)
    parametrize.register_parametrization(plain, "weight", _Bounded(coeff))
    return plain
