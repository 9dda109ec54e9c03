r"""How far a network's output can move when a few tokens of its input move.

Let k of n tokens change. A perturbation is followed in two parts, :math:`E = S + Q`: S lives on these k
tokens, Q anywhere, with :math:`\|S\|_F \le s` and :math:`\|Q\|_F \le q`. At first q = 0.

* A map of each token alone, of constant L, moves token i by at most
  :math:`L(\|S_i\| + \|Q_i\|)`, one that is none of the k by at most :math:`L \|Q_i\|`. Divided in the
  proportion of the two terms, this is a new S of at most L s and a new Q of at most L q:
  :math:`(s, q) \to (L s, L q)`.
* A residual :math:`a x + b f(x)` around a map f of all tokens keeps :math:`a S` where it is; the rest is
  :math:`a Q` and what f adds: :math:`(s, q) \to (a s, a q + b\, m(s + q))` for a modulus m of f.
* The mean of the tokens moves by at most
  :math:`\frac1n \|\sum_i S_i + \sum_i Q_i\| \le (\sqrt k s + \sqrt n q) / n`.

Without attention k tokens count k times 1/n, where the l2 norm alone gives :math:`\sqrt{k / n}`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipformer.analysis.robustness.lofast import Modulus
from lipformer.analysis.robustness.perturbation import Step, times
from lipformer.certificate import Ask
from lipformer.certificate.activations import SLOPES
from lipformer.certificate.torch_rules import DROPOUTS, chain, parts_of
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers import ConvexResidual, LipSwish, MaxMin, Residual, TokenMean
from lipformer.models.vision_transformer import Positions

_ALONE = (nn.Linear, nn.Identity, MaxMin, LipSwish, Positions, *SLOPES, *DROPOUTS)


def few_tokens_modulus(module: nn.Module, step: Step, tokens: int, count: int) -> Modulus:
    """Bounds of the output (B,) for steps of at most k tokens, each by at most eps, (B,) -> (B,).

    Args:
        module: tokens (B, N, D) to anything.
        step: its modulus in the l2 norm.
        tokens: k.
        count: n, the tokens of the input.
    """
    changed = min(tokens, count)

    def modulus(eps: Tensor) -> Tensor:
        s, q = times(math.sqrt(changed) * ROUND_UP)(eps), torch.zeros_like(eps)
        s, q = _through(module, step, s, q, changed, count)
        return (s + q) * ROUND_UP

    return modulus


def _through(
    module: nn.Module, step: Step, s: Tensor, q: Tensor, changed: int, count: int
) -> tuple[Tensor, Tensor]:
    if isinstance(module, TokenMean) and _keeps_forward(module, TokenMean):
        # While s is not zero, all modules so far kept the number of tokens.
        share = times(math.sqrt(changed) / max(count, module.least) * ROUND_UP)
        return torch.zeros_like(s), (share(s) + step(q)) * ROUND_UP
    if step.whole is not None and _alone(module):
        factor = times(step.whole.bound)
        return factor(s), factor(q)
    if type(module) is nn.Sequential:
        parts = parts_of(module)
        for name, part in step.parts:
            s, q = _through(parts[name], part, s, q, changed, count)
        return s, q
    if isinstance(module, Residual | ConvexResidual) and [name for name, _ in step.parts] == ["branch"]:
        kept, added = (
            (1.0, 1.0) if isinstance(module, Residual) else (1.0 - module.weight, module.weight)
        )
        spread = kept * q + added * step.parts[0][1]((s + q) * ROUND_UP)
        return kept * s * ROUND_UP, spread * ROUND_UP**2
    return torch.zeros_like(s), step((s + q) * ROUND_UP)


def _alone(module: nn.Module) -> bool:
    """Whether a module is known to treat each token alone."""

    def known(leaf: nn.Module) -> bool:
        if isinstance(leaf, Residual | ConvexResidual):
            return _keeps_forward(leaf, Residual, ConvexResidual) and _alone(leaf.branch)
        return _keeps_forward(leaf, *_ALONE)

    return all(map(known, chain(module, Ask("l2"))))


def _keeps_forward(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether it runs as one of the classes; a subclass may have a forward and a bound of its own."""
    return any(isinstance(module, c) and type(module).forward is c.forward for c in classes)
