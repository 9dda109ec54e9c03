"""log|det(I + J)| of a residual block, by four methods, and which of them is affordable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lipformer.flows.log_det.closed_form import closed_form_jacobian, has_closed_form
from lipformer.flows.log_det.exact import (
    causal_log_det,
    check_causal,
    exact_log_det,
    lazy_exact_log_det,
    log_det_of,
    supports_causal,
)
from lipformer.flows.log_det.series import (
    EXACT_TERMS,
    Terms,
    all_terms,
    default_terms,
    roulette_terms,
    signs,
    token_ramp,
    truncation_error,
    weighted_series,
)
from lipformer.flows.masked_branch import (
    check_batch_first,
    check_tokens,
    derivatives,
    masked_branch,
    refuse_dropout,
)
from lipformer.functional.rounding import round_up
from lipformer.layers import Contractive, layout
from lipformer.layers.branch import Call

METHODS = ("exact", "causal", "series", "roulette")
AUTO = "auto"
# The largest T D whose dense Jacobian "auto" takes in eval mode: a tenth of a second for each sample and
# block on one core, as much as the series that is used beyond it (docs/flows.md).
EXACT_LIMIT = 1024
# That series: its probes, their seed, the nats that truncation may cost an event, and its most terms.
_PROBES = 16
_SEED = 0
_NATS = 0.1
_MOST_TERMS = 200


@dataclass(frozen=True)
class LogDet:
    """A log-determinant for each sample, with its errors.

    Attributes:
        value: (B,), differentiable, in at least float32.
        truncation_error: (B,), proven: what leaving out terms can have cost the mean over all probes.
            Zeros for "exact" and "causal", None for "roulette", which leaves out none in the mean.
        standard_error: (B,), estimated from the spread of the probes: the noise of their mean. Zeros
            for "exact" and "causal", None for a single probe. The rounding of floats is in neither.
        terms: the number of terms of the series that were evaluated, 0 for "exact" and "causal".
        method: how it was found.
    """

    value: Tensor
    truncation_error: Tensor | None
    standard_error: Tensor | None
    terms: int
    method: str

    @classmethod
    def exactly(cls, value: Tensor, method: str) -> LogDet:
        """One without an error."""
        zero = torch.zeros_like(value).detach()
        return cls(value, zero, zero, 0, method)

    @classmethod
    def total(cls, value: Tensor, parts: Sequence[LogDet]) -> LogDet:
        """That of a stack, of whose parts the errors are given: they add up at the most."""

        def added(errors: list[Tensor | None]) -> Tensor | None:
            known = [error for error in errors if error is not None]
            zero = torch.zeros_like(value).detach()
            return sum(known, zero) if len(known) == len(errors) else None

        return cls(
            value,
            added([part.truncation_error for part in parts]),
            added([part.standard_error for part in parts]),
            max((part.terms for part in parts), default=0),
            ", ".join(sorted({part.method for part in parts})),
        )

    def detach(self) -> LogDet:
        """The same without a graph."""
        return replace(self, value=self.value.detach())


def residual_log_det(
    branch: nn.Module,
    x: Tensor,
    *,
    method: str,
    rate: float,
    key_padding_mask: Tensor | None = None,
    context: Tensor | None = None,
    generator: torch.Generator | None = None,
    terms: int | None = None,
    probes: int = 1,
) -> tuple[Tensor, LogDet]:
    r"""The branch's output and :math:`\log|\det(I + \partial f/\partial x)|` of each sample.

    Source: docs/theory, section 6. "exact" takes the dense Jacobian, "causal" (exact too) the own-token
    blocks of a branch that :func:`supports_causal`; "series" and "roulette" are estimates from random
    probes, truncated or unbiased, whose gradient equals that of the log-determinant in the mean.
    "auto" is "causal" where the branch supports it; else in training mode "roulette", in eval mode
    "exact" up to T D = 1024 and beyond "series" with at least 16 probes and 0.1 nats of truncation.
    Normalised weights are computed once. Runs without autocast.

    Args:
        branch: f, keeps the shape of x and treats the samples of a batch alike and alone.
        x: (B, T, D).
        method: one of METHODS, or "auto".
        rate: L < 1, a certified constant of f in some norm, or of each token's own map for a causal
            branch (``Contractive.coeff``).
        key_padding_mask: (B, T), True (or -inf) at padded tokens, which count as absent.
        context: (B, C) of a branch that takes one: the Jacobian is that in x.
        generator: of the probes and of roulette's number of terms. None: in training mode torch's
            default ones; in eval mode a fixed seed, and the same probes for every sample, so that equal
            events get equal numbers. On a GPU None is what training wants: a generator of the CPU costs
            a copy to the GPU, one of the GPU makes roulette's host wait.
        terms: "series": the number of terms, by default as many as the rate needs (0.01 nats per
            dimension, at most 40). "roulette": the number of terms before chance decides, default 2.
            The others have no use for it, nor has the series of "auto".
        probes: random probes that an estimate averages over.

    Returns:
        f(x) (B, T, D), zero at padded tokens, and the :class:`LogDet`, from one evaluation of f
        ("roulette" evaluates the samples that go on longest once more, and "exact" in eval mode all:
        its gradient takes no memory until it is asked for).

    Example:
        >>> import lipformer as lf
        >>> branch = lf.Contractive(lf.FeedForward(4, 8), 0.5)
        >>> out, log_det = residual_log_det(branch, torch.zeros(3, 2, 4), method="causal", rate=0.5)
        >>> out.shape, log_det.value.shape, log_det.truncation_error.tolist()
        (torch.Size([3, 2, 4]), torch.Size([3]), [0.0, 0.0, 0.0])
    """
    check_tokens(x)
    if method not in (*METHODS, AUTO):
        raise ValueError(f"method must be one of {', '.join(METHODS)}, {AUTO}, got {method!r}")
    if not 0.0 < rate < 1.0:
        raise ValueError(f"rate must be a certified constant in (0, 1), got {rate!r}")
    for name, number in (("terms", EXACT_TERMS if terms is None else terms), ("probes", probes)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")
    check_batch_first(branch)
    refuse_dropout(branch)
    call = Call(layout.padding(key_padding_mask, x), context=context)
    if method == "causal":
        check_causal(branch)
    elif method == AUTO:
        method = automatic(branch, x)
        if method == "series":
            probes = max(probes, _PROBES)
            terms = default_terms(rate, _NATS / x.shape[1:].numel(), _MOST_TERMS)
    sources = (x, context, *branch.parameters())
    tracked = any(t.requires_grad for t in sources if t is not None)
    gradient = torch.is_grad_enabled() and tracked
    dtype = _dtype(branch, x)
    with derivatives(branch, x):
        point = _usable(x, dtype)
        if context is not None:
            call = call._replace(context=_usable(context, dtype))
        if method == "causal":
            with torch.set_grad_enabled(gradient):
                out, value = causal_log_det(branch, point, call)
            log_det = LogDet.exactly(value, method)
        elif method == "exact" and has_closed_form(branch):
            with torch.set_grad_enabled(gradient):
                out, jacobian = closed_form_jacobian(branch, point, call.key_padding_mask)
                log_det = LogDet.exactly(log_det_of(jacobian), method)
        elif method == "exact" and not branch.training:
            with torch.set_grad_enabled(gradient):
                out = masked_branch(branch, point, call)
                log_det = LogDet.exactly(lazy_exact_log_det(branch, point, call), method)
        else:
            if not point.requires_grad:
                point = point.detach().requires_grad_()
            out = masked_branch(branch, point, call)
            if method == "exact":
                log_det = LogDet.exactly(exact_log_det(out, point, create_graph=gradient), method)
            else:
                log_det = _estimate(
                    method, branch, out, point, call, rate, generator, terms, probes, gradient
                )
    return (out, log_det) if gradient else (out.detach(), log_det.detach())


def automatic(branch: nn.Module, x: Tensor) -> str:
    """The method that "auto" stands for: exact if that is affordable, in training else unbiased."""
    if supports_causal(branch):
        return "causal"
    if branch.training:
        return "roulette"
    return "exact" if x.shape[1:].numel() <= EXACT_LIMIT else "series"


def _estimate(
    method: str,
    branch: nn.Module,
    out: Tensor,
    x: Tensor,
    call: Call,
    rate: float,
    generator: torch.Generator | None,
    terms: int | None,
    probes: int,
    gradient: bool,
) -> LogDet:
    """ "series" or "roulette": they differ in the weights of the terms and in what can be promised."""
    fixed = generator is None and not branch.training
    if fixed:
        generator = torch.Generator().manual_seed(_SEED)
    if method == "series":
        drawn = all_terms(default_terms(rate) if terms is None else terms, x)
    else:
        drawn = roulette_terms(x, rate, EXACT_TERMS if terms is None else terms, generator)
    values = _of_probes(branch, out, x, call, drawn, generator, probes, fixed, gradient)
    value, count = values.mean(0), len(drawn.weights)
    noise = values.detach().std(0) / probes**0.5 if probes > 1 else None
    if method == "roulette":
        return LogDet(value, None, noise, count, method)
    padding = call.key_padding_mask
    valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if padding is None else ~padding
    dimensions = valid.sum(-1).double() * x.shape[2]
    bound = round_up(truncation_error(rate, count) * dimensions, value.dtype)
    return LogDet(value, bound, noise, count, method)


def _of_probes(
    branch: nn.Module,
    out: Tensor,
    x: Tensor,
    call: Call,
    terms: Terms,
    generator: torch.Generator | None,
    probes: int,
    shared: bool,
    gradient: bool,
) -> Tensor:
    """The estimate of each probe, (probes, B); ``shared`` ones are the same for every sample."""
    # A bound on own tokens alone says nothing about the size of J's powers, hence of the noise; and
    # what earlier tokens do is noise in every causal branch.
    own_only = isinstance(branch, Contractive) and branch.norms == ("self",)
    ramp = token_ramp(x) if own_only or supports_causal(branch) else None

    def restrict(index: Tensor) -> tuple[Tensor, Tensor]:
        some = x.detach()[index].requires_grad_()
        return masked_branch(branch, some, call.select(index)), some

    like = out[:1] if shared else out
    estimates = [
        weighted_series(
            out,
            x,
            signs(like, generator).expand_as(out),
            terms,
            ramp=ramp,
            restrict=restrict,
            gradient=gradient,
        )
        for _ in range(probes)
    ]
    return torch.stack(estimates)


def _usable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x for derivatives, which tensors of inference mode have not."""
    return (x.clone() if x.is_inference() else x).to(dtype)


def _dtype(branch: nn.Module, x: Tensor) -> torch.dtype:
    """The dtype to run in: that of x, or under autocast that of the weights, which it reconciles."""
    dtypes = {p.dtype for p in branch.parameters() if p.is_floating_point()}
    if len(dtypes) == 1 and torch.is_autocast_enabled(x.device.type):
        return dtypes.pop()
    return x.dtype
