"""Certificates around an input: the moduli of `perturbation_bound` as the table of `certify`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipformer.analysis.inputs import check_samples, radii
from lipformer.analysis.robustness.perturbation import Step, modulus_of, tokens_for
from lipformer.certificate import Certificate, NotCertifiable
from lipformer.certificate.asking import register_local
from lipformer.functional.rounding import ROUND_UP


@register_local
@torch.no_grad()
def certify_at(module: nn.Module, x: Tensor, radius: float) -> Certificate:
    r"""Bounds the change of the output within a radius of x, over the radius: ``certify(at=)``.

    With the modulus m of :func:`perturbation_bound` the bound is the largest :math:`m(\epsilon) /
    \epsilon` of the samples of x. That of a part is the largest ratio of the change of its output to the
    change of its input.

    Args:
        module: whatever :func:`perturbation_bound` takes.
        x: independent samples (B, *).
        radius: epsilon > 0.
    """
    check_samples(x)
    if not len(x):
        raise ValueError(f"at must hold at least one sample, got shape {tuple(x.shape)}")
    _, step = modulus_of(module, tokens_for(module, x))
    step(radii(radius, x.shape[:1], x.device, "radius"))
    domain = f"for inputs within {radius:g} of the given x"
    return _row(step, "", domain, x.shape[1] if x.ndim == 3 else None)


def _row(step: Step, path: str, domain: str, seq_len: int | None) -> Certificate:
    """The certificate of a step that was asked, and of its parts."""
    assert step.seen is not None
    given, found, nearer = step.seen
    ratios = torch.where(given > 0, found / given, 0.0)
    worst = int(ratios.argmax())
    bound = float(ratios[worst]) * ROUND_UP
    if step.whole is not None:
        bound = min(bound, step.whole.bound)
    if not bound < math.inf:
        raise NotCertifiable(path, step.kind, f"its bound is {bound}", "a smaller radius")
    # A container is what it is whichever bound is smaller; a leaf says which theorem was.
    local = bool(nearer[worst]) and not (step.parts and step.whole is not None)
    theorem = step.theorem if local or step.whole is None else step.whole.theorem
    if step.parts:
        inner = [
            _row(part, f"{path}.{name}" if path else name, domain, seq_len) for name, part in step.parts
        ]
    else:
        inner = (
            [] if step.whole is None or local else [_moved(p, path, domain) for p in step.whole.parts]
        )
    return Certificate(bound, "l2", domain, seq_len, path, step.kind, theorem, tuple(inner))


def _moved(part: Certificate, path: str, domain: str) -> Certificate:
    """A part of a global certificate at its place in the whole model."""
    place = f"{path}.{part.path}" if path and part.path else path or part.path
    parts = tuple(_moved(inner, path, domain) for inner in part.parts)
    return Certificate(
        part.bound, part.norm, domain, part.seq_len, place, part.kind, part.theorem, parts
    )
