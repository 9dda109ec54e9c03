"""A language model's weights in parts over several processes."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lipformer.models import LanguageModel


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shares the weights out, block by block (torch's fully_shard): each is gathered for its own pass."""
    for block in model.trunk:
        if any(p.requires_grad for p in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
