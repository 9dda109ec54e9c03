"""log|det(I + J)| of a residual block, by four methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lipformer.estimates.jacobian_products import differentiable_kernels
from lipformer.flows.log_det.exact import causal_log_det, check_causal, exact_log_det, supports_causal
from lipformer.flows.log_det.series import (
    EXACT_TERMS,
    Terms,
    all_terms,
    default_terms,
    roulette_terms,
    round_up,
    signs,
    token_ramp,
    truncation_error,
    weighted_series,
)
from lipformer.flows.masked_branch import masked_branch
from lipformer.layers import Contractive, L2MultiheadAttention, frozen, layout

METHODS = ("exact", "causal", "series", "roulette")


@dataclass(frozen=True)
class LogDet:
    """A log-determinant for each sample.

    Attributes:
        value: (B,), differentiable, in at least float32.
        error_bound: (B,), what truncation can have cost the mean over the probes: zeros for "exact"
            and "causal", None for "roulette", which is unbiased. The noise of an estimate is not in it.
        terms: the number of terms of the series that were evaluated, 0 for "exact" and "causal".
    """

    value: Tensor
    error_bound: Tensor | None
    terms: int


def residual_log_det(
    branch: nn.Module,
    x: Tensor,
    *,
    method: str,
    rate: float,
    key_padding_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    terms: int | None = None,
    probes: int = 1,
) -> tuple[Tensor, LogDet]:
    r"""The branch's output and :math:`\log|\det(I + \partial f/\partial x)|` of each sample.

    Source: docs/theory, section 6. "exact" takes the dense Jacobian, "causal" (exact too) the own-token
    blocks of a branch that :func:`supports_causal`; "series" and "roulette" are estimates from random
    probes, truncated or unbiased, whose gradient equals that of the log-determinant in the mean.
    Normalised weights are computed once. Runs without autocast.

    Args:
        branch: f, keeps the shape of x and treats the samples of a batch alike and alone.
        x: (B, T, D).
        method: one of METHODS.
        rate: L < 1, a certified constant of f in some norm, or of each token's own map for a causal
            branch (``Contractive.coeff``).
        key_padding_mask: (B, T), True (or -inf) at padded tokens, which count as absent.
        generator: of the probes and of roulette's number of terms; torch's default ones if None. On a
            GPU that is what training wants: a generator of the CPU costs a copy to the GPU, one of the
            GPU makes roulette's host wait.
        terms: "series": the number of terms, by default as many as the rate needs (0.01 nats per
            dimension, at most 40). "roulette": the number of terms before chance decides, default 2.
            The other two have no use for it.
        probes: random probes that an estimate averages over.

    Returns:
        f(x) (B, T, D), zero at padded tokens, and the :class:`LogDet`, from one evaluation of f
        ("roulette" evaluates the samples that go on longest once more).

    Example:
        >>> import lipformer as lf
        >>> branch = lf.Contractive(lf.FeedForward(4, 8), 0.5)
        >>> out, log_det = residual_log_det(branch, torch.zeros(3, 2, 4), method="causal", rate=0.5)
        >>> out.shape, log_det.value.shape, log_det.error_bound.tolist()
        (torch.Size([3, 2, 4]), torch.Size([3]), [0.0, 0.0, 0.0])
    """
    _check(branch, x, method, rate, generator, terms, probes)
    padding = layout.padding(key_padding_mask, x)
    tracked = any(t.requires_grad for t in (x, *branch.parameters()))
    gradient = torch.is_grad_enabled() and tracked
    dtype = _dtype(branch, x)
    with (
        torch.inference_mode(False),
        differentiable_kernels(),
        torch.autocast(x.device.type, enabled=False),
        frozen(branch),
    ):
        point = (x.clone() if x.is_inference() else x).to(dtype)
        if method == "causal":
            with torch.set_grad_enabled(gradient):
                out, value = causal_log_det(branch, point, padding)
            log_det = LogDet(value, torch.zeros_like(value), 0)
        else:
            if not point.requires_grad:
                point = point.detach().requires_grad_()
            out = masked_branch(branch, point, padding)
            if method == "exact":
                value = exact_log_det(out, point, create_graph=gradient)
                log_det = LogDet(value, torch.zeros_like(value), 0)
            else:
                log_det = _estimate(
                    method, branch, out, point, padding, rate, generator, terms, probes, gradient
                )
    if gradient:
        return out, log_det
    return out.detach(), LogDet(log_det.value.detach(), log_det.error_bound, log_det.terms)


def _estimate(
    method: str,
    branch: nn.Module,
    out: Tensor,
    x: Tensor,
    padding: Tensor | None,
    rate: float,
    generator: torch.Generator | None,
    terms: int | None,
    probes: int,
    gradient: bool,
) -> LogDet:
    """ "series" or "roulette": they differ in the weights of the terms and in what can be promised."""
    if method == "series":
        drawn = all_terms(default_terms(rate) if terms is None else terms, x)
    else:
        drawn = roulette_terms(x, rate, EXACT_TERMS if terms is None else terms, generator)
    count = len(drawn.weights)
    value = _mean_of_probes(branch, out, x, padding, drawn, generator, probes, gradient)
    if method == "roulette":
        return LogDet(value, None, count)
    valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if padding is None else ~padding
    dimensions = valid.sum(-1).double() * x.shape[2]
    bound = round_up(truncation_error(rate, count) * dimensions, value.dtype)
    return LogDet(value, bound, count)


def _mean_of_probes(
    branch: nn.Module,
    out: Tensor,
    x: Tensor,
    padding: Tensor | None,
    terms: Terms,
    generator: torch.Generator | None,
    probes: int,
    gradient: bool,
) -> Tensor:
    # A bound on own tokens alone says nothing about the size of J's powers, hence of the noise; and
    # what earlier tokens do is noise in every causal branch.
    own_only = isinstance(branch, Contractive) and branch.norms == ("self",)
    ramp = token_ramp(x) if own_only or supports_causal(branch) else None

    def restrict(index: Tensor) -> tuple[Tensor, Tensor]:
        some = x.detach()[index].requires_grad_()
        return masked_branch(branch, some, None if padding is None else padding[index]), some

    estimates = [
        weighted_series(
            out, x, signs(out, generator), terms, ramp=ramp, restrict=restrict, gradient=gradient
        )
        for _ in range(probes)
    ]
    return torch.stack(estimates).mean(0)


def _dtype(branch: nn.Module, x: Tensor) -> torch.dtype:
    """The dtype to run in: that of x, or under autocast that of the weights, which it reconciles."""
    dtypes = {p.dtype for p in branch.parameters() if p.is_floating_point()}
    if len(dtypes) == 1 and torch.is_autocast_enabled(x.device.type):
        return dtypes.pop()
    return x.dtype


def _check(
    branch: nn.Module,
    x: Tensor,
    method: str,
    rate: float,
    generator: torch.Generator | None,
    terms: int | None,
    probes: int,
) -> None:
    """Raises on arguments that have no answer."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if not isinstance(x, Tensor) or x.ndim != 3 or not x.is_floating_point():
        given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a floating-point tensor (B, T, D), got {given}")
    if not 0.0 < rate < 1.0:
        raise ValueError(f"rate must be a certified constant in (0, 1), got {rate!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    for name, number in (("terms", terms), ("probes", probes)):
        if number is None and name == "terms":
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {number!r}")
    for path, module in branch.named_modules():
        if getattr(module, "batch_first", True) is False:
            raise ValueError(
                f"events are (B, T, D), but {path or 'the branch'} ({type(module).__name__}) was built "
                "with batch_first=False; build it with batch_first=True"
            )
        dropout = (
            module.dropout
            if isinstance(module, L2MultiheadAttention)
            else module.p
            if isinstance(module, _DropoutNd)
            else 0.0
        )
        if module.training and dropout > 0:
            raise ValueError(
                f"{path or 'the branch'} ({type(module).__name__}) drops out at random in training mode "
                f"(p={dropout}): a density needs one fixed map; use dropout=0 or eval()"
            )
    if method == "causal":
        check_causal(branch)
