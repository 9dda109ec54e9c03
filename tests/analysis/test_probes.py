"""The attention that probes extract is the model's own, and the model is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import AttentionMaps, attention_maps, probe_attention
from tests.analysis.models import KINDS, VOCABULARY, Nested, hugging_face, spread

IDS = torch.arange(3, 12) * 7 % VOCABULARY


def outputs(model: nn.Module, modules: list[nn.Module], call: Any) -> list[Tensor]:
    """What the modules return in evaluation mode."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [module.register_forward_hook(hook) for module in modules]
    model.eval()
    # Gradients on: torch's encoder layers would take a fused path that calls no attention layer.
    call()
    model.train()
    for handle in handles:
        handle.remove()
    return [out.detach() for out in seen]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face(kind: str, implementation: str) -> None:
    model = hugging_face(kind, implementation)
    names = [name for name, _ in model.named_modules()]
    suffix = {"gpt2": ".attn", "distilbert": ".attention"}.get(kind, ".attention.output.dense")
    layers = [model.get_submodule(name) for name in names if name.endswith(suffix)]
    expected = outputs(model, layers, lambda: model(IDS[None]))
    probes = probe_attention(model, IDS)
    assert [probe.index for probe in probes] == [0, 1]
    for probe, layer_output in zip(probes, expected, strict=True):
        close(probe(probe.tokens), layer_output[0])
        maps = probe.maps()
        assert maps is not None
        close(maps(probe.tokens, probe.mask), layer_output[0])
        uneven = maps.weights(probe.tokens, probe.mask)
        assert float(uneven.amax(-1).mean()) > 1.2 / len(IDS)  # a trivial softmax would hide mistakes


@pytest.mark.parametrize("kind", ["bert", "gpt2", "distilbert"])
def test_without_the_output_projection(kind: str) -> None:
    model = hugging_face(kind)
    ends = {"bert": "attention.output.dense", "gpt2": ".attn.c_proj", "distilbert": ".out_lin"}
    wanted = [m for name, m in model.named_modules() if name.endswith(ends[kind])]
    inputs: list[Tensor] = []
    handles = [m.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0])) for m in wanted]
    probes = probe_attention(model, IDS, output_projection=False)
    for handle in handles:
        handle.remove()
    for probe, heads in zip(probes, inputs, strict=True):
        close(probe(probe.tokens), heads)
        maps = probe.maps()
        assert maps is not None
        close(maps(probe.tokens, probe.mask), heads)


@pytest.mark.parametrize("batch_first", [True, False])
def test_nested_encoder_with_a_mask(batch_first: bool) -> None:
    model = spread(Nested(batch_first))
    layers = [layer.self_attn for layer in model.inside["core"].layers]
    expected = outputs(model, layers, lambda: model(IDS[None]))
    probes = probe_attention(model, IDS)
    assert [probe.name for probe in probes] == [f"inside.core.layers.{i}.self_attn" for i in range(2)]
    for probe, layer_output in zip(probes, expected, strict=True):
        close(probe(probe.tokens), layer_output[0] if batch_first else layer_output[:, 0])
        changed = probe.tokens.clone()
        changed[-1] += 1.0
        torch.testing.assert_close(probe(changed)[:-1], probe(probe.tokens)[:-1])  # causal


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layers_alone(batch_first: bool) -> None:
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    attention = spread(nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=batch_first))
    (probe,) = probe_attention(attention, x)
    close(probe(x), attention_maps(attention)(x))
    layer = spread(nn.TransformerEncoderLayer(12, 3, 16, batch_first=batch_first, norm_first=True))
    (probe,) = probe_attention(layer, x)
    close(probe.tokens, layer.norm1(x))


def test_float_masks_are_kept() -> None:
    # ALiBi in torch's own layer: a bias of each head.
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    attention = spread(nn.MultiheadAttention(12, 3, batch_first=True)).eval()
    bias = -torch.arange(7.0).abs().outer(torch.ones(7)) * torch.tensor([0.1, 0.5, 1.0])[:, None, None]
    (probe,) = probe_attention(attention, x, forward=lambda x: attention(x, x, x, attn_mask=bias))
    close(probe(x), attention(x[None], x[None], x[None], attn_mask=bias)[0][0])
    assert probe.maps() is None
    hidden = torch.zeros(1, 7, dtype=torch.bool)
    hidden[0, 5:] = True
    call = {"key_padding_mask": hidden}
    (probe,) = probe_attention(attention, x, forward=lambda x: attention(x, x, x, **call))
    maps = probe.maps()
    assert maps is not None
    close(maps(x, probe.mask), attention(x[None], x[None], x[None], **call)[0][0])


@pytest.mark.parametrize("positions", ["alibi", "rotary", "sinusoidal", None])
def test_lipformer_language_model(positions: str | None) -> None:
    config = lf.models.LanguageModelConfig(
        vocab_size=VOCABULARY, dim=24, num_heads=3, num_layers=2, variant="dot_product",
        positions=positions, dropout=0.5,
    )  # fmt: skip
    model = spread(lf.models.LanguageModel(config))
    layers = [m for m in model.modules() if type(m).__name__ == "DotProductAttention"]
    expected = outputs(model, layers, lambda: model(IDS[None]))
    probes = probe_attention(model, IDS)
    for probe, layer_output in zip(probes, expected, strict=True):
        close(probe(probe.tokens), layer_output[0])
        assert (probe.maps() is None) == (positions in ("alibi", "rotary"))
    embedded = probe_attention(model, model.embed(IDS[None])[0])
    torch.testing.assert_close(embedded[1].tokens, probes[1].tokens)


def test_embedded_tokens_of_hugging_face() -> None:
    model = hugging_face("gpt2")
    embedded = probe_attention(model, model.transformer.wte(IDS))
    torch.testing.assert_close(embedded[1].tokens, probe_attention(model, IDS)[1].tokens)


def test_modules_with_maps_of_their_own() -> None:
    class Own(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 6, 6))
            self.factor = factor

        def attention_maps(self) -> AttentionMaps:
            return AttentionMaps(self.weight, self.weight, causal=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * self.attention_maps()(x)

    x = torch.randn(5, 6)
    model = nn.Sequential(nn.LayerNorm(6), Own(1.0))
    (probe,) = probe_attention(model, x)
    close(probe(probe.tokens), model(x).detach())
    with pytest.raises(ValueError, match="output_projection must be True"):
        probe_attention(model, x, output_projection=False)
    with pytest.raises(ValueError, match="computes something else"):
        probe_attention(Own(1.001), x)


def test_a_shared_layer_has_a_probe_for_each_call() -> None:
    layer = spread(nn.TransformerEncoderLayer(12, 3, 16, batch_first=True))
    probes = probe_attention(nn.Sequential(layer, layer), torch.randn(5, 12))
    assert [(probe.name, probe.index) for probe in probes] == [("0.self_attn", 0), ("0.self_attn#2", 1)]
    assert (probes[0].tokens - probes[1].tokens).abs().max() > 1e-2


def test_cross_attention_is_named() -> None:
    layer = spread(nn.TransformerDecoderLayer(12, 3, 16, batch_first=True))
    memory = torch.randn(1, 4, 12)
    with pytest.warns(UserWarning, match="multihead_attn"):
        probes = probe_attention(layer, torch.randn(5, 12), forward=lambda x: layer(x, memory))
    assert [probe.name for probe in probes] == ["self_attn"]
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    with pytest.raises(ValueError, match="no call of self-attention"):
        probe_attention(attention, torch.randn(5, 12), forward=lambda x: attention(x, memory, memory))


def state(model: nn.Module) -> tuple[Any, ...]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    return hooks, modes, flags, torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()


def test_the_model_is_left_as_it_was() -> None:
    model = spread(Nested())
    model.head.eval()  # a mode of its own
    model.head.weight.requires_grad_(True)
    before, weights = state(model), {k: v.clone() for k, v in model.state_dict().items()}
    noise = torch.get_rng_state()
    probe_attention(model, IDS)
    assert state(model) == before
    assert torch.equal(torch.get_rng_state(), noise)
    with pytest.raises(IndexError):
        probe_attention(model, torch.tensor([VOCABULARY]))  # the forward pass fails in the middle
    with pytest.raises(RuntimeError):
        probe_attention(model, IDS, forward=lambda ids: [model(ids), model.head(torch.zeros(3))])
    assert state(model) == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_half_precision_is_widened() -> None:
    model = hugging_face("bert").bfloat16()
    probe = probe_attention(model, IDS)[0]
    assert probe.tokens.dtype == probe(probe.tokens).dtype == torch.float32


def test_what_is_not_known_is_not_measured() -> None:
    with pytest.raises(
        ValueError, match="computes something else"
    ):  # rotary positions in BERT's clothes
        probe_attention(hugging_face("roformer"), IDS)
    with pytest.raises(ValueError, match=r"T5LayerSelfAttention.*Known: torch.nn.MultiheadAttention"):
        probe_attention(hf.T5EncoderModel(hf.T5Config(d_model=8, d_ff=8, num_layers=1)), IDS)
    lf.models.register_l2_attention()
    for kind in ("bert", "llama"):  # L2 attention behind the names of dot-product attention
        with pytest.raises(ValueError, match="computes something else"):
            probe_attention(hugging_face(kind, "lipformer_l2"), IDS)
    llama = hugging_face("llama")
    llama.model.layers[0].self_attn.q_norm = nn.LayerNorm(8)
    with pytest.raises(ValueError, match="query_norm must be an RMSNorm of 8 features"):
        probe_attention(llama, IDS)
    with pytest.raises(ValueError, match="must turn all 8 features of a head"):
        probe_attention(hugging_face("half-rotary"), IDS)
    with pytest.raises(ValueError, match="L2MultiheadAttention"):
        probe_attention(lf.L2MultiheadAttention(8, 2), torch.randn(3, 8))
    adapted = hugging_face("bert")
    query = adapted.encoder.layer[0].attention.self.query
    query.register_forward_hook(
        lambda _, args, out: out + 0.05 * args[0]
    )  # an adapter beside the weight
    with pytest.raises(ValueError, match="layer.0.*computes something else"):
        probe_attention(adapted, IDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_no_other_layer(dtype: torch.dtype) -> None:
    layer = spread(nn.MultiheadAttention(12, 3, batch_first=True)).to(dtype)
    x = torch.randn(5, 12, dtype=dtype)
    assert len(probe_attention(layer, x)) == 1
    layer.register_forward_hook(lambda _, args, output: (1.005 * output[0], output[1]))
    before = state(layer)
    with pytest.raises(ValueError, match="computes something else"):
        probe_attention(layer, x)
    assert state(layer) == before
    assert all(p.dtype == dtype for p in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_of_hugging_face(kind: str) -> None:
    model = hugging_face(kind).bfloat16()
    assert len(probe_attention(model, IDS)) == 2
    name = {"gpt2": "c_attn", "distilbert": "v_lin"}.get(kind, "value")
    last = [m for path, m in model.named_modules() if path.endswith(name)][-1]
    last.register_forward_hook(lambda _, args, output: 1.05 * output)
    with pytest.raises(ValueError, match="computes something else"):
        probe_attention(model, IDS)


@pytest.mark.parametrize("where", ["out_proj", "in_proj"])
def test_a_large_bias_hides_no_other_layer(where: str) -> None:
    layer, x = spread(nn.MultiheadAttention(12, 3, batch_first=True)), torch.randn(5, 12)
    if where == "out_proj":
        layer.out_proj.bias.fill_(1e5)
    else:
        layer.in_proj_bias[24:] = 1e5
    assert len(probe_attention(layer, x)) == 1
    layer.register_forward_hook(lambda _, args, output: (output[0] + 0.03 * args[0], output[1]))
    with pytest.raises(ValueError, match="computes something else"):
        probe_attention(layer, x)
