"""certify looks into wrappers that compute what their module does, and into no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lipformer as lf

N, D = 5, 8


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def averaged(model: nn.Module) -> nn.Module:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    average.update_parameters(model)
    average.update_parameters(model)
    return average


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "AveragedModel": averaged,
    "torch.compile": compiled,
}


def vision() -> nn.Module:
    config = lf.models.VisionTransformerConfig("l2", 8, 1, 4, num_classes=3, dim=D, num_layers=1)
    return lf.models.VisionTransformer(config).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "vision": (vision, lambda: torch.rand(2, 1, 8, 8)),
    "language": (
        lambda: lf.models.lipschitz(vocab_size=7, dim=D, num_heads=2, num_layers=1).eval(),
        lambda: torch.randint(7, (2, N)),
    ),
}


def inside(wrapper: nn.Module) -> nn.Module:
    return wrapper._modules.get("module") or wrapper._modules["_orig_mod"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.usefixtures("one_process")
def test_wrappers_have_the_bound_of_what_they_hold(name: str, model: str) -> None:
    make, example = MODELS[model]
    wrapper = WRAPPERS[name](make()).eval()
    bare = inside(wrapper)
    assert lf.certify(wrapper).bound == lf.certify(bare).bound
    assert lf.certify(nn.Sequential(nn.Identity(), wrapper)).bound == lf.certify(bare).bound
    x = example()
    assert lf.certify(wrapper, example=x).bound == lf.certify(bare, example=x).bound
    if (name, model) == ("DataParallel", "vision"):
        around = [lf.certify(each, at=x, radius=0.1).bound for each in (wrapper, bare)]
        assert around[0] == around[1]
    wrapper.register_forward_hook(lambda module, given, out: 3 * out)
    with pytest.raises(lf.NotCertifiable, match="forward hook"):
        lf.certify(wrapper)


def test_wrappers_that_compute_something_else() -> None:
    linear = nn.Linear(D, D)
    module = compiled(linear)
    module.forward = lambda x: 3 * linear(x)
    with pytest.raises(lf.NotCertifiable, match="forward was replaced"):
        lf.certify(module)

    class Louder(AveragedModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 3 * super().forward(*args, **kwargs)

    with pytest.raises(lf.NotCertifiable, match="overrides the forward of AveragedModel"):
        lf.certify(Louder(linear))
    split = nn.DataParallel(linear)
    split.device_ids, split.dim = [0, 1], 1
    with pytest.raises(lf.NotCertifiable, match="cuts its input along dimension 1"):
        lf.certify(split)
    hooked = nn.DataParallel(nn.Linear(D, D))
    hooked.module.register_forward_pre_hook(lambda module, given: (3 * given[0],))
    with pytest.raises(lf.NotCertifiable, match="forward pre-hook") as caught:
        lf.certify(hooked)
    assert caught.value.path == "module"


# --- classes that only call their child -------------------------------------------------------


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(D, D)
        self.other = nn.Linear(D, D)


class Plain(Holder):
    def forward(self, x: Tensor) -> Tensor:
        """Documented."""
        return self.net(x)


class Passing(Holder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


class Options(Holder):
    def forward(self, inputs: Tensor, **options: Any) -> Any:
        return self.net(inputs, **options)


class Swapped(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(x)


class Scaled(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * 3


class Twice(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.net(x))


class Tripled(Holder):
    def forward(self, x: Tensor, factor: float = 3.0) -> Tensor:
        return self.net(factor * x)


class Method(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return 3 * self.net(x)


class Shadowed(Plain):
    @property
    def net(self) -> Any:
        return lambda x: 3 * self._modules["net"](x)

    @net.setter
    def net(self, value: nn.Module) -> None:
        self._modules["net"] = value


class Decorated(Holder):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Yielding(Holder):
    def forward(self, x: Tensor) -> Any:
        yield self.net(x)


def test_a_class_that_only_calls_its_child() -> None:
    for cls in (Plain, Passing, Options):
        module = cls()
        assert lf.certify(module).bound == lf.certify(module.net).bound
        assert lf.certify(module).parts[0].path == "net"
    swapped = Swapped()
    assert lf.certify(swapped).bound == lf.certify(swapped.other).bound


@pytest.mark.parametrize("cls", [Scaled, Twice, Tripled, Method, Shadowed, Decorated, Yielding])
def test_a_class_that_does_more(cls: type[nn.Module]) -> None:
    with pytest.raises(lf.NotCertifiable, match="no bound is known for this class"):
        lf.certify(cls())


def test_a_wrapper_whose_instance_was_changed() -> None:
    module = Plain()
    module.forward = lambda x: 3 * x
    with pytest.raises(lf.NotCertifiable, match="forward was replaced on the instance"):
        lf.certify(module)
    module = Plain()
    module.register_forward_hook(lambda module, given, out: 3 * out)
    with pytest.raises(lf.NotCertifiable, match="forward hook"):
        lf.certify(module)
    module = Plain()
    module.net = None
    with pytest.raises(lf.NotCertifiable, match="no bound is known"):
        lf.certify(module)


# --- refusals ---------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x)


class Model(nn.Module):
    """As a foreign model may be: an embedding, layers in a list, a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(5, D)
        self.layers = nn.ModuleList([nn.ModuleDict({"block": nn.Sequential(nn.LayerNorm(D), layer)})])
        self.head = nn.Linear(D, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = x + layer["block"](x)
        return self.head(x.mean(1))


def test_the_innermost_module_is_named() -> None:
    with pytest.raises(lf.NotCertifiable, match="no bound is known for this class") as caught:
        lf.certify(nn.Sequential(Model(SelfAttention())))
    assert (caught.value.path, caught.value.kind) == ("0.layers.0.block.1", "SelfAttention")
    assert "convert_attention" in caught.value.instead
    with pytest.raises(lf.NotCertifiable, match="dot-product attention has no") as caught:
        lf.certify(Model(nn.MultiheadAttention(D, 2)))
    assert caught.value.path == "layers.0.block.1"
    # All parts have bounds: it is the model's own forward that nothing is known about.
    good = Model(nn.Linear(D, D)).eval()
    with pytest.raises(lf.NotCertifiable, match="no bound is known for this class") as caught:
        lf.certify(good)
    assert caught.value.path == ""
    assert "example=x" in caught.value.instead
    assert lf.certify(good, example=torch.zeros(1, N, dtype=torch.int64)).bound > 0


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.slow  # imports torch.distributed.fsdp, which takes seconds
@pytest.mark.usefixtures("one_process")
def test_sharded_weights_are_gathered() -> None:
    """Whole, and in the dtype that the forward pass has them in."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Sequential(lf.SpectralLinear(D, D), nn.Linear(D, D)))
    whole = lf.certify(model).bound
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    certificate = lf.certify(model)
    assert certificate.bound == whole
    assert certificate.kind == "Sequential"
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(lf.NotCertifiable, match="certify before fully_shard"):
        lf.certify(model, example=torch.randn(1, D))

    linear = nn.Linear(D, D)
    weight = linear.weight.detach().bfloat16().double()
    fully_shard(linear, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    norm = torch.linalg.matrix_norm(weight, 2).item()
    assert norm <= lf.certify(linear).bound <= 1.01 * norm
    old = FullyShardedDataParallel(nn.Linear(D, D), device_id=torch.device("cpu"))
    with pytest.raises(lf.NotCertifiable, match="FullyShardedDataParallel holds pieces"):
        lf.certify(nn.Sequential(old))
