"""Saved models come back the same; damaged and foreign files are named; nothing is half-written."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

import lipformer as lf
from lipformer.models import LanguageModel
from tests.models.variants import CASES, VOCABULARY, build, fit, tokens


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_comes_back(case: str, tmp_path: Path) -> None:
    model, x = build(case), tokens(2, 9)
    fit(model, 2)
    model.save_pretrained(tmp_path / "new" / "model")
    assert sorted(p.name for p in (tmp_path / "new" / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    random_state = torch.get_rng_state()
    again = LanguageModel.from_pretrained(tmp_path / "new" / "model")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert again.config == model.config
    assert again.config.vocabulary == VOCABULARY
    assert not again.training
    assert torch.equal(again(x), model(x))


def test_each_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    model = build("invertible")
    model.embedding.bfloat16()
    model.body.get_submodule("readout").double()
    model.save_pretrained(tmp_path)
    again = LanguageModel.from_pretrained(tmp_path)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert len(set(dtypes.values())) > 2
    assert {name: tensor.dtype for name, tensor in again.state_dict().items()} == dtypes
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert all(p.requires_grad and p.is_leaf for p in again.parameters())


@pytest.mark.parametrize("case", CASES)
def test_a_baked_model_is_saved_only_if_it_can_be_loaded(case: str, tmp_path: Path) -> None:
    model, x = build(case).eval(), tokens(2, 9)
    model.initialize(x)
    baked = lf.bake(model)
    assert isinstance(baked, LanguageModel)
    changed = [type(m) for m in model.modules()] != [type(m) for m in baked.modules()]
    assert changed or case.partition(" ")[0] in ("dot_product", "l2_untied", "l2")
    if changed:
        with pytest.raises(ValueError, match="a model with .* at body.*, got .*before lipformer.bake"):
            baked.save_pretrained(tmp_path / "new")
        assert not (tmp_path / "new").exists()
    else:
        baked.save_pretrained(tmp_path)
        assert torch.equal(LanguageModel.from_pretrained(tmp_path)(x), baked(x))


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    build("dot_product").save_pretrained(tmp_path)
    model = build("invertible")
    model.save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).config == model.config
    assert len(list(tmp_path.iterdir())) == 2


def test_a_broken_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("l2").eval(), tokens(1, 5)
    model.save_pretrained(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        build("l2").save_pretrained(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(LanguageModel.from_pretrained(tmp_path)(x), model(x))


def test_a_save_that_is_killed_between_its_files_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("contractive").save_pretrained(tmp_path)
    model, replace = build("contractive", coeff=0.5), os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(target).name == "config.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path)
    monkeypatch.undo()
    again = LanguageModel.from_pretrained(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    model.save_pretrained(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def change(path: Path, name: str, dtype: torch.dtype) -> None:
    """Stores a tensor in another dtype."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    tensors[name] = tensors[name].to(dtype)
    safetensors.torch.save_file(tensors, path, metadata)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_another_kind_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    build("invertible").save_pretrained(tmp_path)
    change(tmp_path / "model.safetensors", "embedding.weight", dtype)
    told = f"embedding.weight must be of dtype torch.float16, .* torch.float64, got {dtype}"
    with pytest.raises(ValueError, match=told):
        LanguageModel.from_pretrained(tmp_path)


def test_flags_stay_flags(tmp_path: Path) -> None:
    model = build("invertible")
    model.save_pretrained(tmp_path)
    name = next(name for name, value in model.state_dict().items() if value.dtype == torch.bool)
    change(tmp_path / "model.safetensors", name, torch.float32)
    with pytest.raises(ValueError, match=f"{name} must be of dtype torch.bool, got torch.float32"):
        LanguageModel.from_pretrained(tmp_path)


def test_two_halves_of_two_saves_are_noticed(tmp_path: Path) -> None:
    build("contractive").save_pretrained(tmp_path / "a")
    build("contractive", coeff=0.5).save_pretrained(tmp_path / "b")
    (tmp_path / "a" / "config.json").replace(tmp_path / "b" / "config.json")
    with pytest.raises(ValueError, match="was not saved with this config.json"):
        LanguageModel.from_pretrained(tmp_path / "b")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    build("l2").save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        LanguageModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, 20_000])
def test_a_truncated_weights_file_is_named(size: int, tmp_path: Path) -> None:
    build("l2").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    assert len(content) > size
    path.write_bytes(content[:size])
    with pytest.raises(ValueError, match="model.safetensors is truncated or no safetensors file"):
        LanguageModel.from_pretrained(tmp_path)


class _Spy:
    """Notes when it is unpickled."""

    used = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return setattr, (_Spy, "used", True)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    build("l2").save_pretrained(tmp_path)
    bad = pickle.dumps(_Spy())
    pickle.loads(bad)
    assert _Spy.used  # the spy works
    _Spy.used = False
    (tmp_path / "model.safetensors").write_bytes(bad)
    with pytest.raises(ValueError, match="truncated or no safetensors"):
        LanguageModel.from_pretrained(tmp_path)
    torch.save({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="truncated or no safetensors"):
        LanguageModel.from_pretrained(tmp_path)
    assert not _Spy.used


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ('{"format": "lipformer.Lang', "Unterminated string"),
        ("[1]", "pop"),
        ('{"architectures": ["GPT2LMHeadModel"]}', '"format" is not "lipformer.LanguageModel"'),
        ('{"format": "lipformer.LanguageModel"}', "missing .* 'variant' and 'vocab_size'"),
    ],
)
def test_a_foreign_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    build("l2").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json is damaged or describes another.*{message}"):
        LanguageModel.from_pretrained(tmp_path)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    model = build("l2")
    for other in (build("l2", dim=32), build("contractive")):
        model.save_pretrained(tmp_path / "model")
        other.save_pretrained(tmp_path / "other")
        (tmp_path / "other" / "model.safetensors").replace(tmp_path / "model" / "model.safetensors")
        with pytest.raises(ValueError, match="was not saved with this config"):
            LanguageModel.from_pretrained(tmp_path / "model")
        other.config = model.config
        with pytest.raises(ValueError, match="cannot be loaded from its config"):
            other.save_pretrained(tmp_path / "other")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="file"):
        build("l2").save_pretrained(path)
    assert path.read_text() == "precious"
