"""Maximum likelihood in a budget of time, the same for every model, in parts if need be."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.saving.saved_model import atomic_write
from recipes.flows.particles.systems import moved
from training.errors import BadInput

# CPU seconds between two savings.
_KEEP = 60.0
# Looks at the validation samples in the whole budget, one part in so many of the samples for them, and
# at most so many of them.
_LOOKS, _PART, _MOST = 25, 5, 1_000


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
    kept in a file, from which a run that was broken off goes on. The weights are averages over the last
    updates (exponential, over about 200 of them); of 25 such averages, evenly over the budget, the one
    with the least nats on a fifth of the samples (1000 at most), which is kept back from the updates.
    The looks at these cost seconds of the budget.

    Args:
        model: has log_prob(x) -> (B,).
        x: samples (B, N, d).
        seconds: of training in all.
        lr: the largest learning rate.
        batch: samples of an update.
        turn: turn, reflect and reorder each batch at random; the validation samples too, once.
        seed: of the batches.
        path: of the state.
        stop: seconds after which this part ends, to be continued.

    Returns:
        The number of updates and the seconds so far, the updates at which the weights were chosen, and
        their nats on the validation samples.

    Raises:
        BadInput: the file is of a run with other settings, whose weights would pass for this one's.
    """
    generator, sizes = torch.Generator().manual_seed(seed), x.shape
    kept_back = x[: min(_MOST, len(x) // _PART)]
    x = x[len(kept_back) :]
    if turn:  # Few samples tell more about a model that is not equivariant in several positions.
        kept_back = moved(kept_back.repeat(_MOST // len(kept_back), 1, 1), generator)
    optimiser = torch.optim.Adam(model.parameters(), lr)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995), use_buffers=True
    )
    updates, spent, chosen, least = 0, 0.0, 0, math.inf
    best = copy.deepcopy(model.state_dict())
    settings = {"samples": (*sizes,), "seconds": seconds, "lr": lr, "batch": batch, "seed": seed}
    parts = {"model": model, "optimiser": optimiser, "average": average}
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if kept.get("settings") != settings:
            raise BadInput(
                f"{path} is of a run with {kept.get('settings')}, got {settings}: give another --out, "
                "or delete the file"
            )
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        generator.set_state(kept["generator"])
        updates, spent, chosen, least = (kept[name] for name in ("updates", "spent", "chosen", "least"))
        best = kept["best"]
    begin = time.process_time() - spent
    end, saved = min(seconds, spent + stop), spent

    def save() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        state |= {"generator": generator.get_state(), "updates": updates, "spent": spent}
        state |= {"best": best, "chosen": chosen, "least": least, "settings": settings}
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
        before, updates, spent = spent, updates + 1, time.process_time() - begin
        if int(before / seconds * _LOOKS) < int(spent / seconds * _LOOKS):
            nats = _nats(average.module, kept_back)
            if nats < least:
                best, chosen, least = copy.deepcopy(average.module.state_dict()), updates, nats
            spent = time.process_time() - begin
        if spent - saved > _KEEP:
            saved = spent
            save()
    save()
    if spent >= seconds:
        model.load_state_dict(best)
    return {"updates": updates, "seconds": spent, "chosen": chosen, "least": least}


@torch.no_grad()
def _nats(model: Any, x: Tensor) -> float:
    """Mean of -log p over samples (B, N, d) in eval mode."""
    model.eval()
    nats = -model.log_prob(x).mean().item()
    model.train()
    return nats
