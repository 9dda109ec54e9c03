"""A language model's weights in parts over several processes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lipformer.models import LanguageModel


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shares the weights out by torch's fully_shard: each block's are gathered for its own pass."""
    for block in model.trunk:
        if any(p.requires_grad for p in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_model(model: LanguageModel) -> LanguageModel:
    """The model itself, or an unsharded copy where its weights are shared out over processes.

    All processes must call it: they send each other their parts.
    """
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    with torch.random.fork_rng(devices=[]):
        copy = LanguageModel(model.config)
    copy.load_state_dict({name: _whole(value) for name, value in model.state_dict().items()})
    copy.to(next(model.parameters()).device).train(model.training)
    return copy


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
