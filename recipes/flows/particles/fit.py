"""Maximum likelihood in a budget of time, the same for every model, in parts if need be."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.saving.saved_model import atomic_write
from recipes.flows.particles.systems import moved

# CPU seconds between two savings.
_KEEP = 60.0


def fit(
    model: Any,
    x: Tensor,
    *,
    seconds: float,
    lr: float,
    batch: int,
    turn: bool,
    seed: int,
    path: Path,
    stop: float = math.inf,
) -> dict[str, float]:
    """Adam with a rise and a cosine fall of the learning rate over so many CPU seconds.

    CPU seconds of the process are what a model costs, whatever else runs on the machine. The state is
    kept in a file, from which a run that was broken off goes on. The weights in the end are an average
    over the last updates (exponential, over about 200 of them).

    Args:
        model: has log_prob(x) -> (B,).
        x: samples (B, N, d).
        seconds: of training in all.
        lr: the largest learning rate.
        batch: samples of an update.
        turn: turn, reflect and reorder each batch at random.
        seed: of the batches.
        path: of the state.
        stop: seconds after which this part ends, to be continued.

    Returns:
        The number of updates and the seconds so far.
    """
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995), use_buffers=True
    )
    updates, spent = 0, 0.0
    parts = {"model": model, "optimiser": optimiser, "average": average}
    if path.exists():
        kept = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        generator.set_state(kept["generator"])
        updates, spent = kept["updates"], kept["spent"]
    begin = time.process_time() - spent
    end, saved = min(seconds, spent + stop), spent

    def save() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        state |= {"generator": generator.get_state(), "updates": updates, "spent": spent}
        with atomic_write(path) as part:
            torch.save(state, part)

    while spent < end:
        fall = 0.5 * (1.0 + math.cos(math.pi * spent / seconds))
        for group in optimiser.param_groups:
            group["lr"] = lr * min(1.0, (updates + 1) / 50) * fall
        rows = x[torch.randint(len(x), (batch,), generator=generator)]
        loss = -model.log_prob(moved(rows, generator) if turn else rows).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        average.update_parameters(model)
        updates, spent = updates + 1, time.process_time() - begin
        if spent - saved > _KEEP:
            saved = spent
            save()
    save()
    if spent >= seconds:
        model.load_state_dict(average.module.state_dict())
    return {"updates": updates, "seconds": spent}
