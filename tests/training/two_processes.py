"""Trains on two processes and leaves what each of them has; run by test_distributed.

    python -m tests.training.two_processes CORPUS OUT STRATEGY VARIANT PACKING

STRATEGY is one, ddp or fsdp; one process gets the double batch.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from tests.training.tiny import Losses, data, module, trainer
from training.monitors import CertificateMonitor, InversionMonitor, certified_bound
from training.sharding import whole_model


def main(corpus: str, out: str, strategy: str, variant: str, packing: str) -> None:
    """Takes six steps with two validations."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    losses = Losses()
    many: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    if strategy == "fsdp":
        many["strategy"] = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    monitors = [CertificateMonitor(length=5, steps=1, restarts=1), InversionMonitor(length=8)]
    fit = trainer(
        max_steps=6,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        callbacks=[losses, *monitors],
        **({} if strategy == "one" else many),
    )
    model = module(variant=variant)
    size = 4 if strategy == "one" else 2
    fit.fit(model, data(Path(corpus), packing=packing, batch_size=size))
    fit.save_checkpoint(Path(out) / f"{strategy}.ckpt", weights_only=False)
    whole = whole_model(model.model)
    tokens = torch.arange(12).reshape(2, 6) % 8
    with torch.no_grad():
        logits = model.model.eval()(tokens)
        plain = whole.eval()(tokens)
    result = {
        "train": losses.train,
        "valid": losses.valid,
        "weights": whole.state_dict(),
        "bound": certified_bound(whole, "l2"),
        "logits": logits,
        "plain": plain,
        "sharded": any(hasattr(p, "full_tensor") for p in model.model.parameters()),
    }
    torch.save(result, Path(out) / f"{strategy}{fit.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
