"""The device itself: faults that it must catch, dtypes under autocast, saving and loading."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.case import Case, by_name, new

LINEAR = new(nn.Linear, 8, 8)


def planted_item(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * x.detach().abs().max().item()


def planted_list(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * x.detach().sum(dim=(1, 2)).tolist()[0]


def planted_copy(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * torch.tensor([2.0], device=x.device)


def planted_bool_index(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x)[x > 0]


def planted_nonzero(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * len(torch.nonzero(x))


def planted_constant(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * torch.tensor([2.0])


def planted_generator(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * torch.rand(8, device=x.device, generator=torch.Generator())


def planted_index(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x)[:, torch.tensor([0, 2])]


def free(linear: nn.Linear, x: Tensor) -> Tensor:
    """What makes no host wait, though it looks like the faults."""
    out = linear(x) * torch.tensor(2.0)  # a CPU scalar is an argument of the kernel
    out = out + torch.zeros_like(out).masked_fill_(x > 0, 1.0)
    place = torch.zeros_like(out)
    place[x > 0] = 3.0  # one value: a masked_fill
    return torch.where(x > 0, out, place)


def scaled_step(linear: nn.Linear, x: Tensor) -> Any:
    """Fused AdamW with a loss scale; then an unfused one, with gradients clipped."""
    device = x.device.type
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for fused in (True, False):
        optimiser = torch.optim.AdamW(linear.parameters(), lr=0.1, fused=fused)
        with torch.autocast(device, torch.bfloat16):
            loss = linear(x).float().square().mean()
        scaler.scale(loss).backward()
        if not fused:
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
        scaler.step(optimiser)
        scaler.update()
    return scaler.get_scale()


def casts(linear: nn.Linear, x: Tensor) -> list[int]:
    """The dtypes that CUDA's autocast gives."""
    if x.device.type == "cpu":
        return []
    double, wide = x.double(), torch.float32
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast(x.device.type, low):
            y = linear(x)
            heads = y[:, None]
            found = {
                "linear": (y, low),
                "matmul": (x @ x.mT, low),
                "einsum": (torch.einsum("bnd,bmd->bnm", x, x), low),
                "sdpa": (F.scaled_dot_product_attention(heads, heads, heads), low),
                "relu": (F.relu(y), low),
                "softmax": (y.softmax(-1), wide),
                "layer_norm": (F.layer_norm(y, (8,)), wide),
                "exp": (y.exp(), wide),
                "sum": (y.sum(), wide),
                "cat": (torch.cat([x, y]), wide),
                "add": (x + y, wide),
                "double": (double @ double.mT, torch.float64),
            }
            with torch.autocast(x.device.type, enabled=False):
                found["off"] = (linear(x), wide)
        wrong = {name: result.dtype for name, (result, dtype) in found.items() if result.dtype != dtype}
        assert not wrong, wrong
    return []


def saved(linear: nn.Linear, x: Tensor) -> Any:
    """Through a file: on the device, or where map_location says; and deepcopy."""
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    loaded = [torch.load(file.seek(0) or file, map_location=place) for place in (None, "cpu")]
    assert [state["weight"].device.type for state in loaded] == [x.device.type, "cpu"]
    twin = copy.deepcopy(linear)
    twin.load_state_dict(loaded[1])
    return twin(x)


def tied(module: nn.Sequential, x: Tensor) -> Tensor:
    """Parameters keep their identity when a module is moved."""
    assert module[0].weight is module[1].weight
    return module(x)


def tied_pair() -> nn.Sequential:
    pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pair[1].weight = pair[0].weight
    return pair


def built(_: Any, x: Tensor) -> Tensor:
    """Under a default device, as Lightning builds models."""
    with torch.device(x.device):
        layer = nn.init.orthogonal_(nn.Linear(8, 8).weight)
        drawn = torch.rand(8, generator=torch.Generator(x.device).manual_seed(0))
    assert drawn.device == layer.device == x.device
    return (x * drawn).sum() + (layer @ layer.T).trace()


def pinned(_: Any, x: Tensor) -> Tensor:
    """From pinned memory."""
    host = torch.ones(8).pin_memory() if x.device.type != "cpu" else torch.ones(8)
    return x * host.to(x.device, non_blocking=True)


FAULTS = {
    planted_item: "item",
    planted_list: "to_host",
    planted_copy: "to_device",
    planted_bool_index: "bool_index",
    planted_nonzero: "wait",
    planted_index: "index_to_device",
}
ERRORS = {
    planted_constant: "same device|DeviceMixing",
    planted_generator: "generator",
}
DEVICE = by_name(
    [
        *(Case(LINEAR, call=call) for call in (*FAULTS, *ERRORS)),
        Case(LINEAR, call=free),
        Case(new(tied_pair), call=tied),
        Case(None, call=pinned),
        *(Case(LINEAR, call=call, trains=False) for call in (scaled_step, casts, saved, built)),
    ]
)
