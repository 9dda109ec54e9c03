"""Wrappers that compute what the one module inside them computes, and what to say of unknown classes.

Known are DistributedDataParallel, DataParallel, AveragedModel, torch.compile's OptimizedModule and any
class whose forward does nothing but ``return self.child(x)``. Modules that ``fully_shard`` shares out
are of a subclass of their own class and have its rule; their weights are gathered while the question
is asked.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lipformer.certificate.bounds import Ask, Bound, bound_rules
from lipformer.certificate.certificate import NotCertifiable
from lipformer.certificate.rules import (
    Refuse,
    Rules,
    check_forward,
    kind_of,
    methods_behind,
    refuse_hooks_alone,
)

wrappers: Rules[Callable[[Any, Refuse], str]] = Rules("inner module", "wrappers.register")
"""The name of the module that a wrapper calls; a rule refuses where it may be another function."""


@wrappers.register(DistributedDataParallel)
def _(module: DistributedDataParallel, refuse: Refuse) -> str:
    # Buffers are rank 0's in every forward pass: where they differ, rank 0 is to be asked.
    if module.mixed_precision is not None:
        raise refuse("mixed_precision casts its weights in the forward pass", "the module inside it")
    return "module"


@wrappers.register(DataParallel)
def _(module: DataParallel[nn.Module], refuse: Refuse) -> str:
    if len(module.device_ids) > 1 and module.dim != 0:
        raise refuse(f"it cuts its input along dimension {module.dim}", "dim=0, the samples")
    return "module"


@wrappers.register(AveragedModel)
def _(module: AveragedModel, refuse: Refuse) -> str:
    return "module"


def _loaded(module: nn.Module, source: str, name: str) -> bool:
    """Whether a module is of a class that costs seconds to import, which has then been imported."""
    cls = getattr(sys.modules.get(source), name, None)
    return cls is not None and isinstance(module, cls)


def _compiled(module: nn.Module, refuse: Refuse) -> str:
    """torch.compile's wrapper: what the compiler makes of the module's call is taken on trust."""
    forward = module.__dict__.get("forward")
    given = getattr(forward, "_torchdynamo_orig_callable", None)
    called = getattr(given, "__self__", None), getattr(given, "__wrapped__", None)
    if type(module).__name__ != "OptimizedModule" or module._modules["_orig_mod"] not in called:
        raise refuse("its forward was replaced on the instance", "torch.compile(module) anew")
    refuse_hooks_alone(module, refuse)
    return "_orig_mod"


def _old_sharding(module: nn.Module, refuse: Refuse) -> str:
    raise refuse(
        "FullyShardedDataParallel holds pieces of the weights, and may cast them",
        "torch.distributed.fsdp.fully_shard, or the plain model with this one's full state dict",
    )


_HEAVY = (
    ("torch._dynamo.eval_frame", "OptimizedModule", _compiled),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", _old_sharding),
)


def _shape_of(function: Any) -> tuple[object, ...]:
    """All that a function does but for the names: arguments (with * and **, generators) and bytecode."""
    code = function.__code__
    return code.co_code, code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0x3AC


# What "only calls its child" looks like. Bytecode, so that nothing else can be in it.
_ONLY_CALLS = {
    _shape_of(function)
    for function in (
        lambda self, x: self.child(x),
        lambda self, *args: self.child(*args),
        lambda self, *args, **kwargs: self.child(*args, **kwargs),
        lambda self, x, *args, **kwargs: self.child(x, *args, **kwargs),
        lambda self, x, **kwargs: self.child(x, **kwargs),
    )
}


def _only_child(module: nn.Module) -> str | None:
    """The child that a class's forward calls, if it does nothing else."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _shape_of(forward) not in _ONLY_CALLS:
        return None
    (name,) = forward.__code__.co_names
    return name if module._modules.get(name) is not None and not hasattr(type(module), name) else None


def wrapped(module: nn.Module, refuse: Refuse) -> str | None:
    """The name of the module that a wrapper calls, None for what is no wrapper.

    Raises:
        refuse(reason, instead): it is a wrapper, and may compute something else.
    """
    for source, name, rule in _HEAVY:
        if _loaded(module, source, name):
            return rule(module, refuse)
    rule_of_class = wrappers.find(module, refuse)
    if rule_of_class is not None:
        return rule_of_class(module, refuse)
    child = _only_child(module)
    if child is not None:
        relied = methods_behind(type(module), ("forward",))
        check_forward(module, type(module), relied, refuse, "inner module")
    return child


def unwrapped(module: nn.Module, refuse: Refuse) -> nn.Module:
    """The module inside all wrappers around it."""
    while (name := wrapped(module, refuse)) is not None:
        module = module._modules[name]  # type: ignore[assignment]
    return module


def _bound_without_rule(module: nn.Module, ask: Ask) -> Bound:
    """The bound of a wrapper; else refuses the innermost module that has none."""
    name = wrapped(module, ask.refuse)
    if name is not None:
        inner = ask.child(module._modules[name], name)  # type: ignore[arg-type]
        return Bound(inner.value, "calls its module", (inner,), passage=inner.passage)
    _refuse_parts(module, ask)
    kind = kind_of(module)
    instead = (
        f"lipformer.certify(model, example=x), which follows a forward of adds, means, reshapes and "
        f"known modules, or lipformer.register_bound({kind})"
    )
    if "attention" in kind.lower():
        instead = f"lipformer.convert_attention(model), or lipformer.register_bound({kind})"
    raise ask.refuse("no bound is known for this class", instead)


bound_rules.otherwise = _bound_without_rule


def _refuse_parts(module: nn.Module, ask: Ask) -> None:
    """Refuses the first part that has no bound itself: it, not what holds it, is to be replaced.

    Embeddings aside, which a model has to have: ``certify(model, example=ids)`` begins behind them.
    """
    for name, part in module.named_children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            path = f"{ask.path}.{name}" if ask.path else name
            _refuse_parts(part, Ask(ask.norm, ask.seq_len, path, known=ask.known))
        elif not isinstance(part, nn.Embedding):
            ask.child(part, name)


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Context in which weights that ``fully_shard`` shares out are there as the forward pass has them.

    That is, whole and in the dtype of its mixed precision. On every rank, as gathering is a collective.
    """
    sharded: list[Any] = [
        part for part in module.modules() if _loaded(part, "torch.distributed.fsdp", "FSDPModule")
    ]
    try:
        for part in sharded:
            part.unshard()
        yield
    finally:
        for part in sharded:
            part.reshard()


def refuse_sharded(module: nn.Module) -> None:
    """Refuses weights that each module gathers in its own call."""
    for path, part in module.named_modules():
        if _loaded(part, "torch.distributed.fsdp", "FSDPModule"):
            raise NotCertifiable(
                path,
                kind_of(part),
                "fully_shard gathers its weights call by call, so that it cannot be followed",
                "certify before fully_shard, or modules with a rule and no example",
            )
