"""Weights whose spectral norm is bounded, recomputed from the raw weight in every forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NoReturn, cast

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from lipformer.certificate import conv_bound
from lipformer.certificate.linear_rules import coefficients, repeats_pixels
from lipformer.functional import spectral_norm_bound
from lipformer.functional.rounding import subnormal, without_subnormals
from lipformer.functional.spectral.orthogonal import orthogonalised
from lipformer.layers.freezing import Freezable
from lipformer.layers.layer import Layer, plain_linear, register_bake

MODES = ("cap", "normalize", "orthogonal")


def rounding_margin(weight: Tensor) -> tuple[float, float]:
    r"""How a norm grows by multiplying a weight with a number: :math:`\|fl(sW)\| \le (1+r)\|sW\| + a`.

    An entry is off by at most :math:`u |sW_{ij}|`, with u = eps/2 of the weight's dtype, and below the
    range of the dtype by half its smallest number. So the error is at most
    :math:`u \sqrt{\mathrm{rank}} \|sW\|` and half that number times :math:`\sqrt{mn}` in the Frobenius
    norm. The norm of a convolution is at most :math:`\sqrt{\mathrm{taps}}` times that of its kernel as a
    matrix, and not below it. The number s and the product, in at least float32, cost a few eps of that.

    Args:
        weight: (out, in, *taps), for its shape and dtype.

    Returns:
        r and a.
    """
    taps = math.prod(weight.shape[2:])
    rank = min(weight.shape[0], math.prod(weight.shape[1:]))
    wide = torch.promote_types(weight.dtype, torch.float32)
    unit = torch.finfo(weight.dtype).eps / 2.0
    relative = unit * math.sqrt(rank * taps) + 4.0 * torch.finfo(wide).eps
    least = (subnormal(weight.dtype) + subnormal(wide)) / 2.0
    return relative, least * math.sqrt(weight.numel() * taps)


class SpectralBound(Freezable):
    r"""Parametrization :math:`W \mapsto s W` with :math:`\|sW\| \le c`.

    :math:`s = c/\mu` ("normalize") or :math:`\min(1, c/\mu)` ("cap"), with :math:`\mu \ge \|W\|` by
    :func:`lipformer.functional.spectral_norm_bound`, through which gradients flow. "orthogonal" is
    "normalize" of a matrix whose singular values were drawn together before, by
    :func:`lipformer.functional.spectral.orthogonal.orthogonalised`. There is no state: the constant
    holds after an optimiser step, in eval, after load_state_dict, in copies and averages.

    Args:
        coeff: :math:`c > 0`.
        mode: "cap", "normalize" or "orthogonal".
        measure: upper bound on the weight's norm as a linear map, the spectral norm by default.
    """

    def __init__(
        self,
        coeff: float = 1.0,
        mode: str = "cap",
        measure: Callable[[Tensor], Tensor] = spectral_norm_bound,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.certified_coeff = coeff
        self.mode = mode
        self.measure = measure

    @property
    def certified_coeff(self) -> float:
        """c."""
        return self._coeff

    @certified_coeff.setter
    def certified_coeff(self, coeff: float) -> None:
        if not 0.0 < coeff < math.inf:
            raise ValueError(f"coeff must be positive and finite, got {coeff!r}")
        self._coeff = float(coeff)

    def forward(self, weight: Tensor) -> Tensor:
        """Scales a raw weight (out, in, *)."""
        if weight.ndim != 2 and self.measure is spectral_norm_bound:
            raise ValueError(
                f"SpectralBound needs a matrix, got shape {tuple(weight.shape)}; for a convolution use "
                "lipformer.spectral_bound(module)"
            )
        if parametrize._cache_enabled:
            raise RuntimeError(
                "torch.nn.utils.parametrize.cached() keeps a bounded weight although the raw one may "
                "change, and its bound with it; use lipformer.frozen(module), inside which weights stay"
            )
        return self.derived(lambda: self._bounded(weight), (weight,))

    def _bounded(self, weight: Tensor) -> Tensor:
        if self.mode == "orthogonal":
            weight = orthogonalised(weight)
        return self.scaled(weight, self.factor(self.measure(weight), weight))

    def factor(self, bound: Tensor, weight: Tensor) -> Tensor:
        """s (*,) for weights like ``weight``, in shape and dtype, of norms at most ``bound`` (*,)."""
        relative, absolute = rounding_margin(weight)
        target = (self.certified_coeff - absolute) / (1.0 + relative)
        if not target > 0.0:
            raise ValueError(
                f"a norm of {self.certified_coeff:g} cannot be kept by a weight of shape "
                f"{tuple(weight.shape)} in {weight.dtype}: rounding its entries may add {absolute:.3g}; "
                "use a larger coeff or a wider dtype"
            )
        wide = torch.promote_types(weight.dtype, torch.float32)
        # Weights near zero are left alone; the smaller of the two, so that they keep the bound too.
        bound = F.threshold(bound, min(1e-30, target), target)
        scale = (bound / target).reciprocal()
        if self.mode == "cap":
            scale = scale.clamp_max(1.0)
        return without_subnormals(scale, wide).to(wide)

    @staticmethod
    def scaled(weight: Tensor, factor: Tensor) -> Tensor:
        """The weight times a :meth:`factor`, rounded once: half precision may not hold the factor."""
        return (weight.to(factor.dtype) * factor).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Assigning a weight stores it raw."""
        return weight

    def extra_repr(self) -> str:
        return f"coeff={self.certified_coeff}, mode={self.mode!r}"


coefficients.register(SpectralBound)(lambda bound: bound.certified_coeff)


def _conv_norm(module: nn.Conv1d | nn.Conv2d, weight: Tensor) -> Tensor:
    """A bound of the convolution with this kernel, by the settings that the module has now."""
    if repeats_pixels(module):
        raise ValueError(
            "a convolution needs padding_mode='zeros', or circular padding with stride 1 that keeps "
            f"the size, got padding_mode={module.padding_mode!r}, stride={module.stride}, "
            f"padding={module.padding!r}"
        )
    return conv_bound(weight, module.groups, module.stride, module.dilation)


def spectral_bound(
    module: nn.Module, name: str = "weight", coeff: float = 1.0, mode: str = "cap"
) -> nn.Module:
    """Keeps the spectral norm of a module's weight at most at ``coeff``, also during training.

    Registers :class:`SpectralBound` as a torch parametrization: ``module.weight`` becomes the bounded
    weight, ``module.parametrizations.weight.original`` the trained one.

    Args:
        module: nn.Linear, nn.Conv1d, nn.Conv2d (the norm of the convolution), or any module with a
            matrix of that name.
        name: the weight's name.
        coeff: largest norm allowed.
        mode: "cap" (shrink only when above), "normalize" (always at coeff) or "orthogonal" (the same,
            and all singular values of a matrix are drawn to coeff: nothing is shrunk more than it must).

    Returns:
        The module itself.

    Example:
        >>> layer = spectral_bound(nn.Linear(8, 8), coeff=0.5)
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 0.5)
        True
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{type(module).__name__} has no tensor named {name!r}")
    if parametrize.is_parametrized(module, name) and any(
        isinstance(part, SpectralBound)
        for part in module.get_submodule(f"parametrizations.{name}").children()
    ):
        raise ValueError(f"{name} of {type(module).__name__} has a spectral bound already")
    measure: Callable[[Tensor], Tensor] = spectral_norm_bound
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and name == "weight":
        measure = partial(_conv_norm, module)
    elif weight.ndim != 2:
        raise ValueError(
            f"{name} must be a matrix or the kernel of Conv1d or Conv2d, got shape "
            f"{tuple(weight.shape)} in {type(module).__name__}"
        )
    if mode == "orthogonal" and weight.ndim != 2:
        raise ValueError(f"mode='orthogonal' needs a matrix, got shape {tuple(weight.shape)}")
    parametrize.register_parametrization(module, name, SpectralBound(coeff, mode, measure))
    # The class is torch's own for this module; it refuses to be pickled, without a word of what we have.
    type(module).__getstate__ = _refuse_pickle  # type: ignore[method-assign]
    return module


def _refuse_pickle(module: nn.Module) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__} has bounded weights, which torch does not pickle: call "
        "save_pretrained(directory) of an AttentionFlow, a language model or a classifier, and "
        "torch.save(module.state_dict(), file) of anything else"
    )


class SpectralLinear(nn.Linear, Layer):
    r"""Linear layer :math:`x W^\top + b` that keeps :math:`\|W\| \le c`, also during training.

    Initialised orthogonal: a Gaussian matrix divided by its norm typically halves a vector, an
    orthogonal one keeps its length.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: add a learned bias.
        coeff: :math:`c`.
        mode: "cap" (shrink only when above), "normalize" (always at c) or "orthogonal" (all singular
            values near c).
        device: as in nn.Linear.
        dtype: as in nn.Linear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        coeff: float = 1.0,
        mode: str = "cap",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        spectral_bound(self, coeff=coeff, mode=mode)
        self.reset_parameters()

    @property
    def coeff(self) -> float:
        """c; a new value takes effect in the next forward pass."""
        return self._bound().certified_coeff

    @coeff.setter
    def coeff(self, coeff: float) -> None:
        self._bound().certified_coeff = coeff

    def _bound(self) -> SpectralBound:
        return cast(SpectralBound, self.get_submodule("parametrizations.weight.0"))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """An orthogonal weight of norm ``coeff`` and a zero bias."""
        if not parametrize.is_parametrized(self, "weight"):
            # nn.Linear's constructor calls this before there is a bound.
            return super().reset_parameters()
        raw = self.get_parameter("parametrizations.weight.original")
        start = torch.empty_like(raw, dtype=torch.promote_types(raw.dtype, torch.float32))
        raw.copy_(nn.init.orthogonal_(start, gain=self.coeff))
        if self.bias is not None:
            self.bias.zero_()


register_bake(SpectralLinear)(plain_linear)
