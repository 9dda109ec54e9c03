"""Modules that treat each token alike and alone: their steps and their own-token derivatives."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lipformer.certificate.activations import SLOPES
from lipformer.certificate.rules import kind_of
from lipformer.certificate.torch_rules import DROPOUTS
from lipformer.layers.branch import Call, call_branch
from lipformer.layers.decoding import register_step
from lipformer.layers.own_token import push_elementwise, push_token_wise, register_own_token


def register_token_wise(
    module_class: type[nn.Module],
    push: Callable[..., tuple[Tensor, Tensor]] | None = push_token_wise,
    applies: Callable[..., bool] = lambda module: True,
) -> None:
    """Registers a class that treats each token alike and alone, so that a step is a call.

    Args:
        module_class: the class.
        push: its own-token derivative, or None if it has a rule already.
        applies: whether a module of the class does so.
    """

    @register_step(module_class)
    def _(module: nn.Module, x: Tensor, cache: None, call: Call) -> tuple[Tensor, None]:
        if not applies(module):
            raise TypeError(f"{kind_of(module)} has no step: {module} does not treat each token alone")
        return call_branch(module, x, *call.inside()), None

    if push is not None:
        register_own_token(module_class, causal=applies)(push)


register_token_wise(nn.Linear, push=None)
for _class in (*SLOPES, *DROPOUTS):  # dropout: identity in eval mode
    register_token_wise(_class, push_elementwise)
# With several slopes these belong to places in the sequence, which a step does not know.
register_token_wise(nn.PReLU, push_elementwise, lambda module: module.num_parameters == 1)
for _class in (nn.LayerNorm, nn.RMSNorm):
    register_token_wise(_class, applies=lambda module: len(module.normalized_shape) == 1)
register_token_wise(nn.Softmax, applies=lambda module: module.dim == -1)
