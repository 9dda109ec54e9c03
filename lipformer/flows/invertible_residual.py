"""Residual blocks that can be inverted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound, weighted_sum
from lipformer.certificate.bounds import passage_of
from lipformer.certificate.paths import beside
from lipformer.flows.log_det.exact import check_causal
from lipformer.flows.log_det.methods import AUTO, METHODS, LogDet, residual_log_det
from lipformer.flows.masked_branch import (
    check_batch_first,
    check_tokens,
    masked_branch,
    refuse_dropout,
    wide_call,
)
from lipformer.flows.solve.causal import solve_causal
from lipformer.flows.solve.fixed_point import Branch, Record, solve_fixed_point
from lipformer.flows.solve.implicit import attach_gradient
from lipformer.flows.solve.norms import DUAL_MEASURES, MEASURES
from lipformer.layers import Contractive, frozen, layout
from lipformer.layers.branch import Call, check_context, context_dim_of
from lipformer.layers.decoding import Cache, register_step, select_cache, step_module
from lipformer.layers.freezing import Freezable
from lipformer.layers.layer import bake_in_place, register_bake
from lipformer.layers.layout import without_padding
from lipformer.layers.residual import same_shape

MODES = ("norm", "causal")


class InvertibleResidual(Freezable):
    r"""Invertible residual block y = x + f(x), where f = coeff / UB(branch) times the branch.

    Mode "norm": f has constant at most c = coeff < 1 in some norm, so the block has constant at
    most 1 + c and its inverse 1/(1 - c) in that norm. Mode "causal" (Theorem E): only each token's own
    map has constant at most c, which shrinks the branch far less; the inverse goes token by token, and
    an error in one token may grow in later ones. A branch of bound 0 is only multiplied by c: if no
    token has an effect on itself any factor is valid, but with a large one errors could grow without
    limit. The bound UB is recomputed from the weights in each forward pass, so the condition holds after
    every optimiser step, load or copy.

    Tokens are batch first, (B, T, D). Padded tokens pass unchanged and influence no other. A branch that
    takes a context (B, C), such as one with a :class:`ContextBias`, gets the given context; the
    block is invertible in x for every context.

    Args:
        branch: any certifiable module that keeps the shape of its input; in mode "causal" causal or
            token-wise all the way down. Attention needs a length (see Contractive) and
            batch_first=True.
        coeff: c, between 0 and 1.
        mode: "norm" or "causal".
        norm: mode "norm": "l2", "token", "linf", or None for the one with the smallest bound.
        seq_len: the largest number of tokens.
        log_det: default method, "exact", "causal", "series" or "roulette". None is "auto": "causal"
            where the branch is causal, else "roulette" in training; in eval mode "exact" if affordable,
            else "series" (:func:`residual_log_det`). In eval mode "series" and "roulette" are replaced
            by "auto" too, unless the call gives a generator or names the method.
        terms: terms of "series", or the terms that "roulette" always takes; None for their defaults.
        probes: random probes of the estimators.
        accelerate: use Anderson acceleration in the inverse; None: only if simpler steps turn out
            to be slow, which is rare for attention.

    Attributes:
        branch: f, a Contractive.
        context_dim: C of the contexts that the branch takes, or None.
        record: the :class:`Record` of the last inverse, or None; neither saved nor copied.
        log_det_record: the :class:`LogDet` of the last log-determinant, without its graph, likewise.

    Example:
        >>> import lipformer as lf
        >>> _ = torch.manual_seed(0)
        >>> attention = lf.L2MultiheadAttention(8, 2, batch_first=True)
        >>> block = InvertibleResidual(attention, coeff=0.9, seq_len=16).double()
        >>> x = torch.randn(3, 16, 8, dtype=torch.float64)
        >>> bool((block.inverse(block(x), tol=1e-12) - x).abs().max() < 1e-11)
        True
    """

    def __init__(
        self,
        branch: nn.Module,
        coeff: float = 0.9,
        mode: str = "norm",
        *,
        norm: str | None = None,
        seq_len: int | None = None,
        log_det: str | None = None,
        terms: int | None = None,
        probes: int = 1,
        accelerate: bool | None = None,
    ) -> None:
        super().__init__()
        coeff = _contracting(coeff)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        allowed = (None, "self") if mode == "causal" else (None, *MEASURES)
        if norm not in allowed:
            raise ValueError(f"norm must be one of {allowed} in mode {mode!r}, got {norm!r}")
        if log_det is not None and log_det not in METHODS:
            raise ValueError(f"log_det must be one of {', '.join(METHODS)} or None, got {log_det!r}")
        check_batch_first(branch)
        for name, part in branch.named_modules():
            if getattr(part, "inplace", False) is True:
                raise ValueError(
                    f"{name or 'branch'} ({type(part).__name__}) overwrites the block's input: build "
                    "it with inplace=False"
                )
        norm = "self" if mode == "causal" else norm
        self.branch: nn.Module = Contractive(branch, coeff, norm=norm, seq_len=seq_len)
        self.context_dim = context_dim_of(branch)
        self.mode = mode
        if log_det == "causal":
            check_causal(branch)
        self.log_det_method = log_det or AUTO
        self.terms = terms
        self.probes = probes
        self.accelerate = accelerate
        self.record: Record | None = None
        self.log_det_record: LogDet | None = None
        self._baked: tuple[float, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "record": None, "log_det_record": None}

    @property
    def coeff(self) -> float:
        """c, read from the branch: solver and log-determinants use the same value."""
        if isinstance(self.branch, Contractive):
            return self.branch.coeff
        assert self._baked is not None
        return self._baked[0]

    @coeff.setter
    def coeff(self, coeff: float) -> None:
        if not isinstance(self.branch, Contractive):
            raise AttributeError(
                f"coeff of a baked block is in its weights: {self.coeff}, got {coeff!r}"
            )
        self.branch.coeff = _contracting(coeff)

    def norm_in_use(self) -> str:
        """The norm that the branch contracts in: "l2", "token", "linf", or "self" in mode "causal"."""
        if isinstance(self.branch, Contractive):
            return self.derived(self.branch.norm_in_use)
        assert self._baked is not None
        return self._baked[1]

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """x + f(x), (B, T, D) -> (B, T, D).

        Args:
            x: (B, T, D).
            key_padding_mask: (B, T), True at padded tokens.
            context: (B, C), of a branch that takes one.
        """
        return x + masked_branch(self.branch, x, self._call(x, key_padding_mask, context))

    def _call(self, x: Tensor, key_padding_mask: Tensor | None, context: Tensor | None) -> Call:
        """What goes along with the tokens, checked."""
        check_tokens(x)
        check_context(self, context, x)
        return Call(layout.padding(key_padding_mask, x), context=context)

    def inverse(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        tol: float = 1e-6,
        max_iter: int = 1000,
    ) -> Tensor:
        """Finds x with forward(x) = y, differentiable once; ``self.record`` has the error bound.

        Runs without autocast, in the dtype of the weights. Do not compile it: torch.compile would unroll
        the iterations for a minute and gain nothing. Compile the code around it.

        Args:
            y: (B, T, D), finite.
            key_padding_mask: as in forward.
            context: as in forward; differentiable too.
            tol: tolerance of the error relative to max(1, max|y|), in the norm in use. If the dtype
                cannot reach it, the inverse is as exact as possible, and the record says how exact.
            max_iter: most evaluations of the branch (mode "causal": for each token).

        Raises:
            NotConverged: the tolerance was not met.
            ValueError: y has NaN or infinite entries.
            RuntimeError: dropout is active.
        """
        x, self.record = self.inverse_with_record(
            y, key_padding_mask, context, tol=tol, max_iter=max_iter
        )
        return x

    def inverse_with_record(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        tol: float = 1e-6,
        max_iter: int = 1000,
    ) -> tuple[Tensor, Record]:
        """The inverse and its record; see :meth:`inverse`."""
        call = self._call(y, key_padding_mask, context)
        refuse_dropout(self.branch)
        padding = call.key_padding_mask

        with torch.autocast(y.device.type, enabled=False):
            y, call = self._in_own_dtype(y), self._call_in_own_dtype(call)

            def fn(x: Tensor) -> Tensor:
                return masked_branch(self.branch, x, call)

            def part(x: Tensor, index: Tensor) -> Tensor:
                return masked_branch(self.branch, x, call.select(index))

            sources = (y, call.context, *self.branch.parameters())
            tracked = torch.is_grad_enabled() and any(t.requires_grad for t in sources if t is not None)
            if tracked and _is_frozen(self):
                # What an outer freeze keeps must carry its gradient: computed here, not in the solve.
                fn(y.detach())
            with torch.no_grad(), frozen(self):
                norm = self.norm_in_use()
                x, record = self._solve(part, without_padding(y, padding), norm, tol, max_iter)
                x = x if padding is None else torch.where(padding.unsqueeze(-1), y, x)
            if not tracked:
                return x, record

            def solve_transposed(transposed: Branch, g: Tensor) -> Tensor:
                return self._solve(transposed, g, norm, tol, max_iter, transpose=True)[0]

            return attach_gradient(fn, y, x, solve_transposed), record

    def _solve(
        self,
        branch: Branch,
        y: Tensor,
        norm: str,
        tol: float,
        max_iter: int,
        *,
        transpose: bool = False,
    ) -> tuple[Tensor, Record]:
        """Solves x + f(x) = y, or with the transposed Jacobian for f, at the certified rate."""
        options: dict[str, Any] = {"tol": tol, "max_iter": max_iter, "accelerate": self.accelerate}
        # Of a gradient nothing is promised, and autograd runs in one precision.
        options["promise"] = not transpose
        if norm != "self":
            measure = (DUAL_MEASURES if transpose else MEASURES)[norm]
            return solve_fixed_point(branch, y, rate=self.coeff, measure=measure, **options)
        if not transpose:
            return solve_causal(branch, y, rate=self.coeff, **options)
        # Transposed, each token depends on later ones: causal in reverse order.
        x, record = solve_causal(_reversed(branch), y.flip(1), rate=self.coeff, **options)
        return x.flip(1), record

    def forward_and_log_det(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """forward(x) and log|det dy/dx| (B,), from one evaluation of the branch at x."""
        out, log_det = self._log_det(x, key_padding_mask, context, method, generator)
        return x + out, log_det.value

    def inverse_and_log_det(
        self,
        y: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
        tol: float = 1e-6,
        max_iter: int = 1000,
    ) -> tuple[Tensor, Tensor]:
        """inverse(y) = x and log|det dx/dy| (B,), minus the log-determinant of forward at x."""
        x = self.inverse(y, key_padding_mask, context, tol=tol, max_iter=max_iter)
        return x, -self._log_det(x, key_padding_mask, context, method, generator)[1].value

    def log_det(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        method: str | None = None,
        generator: torch.Generator | None = None,
    ) -> LogDet:
        """log|det dy/dx| at x with its errors; see :func:`residual_log_det`."""
        return self._log_det(x, key_padding_mask, context, method, generator)[1]

    def _log_det(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        context: Tensor | None,
        method: str | None,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, LogDet]:
        call = self._call(x, key_padding_mask, context)
        if method is None:
            method = self.log_det_method
            if method in ("series", "roulette") and not self.training and generator is None:
                method = AUTO
        out, log_det = residual_log_det(
            self.branch,
            x,
            method=method,
            rate=self.coeff,
            key_padding_mask=call.key_padding_mask,
            context=call.context,
            generator=generator,
            terms=self.terms,
            probes=self.probes,
        )
        self.log_det_record = log_det.detach()
        return out, log_det

    def step(
        self,
        x: Tensor,
        cache: Cache = None,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """forward of new tokens (B, T, D) of a causal block, and the new cache."""
        return step_module(self, x, cache, key_padding_mask, None, context)

    @torch.no_grad()
    def inverse_step(
        self,
        y: Tensor,
        cache: Cache = None,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        tol: float = 1e-6,
        max_iter: int = 1000,
    ) -> tuple[Tensor, Cache]:
        """inverse of new tokens (B, T, D) of a causal block; earlier ones are not evaluated again.

        Works in both modes, without gradients; the caches are those of :meth:`step`.

        Returns:
            The new tokens x and the new cache.
        """
        call = self._call(y, key_padding_mask, context)
        refuse_dropout(self.branch)
        padding = call.key_padding_mask

        with torch.autocast(y.device.type, enabled=False), frozen(self):
            y, call = self._in_own_dtype(y), self._call_in_own_dtype(call)

            def branch(x: Tensor, index: Tensor) -> Tensor:
                some = wide_call(call.select(index), x)
                out, _ = step_module(self.branch, x, select_cache(cache, index), *some)
                return without_padding(same_shape(x, out), some.key_padding_mask)

            clean = without_padding(y, padding)
            x, self.record = self._solve(branch, clean, self.norm_in_use(), tol, max_iter)
            _, cache = step_module(self.branch, x, cache, *call)
        return x if padding is None else torch.where(padding.unsqueeze(-1), y, x), cache

    def _in_own_dtype(self, y: Tensor) -> Tensor:
        """y in the dtype of the weights, which may be wider (under autocast) but not narrower."""
        own = next((p.dtype for p in self.branch.parameters() if p.is_floating_point()), y.dtype)
        if torch.promote_types(own, y.dtype) != own:
            raise ValueError(f"y must not be wider than the weights' dtype {own}, got {y.dtype}")
        return y.to(own)

    def _call_in_own_dtype(self, call: Call) -> Call:
        context = call.context
        return call if context is None else call._replace(context=self._in_own_dtype(context))

    def extra_repr(self) -> str:
        settings = f"coeff={self.coeff}, mode={self.mode!r}, log_det={self.log_det_method!r}"
        estimate = "" if self.terms is None else f", terms={self.terms}"
        return f"{settings}{estimate}" + ("" if self.probes == 1 else f", probes={self.probes}")


def _contracting(coeff: float) -> float:
    """Returns the coefficient; raises unless it is one of a contraction."""
    if not 0.0 < coeff < 1.0:
        raise ValueError(f"coeff must lie between 0 and 1, else no inverse exists, got {coeff!r}")
    return float(coeff)


def _is_frozen(module: nn.Module) -> bool:
    return any(isinstance(part, Freezable) and part._freezing for part in module.modules())


def _reversed(branch: Branch) -> Branch:
    return lambda x, index: branch(x.flip(1), index).flip(1)


@register_bound(InvertibleResidual)
def _(module: InvertibleResidual, ask: Ask) -> Bound:
    branch = ask.child(module.branch, "branch")
    bound = weighted_sum((1.0, 1.0), (None, branch), "residual 1 + L")
    # At padded tokens the branch gives nothing, and the paths through it may be any.
    passage = partial(beside, branch=passage_of(branch)) if ask.follows else None
    return replace(bound, passage=passage)


@register_bake(InvertibleResidual)
def _(module: InvertibleResidual) -> nn.Module:
    # The baked branch no longer knows its constant and norm, which the inverse needs.
    module._baked = module.coeff, module.norm_in_use()
    training = module.branch.training
    module.branch = bake_in_place(module.branch)
    module.branch.training = training  # it decides how log-determinants are found
    return module


@register_step(InvertibleResidual)
def _(module: InvertibleResidual, x: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Cache]:
    call = module._call(x, call.key_padding_mask, call.context)
    padding = call.key_padding_mask
    out, cache = step_module(module.branch, without_padding(x, padding), cache, *call)
    return x + without_padding(same_shape(x, out), padding), cache
