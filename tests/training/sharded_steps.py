"""Takes steps on two processes with shared out weights, and alone; run by test_sharding.

    python -m tests.training.sharded_steps OUT

OUT gets, for each variant, losses and final weights of the sharded run, of a run on one process with
the whole batch, and of one whose bounds are taken for constants.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lipformer.functional.spectral.bound import spectral_norm_bounds as bounds
from lipformer.layers import one_pass as _one_pass
from lipformer.models import VARIANTS, LanguageModel
from training.sharding import shard, whole_model

BOUNDED = ("contractive", "invertible", "lipschitz")


def constant(matrices: list[Tensor]) -> list[Tensor]:
    """Bounds without their gradient: the fault that the comparison must notice."""
    return [bound.detach() for bound in bounds(matrices)]


def steps(variant: str, mesh: DeviceMesh | None, broken: bool = False) -> dict[str, Any]:
    """Three updates; with a mesh each process learns from its part of the batch."""
    torch.manual_seed(0)
    # Attention of its own block is divided by a bound that a wrong norm would change.
    apart = {"past_bias": False} if variant == "invertible" else {}
    model: LanguageModel = VARIANTS[variant](12, dim=16, num_heads=2, num_layers=2, **apart)
    tokens = torch.randint(12, (4, 9))
    with torch.no_grad():
        model.train()(tokens)  # ActNorm takes its scales from the whole batch
    if mesh is not None:
        shard(model, mesh)
        tokens = tokens.chunk(2)[dist.get_rank()]
    # Fused, as on a GPU, with gradients that are shared out.
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    losses: list[Tensor] = []
    with mock.patch.object(_one_pass, "spectral_norm_bounds", constant if broken else bounds):
        for _ in range(3):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            losses.append(loss.detach())
    together = torch.stack(losses)
    if mesh is not None:
        dist.all_reduce(together)
        together /= dist.get_world_size()
    return {"losses": together, "weights": whole_model(model).state_dict()}


def work(rank: int, out: str) -> None:
    """One of two processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sharded = {variant: steps(variant, mesh) for variant in BOUNDED}
    if rank == 0:
        alone = {variant: steps(variant, None) for variant in BOUNDED}
        broken = {variant: steps(variant, None, broken=True) for variant in BOUNDED}
        torch.save({"sharded": sharded, "alone": alone, "broken": broken}, Path(out) / "runs.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
