"""How wrappers call the module they hold."""

from __future__ import annotations

import inspect

from torch import Tensor, nn


def _parameters(cls: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)


def call_branch(module: nn.Module, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Runs a branch on x: the first element of a tuple, with the padding mask passed on.

    The mask goes to every module whose forward takes it, also inside nn.Sequential; token-wise
    layers do not need it. Attention weights are not asked for.
    """
    if type(module).forward is nn.Sequential.forward:
        # Not children(), which leaves out a module's second use.
        for child in module._modules.values():
            if child is not None:
                x = call_branch(child, x, key_padding_mask)
        return x
    accepted = _parameters(type(module))
    options: dict[str, object] = {}
    if key_padding_mask is not None:
        # torch's encoders have a name of their own for it.
        for name in ("key_padding_mask", "src_key_padding_mask"):
            if name in accepted:
                options[name] = key_padding_mask
    if "need_weights" in accepted:
        options["need_weights"] = False
    out = module(x, **options)
    return out[0] if isinstance(out, tuple) else out
