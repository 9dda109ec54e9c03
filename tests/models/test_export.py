"""torch.export and ONNX: a baked model runs elsewhere, with other batches and lengths."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import lipformer as lf
from lipformer.models import VARIANTS, VisionTransformer, VisionTransformerConfig
from tests.layers.test_convert_hosts import FOREIGN, build, first, inputs

V, D, H = 20, 16, 4
Call = dict[str, Any]
# From inside torch.onnx.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")


def run(path: Path, call: Call) -> Tensor:
    """What onnxruntime makes of the tensors of a call."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tensors = [value for value in call.values() if isinstance(value, Tensor)]
    names = [given.name for given in session.get_inputs()]
    found = session.run(None, dict(zip(names, (t.numpy() for t in tensors), strict=True)))
    return torch.from_numpy(found[0])


@torch.no_grad()
def check(model: nn.Module, shapes: dict[str, Any] | None, calls: list[Call], folder: Path) -> None:
    """Exports the baked model at the first call, and compares all of them with the model itself."""
    baked = lf.bake(model.eval())
    program = torch.export.export(baked, (), calls[0], dynamic_shapes=shapes)
    graph, path = program.module(), folder / "model.onnx"
    torch.onnx.export(program, (), path, verbose=False)
    for call in calls:
        expected = first(model(**call))
        exported = graph(**call)
        exported = first(exported if isinstance(exported, (Tensor, tuple)) else [*exported.values()])
        for found in (exported, run(path, call)):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def symbols(*sizes: int) -> Call:
    return {"tokens": torch.randint(V, sizes)}


def test_normalised_weights_are_baked_first(tmp_path: Path) -> None:
    """A whole model is exported in docs/models.md; the others are slow."""
    model = nn.Sequential(lf.SpectralLinear(D, D), lf.Contractive(nn.Linear(D, D), coeff=5.0))
    for part in (model, model[0]):  # the second attempt of torch, by dynamo, could trace the second
        with pytest.raises(torch.onnx.errors.OnnxExporterError, match="lf.bake first"):
            torch.onnx.export(part.eval(), (torch.randn(2, D),), verbose=False)
    check(model, {"input": {0: Dim("batch")}}, [{"input": torch.randn(b, D)} for b in (2, 7)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_language_models_for_any_batch_and_length(variant: str, tmp_path: Path) -> None:
    model = VARIANTS[variant](V, dim=D, num_heads=H, num_layers=1, max_len=32)
    shapes = {"tokens": {0: Dim("batch"), 1: Dim("length", min=6, max=32)}}
    check(model, shapes, [symbols(2, 9), symbols(1, 6), symbols(3, 32)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"value_proj": True, "proj_coeff": 1.0}, {"key_radius": 1.0}])
def test_attention_for_any_batch_and_length(options: dict[str, Any], tmp_path: Path) -> None:
    layer = lf.L2MultiheadAttention(D, H, batch_first=True, **options)
    calls = [
        {"query": torch.randn(b, n, D), "need_weights": False} for b, n in ((2, 9), (1, 1), (3, 40))
    ]
    shapes = {"query": {0: Dim("batch"), 1: Dim("length", max=64)}, "need_weights": None}
    check(layer, shapes, calls, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["l2", "dot_product"])
def test_vision_transformers_for_any_batch(variant: str, tmp_path: Path) -> None:
    sizes = {
        "image_size": 8,
        "channels": 3,
        "patch_size": 4,
        "num_classes": 5,
        "dim": D,
        "num_layers": 1,
    }
    model = VisionTransformer(VisionTransformerConfig(variant, **sizes))
    calls = [{"images": torch.rand(b, 3, 8, 8)} for b in (2, 5)]
    check(model, {"images": {0: Dim("batch")}}, calls, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_converted_models(name: str, tmp_path: Path) -> None:
    """At a fixed shape; docs/models.md exports BERT for any batch and length."""
    model, (args, kwargs) = build(name), inputs(name)
    lf.convert_attention(model, max_len=32)
    called = inspect.signature(model.forward).bind(*args, **kwargs)
    called.arguments.update(called.arguments.pop("kwargs", {}))
    check(model, None, [called.arguments], tmp_path)
