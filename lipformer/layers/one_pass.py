"""The spectral norms of a whole model in a few calls, for the length of one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn

from lipformer.functional import spectral_norm_bound
from lipformer.functional.spectral.bound import spectral_norm_bounds
from lipformer.functional.spectral.orthogonal import orthogonalised_all
from lipformer.layers.contractive import Contractive
from lipformer.layers.freezing import Freezable
from lipformer.layers.layer import Layer
from lipformer.layers.spectral import SpectralBound


class OnePass(Layer):
    """A module whose layers' spectral norms are computed together in each of its forward passes.

    A layer alone computes the norms of its weights when it runs: some 70 kernels a layer. Such a module
    wraps its forward pass in :meth:`one_pass` instead; then there is one call for all weights of one
    shape, and each layer is frozen until the pass is over. Nothing is kept from one pass to the next.

    They may be nested: the outermost does the work. Weights that fully_shard has not gathered yet are
    left to the one that gathers them.
    """

    def refresh(self) -> None:
        """Notes which layers there are, once: layers put in later compute for themselves."""
        self._bounded: list[tuple[SpectralBound, parametrize.ParametrizationList]] = []
        self._contractive: list[Contractive] = []
        for module in self.modules():
            if isinstance(module, Contractive):
                self._contractive.append(module)
            elif isinstance(module, parametrize.ParametrizationList) and len(module) == 1:
                bound = module[0]
                if isinstance(bound, SpectralBound) and bound.measure is spectral_norm_bound:
                    self._bounded.append((bound, module))

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Context of one forward pass."""
        parts: list[Freezable] = []
        try:
            # Bounded weights first: what is divided by norms may hold them.
            ready = [(b, chain.original) for b, chain in self._bounded if _ready(b, chain)]
            raw = [weight for _, weight in ready]
            drawn = iter(orthogonalised_all([w for b, w in ready if b.mode == "orthogonal"]))
            bounded = [(b, next(drawn) if b.mode == "orthogonal" else w) for b, w in ready]
            norms = spectral_norm_bounds([weight for _, weight in bounded])
            alike: dict[object, list[int]] = {}
            for i, (bound, weight) in enumerate(bounded):
                key = (bound.certified_coeff, bound.mode, weight.shape, weight.dtype, weight.device)
                alike.setdefault(key, []).append(i)
            for group in alike.values():
                factors = bounded[group[0]][0].factor(
                    torch.stack([norms[i] for i in group]), bounded[group[0]][1]
                )
                for i, factor in zip(group, factors.unbind(), strict=True):
                    bound, weight = bounded[i]
                    bound.freeze(bound.scaled(weight, factor), (raw[i],))
                    parts.append(bound)
            needed = [(c, c.matrices()) for c in self._contractive if _ready(c, c)]
            norms = spectral_norm_bounds([matrix for _, matrices in needed for matrix in matrices])
            for contractive, matrices in needed:
                known = contractive.factors_of(matrices, norms[: len(matrices)])
                contractive.freeze(known, contractive.sources())
                norms = norms[len(matrices) :]
                parts.append(contractive)
            yield
        finally:
            for part in parts:
                part.thaw()


def _ready(part: Freezable, holder: nn.Module) -> bool:
    """Whether no freeze around this one has the part already, and its holder's weights are here."""
    if part._freezing:
        return False
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return True
    from torch.distributed.tensor import DTensor

    # FullyShardedDataParallel marks the flat pieces that stand for its weights.
    return not any(
        isinstance(weight, DTensor) or getattr(weight, "_fsdp_flattened", False)
        for weight in holder.parameters()
    )
