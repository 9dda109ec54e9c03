"""convert_attention in models of other libraries: the same calls, masks, caches, files and graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper

import lipformer as lf
from lipformer.functional import null_key_attention
from lipformer.layers import NullKeyAttention
from lipformer.layers.attention.self_attention import SelfAttention
from lipformer.layers.convert.hosts import HostedAttention

B, N, D, H, V = 2, 7, 16, 4, 30
BERT = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": V,
    "n_embd": D,
    "n_layer": 2,
    "n_head": H,
    "n_positions": 40,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
DISTIL = {"vocab_size": V, "dim": D, "n_layers": 1, "n_heads": H, "hidden_dim": 24}
VIT = {"image_size": 8, "patch_size": 4}


class TimmAttention(nn.Module):
    """timm 1.0's Attention, as far as it is used here.

    timm imports torchvision, whose wheels beside a torch for the CPU alone break the import of
    transformers too, so that it cannot stand in the same environment.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
        self.attn_dim = num_heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Linear(dim, self.attn_dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm, self.gate = nn.Identity(), None
        self.proj = nn.Linear(self.attn_dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        sizes = (*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).reshape(sizes).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        p = self.attn_drop.p if self.training else 0.0
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, p, is_causal)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


TimmAttention.__module__, TimmAttention.__name__ = "timm.layers.attention", "Attention"


class TimmBlock(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), TimmAttention(D, H, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x), attn_mask=None, is_causal=False)


def timm_vit(**options: Any) -> nn.Module:
    patches = [nn.Conv2d(3, D, 4, 4), nn.Flatten(2), nn.Linear(4, N), Transposed()]
    return nn.Sequential(*patches, TimmBlock(qkv_bias=True, proj_drop=0.1, **options))


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def x_transformer(layers: type, **options: Any) -> nn.Module:
    stack = layers(**{"dim": D, "depth": 1, "heads": H, "attn_dim_head": D // H, **options})
    return TransformerWrapper(num_tokens=V, max_seq_len=40, attn_layers=stack)


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 24, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


class Host(NamedTuple):
    """A model, the part that holds its first attention and gives its first output, whether causal."""

    model: Callable[[], nn.Module]
    part: str
    causal: bool = False


def hugging_face(cls: Any, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: cls(cls.config_class(**sizes))


HOSTS = {
    "bert": Host(
        hugging_face(hf.BertForSequenceClassification, **BERT),
        "bert.encoder.layer.0.attention",
    ),
    "minilm": Host(hugging_face(hf.BertModel, **BERT), "encoder.layer.0.attention"),
    "bert-decoder": Host(
        hugging_face(hf.BertLMHeadModel, **BERT, is_decoder=True),
        "bert.encoder.layer.0.attention",
        True,
    ),
    "roberta": Host(hugging_face(hf.RobertaForMaskedLM, **BERT), "roberta.encoder.layer.0.attention"),
    "electra": Host(
        hugging_face(hf.ElectraModel, embedding_size=8, **BERT),
        "encoder.layer.0.attention",
    ),
    "distilbert": Host(hugging_face(hf.DistilBertModel, **DISTIL), "transformer.layer.0.attention"),
    "vit": Host(hugging_face(hf.ViTForImageClassification, **BERT, **VIT), "vit.layers.0.attention"),
    "gpt2": Host(
        hugging_face(hf.GPT2LMHeadModel, **GPT2, scale_attn_by_inverse_layer_idx=True),
        "transformer.h.1.attn",
        True,
    ),
    "timm": Host(timm_vit, "4.attn"),
    "x-encoder": Host(lambda: x_transformer(Encoder), "attn_layers.layers.0.1"),
    "x-decoder": Host(lambda: x_transformer(Decoder), "attn_layers.layers.0.1", True),
}
# torch's layer is called by the encoder itself: tests/layers/test_convert.py.
FOREIGN = {**HOSTS, "torch": Host(torch_encoder, "layers.0.self_attn")}
SAVED = ("bert", "minilm", "bert-decoder", "roberta", "electra", "distilbert", "vit", "gpt2")
hosts = pytest.mark.parametrize("name", HOSTS)


def build(name: str) -> nn.Module:
    """A model without dropout, with weights large enough for attention to be uneven."""
    model = FOREIGN[name].model().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def inputs(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a model, with padding where it takes any."""
    if name in ("vit", "timm"):
        return (torch.randn(B, 3, 8, 8),), {}
    tokens, valid = torch.randint(1, V, (B, N)), torch.ones(B, N, dtype=torch.bool)
    valid[1, 5:] = False
    if name == "torch":
        return (torch.randn(B, N, D),), {"src_key_padding_mask": ~valid}
    if name.startswith("x-"):
        return (tokens,), {"mask": valid}
    options = {"use_cache": False} if name in ("gpt2", "bert-decoder") else {}
    return (tokens,), {"attention_mask": valid.long(), **options}


def first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def layers(model: nn.Module) -> list[Any]:
    hosted = [m for m in model.modules() if isinstance(m, HostedAttention)]
    return hosted or [m for m in model.modules() if isinstance(m, SelfAttention)]


def attend(part: Any, x: Tensor, valid: Tensor, causal: bool, form: str) -> Tensor:
    """Calls an attention layer as its model does, with a mask in one of its forms."""
    if "x_transformers" in type(part).__module__ or "XTransformers" in type(part).__name__:
        return part(x, mask=valid)
    shown = valid[:, None, None, :].expand(-1, 1, N, -1)
    shown = shown & torch.ones(N, N, dtype=torch.bool).tril() if causal else shown
    added = torch.zeros(shown.shape, dtype=x.dtype).masked_fill(~shown, torch.finfo(x.dtype).min)
    mask = {"bool": shown, "float": added}[form]
    if "timm" in type(part).__module__ or "Timm" in type(part).__name__:
        return part(x, attn_mask=mask)
    return part(x, attention_mask=mask)[0]


@hosts
@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("value_proj", [False, True])
@torch.no_grad()
def test_what_l2_attention_can_express_is_kept(name: str, form: str, value_proj: bool) -> None:
    """Tied weights and keys of one norm in each head: weights, scale, biases and masks all in place."""
    host, model = HOSTS[name], build(name).double()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager" if form == "float" else "sdpa")
    part: Any = model.get_submodule(host.part)
    for key, parameter in part.named_parameters():
        if any(
            end in key for end in ("query", "key", "value", "q_", "k_", "v_", "to_q", "to_k", "to_v")
        ):
            parameter.copy_(torch.eye(D)) if parameter.ndim == 2 else parameter.zero_()
        elif "c_attn.w" in key or "qkv.w" in key:
            three = torch.cat([torch.eye(D)] * 3)
            parameter.copy_(three.mT if "c_attn" in key else three)
        elif "c_attn" in key or "qkv" in key:
            parameter[: 2 * D] = 0.0
    x = torch.randn(B, N, D, dtype=torch.float64)
    x = nn.functional.normalize(x.unflatten(-1, (H, -1)), dim=-1).flatten(-2)
    valid = torch.ones(B, N, dtype=torch.bool)
    valid[0, 4:] = False
    expected = attend(part, x, valid, host.causal, form)
    lf.convert_attention(model, value_proj=value_proj)
    new = attend(model.get_submodule(host.part), x, valid, host.causal, form)
    # x-transformers and eager ViT take their softmax in float32.
    assert (new - expected)[valid].abs().max() <= (1e-6 if name == "vit" or name[:2] == "x-" else 1e-9)


EVERY = [(name, {"max_len": 32}) for name in FOREIGN]
UNTIED = [(name, {"max_len": 32, "null_key": True}) for name in ("bert", "gpt2", "torch", "x-decoder")]


@pytest.mark.parametrize(("name", "options"), [*EVERY, *UNTIED])
def test_convert_train_save_reload_export_certify(name: str, options: Any, tmp_path: Path) -> None:
    model, (args, kwargs) = build(name), inputs(name)
    done = lf.convert_attention(model, **options)
    assert done.converted
    assert not done.left
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = first(model(*args, **kwargs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    new = [p for layer in layers(model) for p in layer.parameters()]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in new)

    model.eval()
    with torch.no_grad():
        expected = first(model(*args, **kwargs))
        other = build(name)
        lf.convert_attention(other, **options)
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(first(other.eval()(*args, **kwargs)), expected, rtol=0, atol=0)
        if name in SAVED:
            model.save_pretrained(tmp_path)
            loaded = lf.load_converted(tmp_path)
            assert type(loaded) is type(model)
            assert layers(loaded)[0].attention.max_len == 32
            torch.testing.assert_close(first(loaded(*args, **kwargs)), expected, rtol=0, atol=0)
        graph = torch.export.export(lf.bake(model), args, kwargs).module()
        got = graph(*args, **kwargs)
        got = first(got if isinstance(got, (Tensor, tuple)) else tuple(got.values()))
        assert (got - expected)[expected.isfinite()].abs().max() <= 1e-5

    layer = layers(model)[0]
    bound = lf.certify(layer).bound
    found = lf.attack_lipschitz(lambda x: first(layer(x)), torch.randn(1, 6, D), steps=2, restarts=1)
    assert 0.0 < found.value <= bound
    if name == "gpt2":
        refused = r"'transformer.h.0.mlp.c_fc' \(Conv1D\) .* cannot be followed at .*addmm"
        with pytest.raises(lf.NotCertifiable, match=refused):
            lf.certify(model, example=args[0])
    else:
        certificate = lf.certify(model, example=args[0])
        assert bound < certificate.bound < float("inf")


@pytest.mark.parametrize(("null_key", "kept"), [(False, D // H), (True, 2 * D // H)])
@torch.no_grad()
def test_hugging_face_generates_with_a_cache_of_keys_alone(null_key: bool, kept: int) -> None:
    """Of untied attention with a cache of keys and values, side by side."""
    model = build("gpt2")
    lf.convert_attention(model, null_key=null_key)
    tokens, valid = torch.randint(1, V, (B, 5)), torch.ones(B, 5, dtype=torch.int64)
    valid[0, :2] = 0  # padded on the left
    options = {"attention_mask": valid, "max_new_tokens": 6, "eos_token_id": None}
    for search in ({"do_sample": False}, {"num_beams": 3}):
        with_cache = model.generate(tokens, **options, **search)
        assert with_cache.equal(model.generate(tokens, use_cache=False, **options, **search))
    full = model(tokens, attention_mask=valid, use_cache=False).logits
    start = model(tokens[:, :3], attention_mask=valid[:, :3])
    rest = model(tokens[:, 3:], attention_mask=valid, past_key_values=start.past_key_values)
    torch.testing.assert_close(rest.logits, full[:, 3:], rtol=1e-4, atol=1e-5)
    layer = rest.past_key_values.layers[0]
    assert (layer.keys.shape, layer.values.shape) == ((B, H, 5, kept), (B, H, 5, 0))
    with pytest.raises(ValueError, match="takes no cache other than DynamicCache .StaticLayer"):
        model(tokens, past_key_values=hf.StaticCache(model.config, max_cache_len=9))


@pytest.mark.parametrize("null_key", [False, True])
@torch.no_grad()
def test_x_transformers_generates_with_a_cache_of_keys_alone(null_key: bool) -> None:
    model = build("x-decoder")
    lf.convert_attention(model, null_key=null_key)
    wrapper = AutoregressiveWrapper(model)
    tokens, lengths = torch.randint(1, V, (B, 4)), torch.tensor([2, 4])
    made = [
        wrapper.generate(tokens, 6, temperature=0.0, cache_kv=cache_kv, prompt_lens=lengths)
        for cache_kv in (True, False)
    ]
    assert made[0].equal(made[1])


@torch.no_grad()
def test_other_masks_need_any_mask() -> None:
    """Three tokens each: hidden from each other."""
    model, tokens = build("bert"), torch.randint(1, V, (1, 6))
    plain, free = copy.deepcopy(model), lf.convert_attention(copy.deepcopy(model), any_mask=True).model
    lf.convert_attention(plain)
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()[None, None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    both = {"input_ids": tokens, "position_ids": positions, "attention_mask": blocks}
    with pytest.raises(
        ValueError, match=r"mask of shape \(1, 1, 6, 6\) hides other keys than padded ones"
    ):
        plain.bert(**both)
    # Padding that is hidden besides, and its rows, do not matter.
    padded = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    padded[..., :6, :6] = blocks
    more = {"position_ids": torch.cat([positions, positions[:, :2]], 1), "attention_mask": padded}
    alone = free.bert(tokens.view(2, 3)).last_hidden_state.view(1, 6, D)
    for given in (both, {"input_ids": torch.cat([tokens, tokens[:, :2]], 1), **more}):
        found = free.bert(**given).last_hidden_state[:, :6]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
    # A padded key that others see is none, and a bias is no mask.
    seen = padded.clone()
    seen[..., 0, 7] = True
    tilted = torch.zeros(1, 1, 6, 6).tril(-1) - torch.ones(6, 6).triu(1)
    for mask in (seen, tilted):
        with pytest.raises(ValueError, match="hides other keys"):
            layers(free)[0](torch.randn(1, mask.shape[-1], D), attention_mask=mask)


@torch.no_grad()
def test_a_graph_gives_no_numbers_for_what_is_not_certified() -> None:
    model = build("bert")
    lf.convert_attention(model)
    layer, x = layers(model)[0], torch.randn(1, 6, D)
    padding = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    padding[..., 4:] = False
    graph = torch.export.export(layer, (x,), {"attention_mask": padding}).module()
    torch.testing.assert_close(graph(x, attention_mask=padding), layer(x, attention_mask=padding))
    assert bool(graph(x, attention_mask=padding.tril())[0].isnan().all())


@torch.no_grad()
def test_untied_attention_keeps_every_weight() -> None:
    model = build("bert").double()
    part: Any = model.bert.encoder.layer[0].attention
    for linear in (part.self.query, part.self.key, part.self.value, part.output.dense):
        nn.init.normal_(linear.bias)
    x = torch.randn(B, N, D, dtype=torch.float64)
    q, k, v = (
        linear(x).unflatten(-1, (H, -1)).transpose(1, 2)
        for linear in (part.self.query, part.self.key, part.self.value)
    )
    heads = null_key_attention(q, k, v, scale=part.self.scaling / 2, value_scale=0.3)
    expected = part.output.dense(heads.transpose(1, 2).flatten(2))
    lf.convert_attention(model, null_key=True)
    layer = layers(model)[0]
    assert isinstance(layer.attention, NullKeyAttention)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-6, atol=1e-6)


def test_untied_attention_of_other_widths_is_left() -> None:
    wide = x_transformer(Encoder, attn_dim_head=D)
    with pytest.raises(ValueError, match="its heads are of another width than 4"):
        lf.convert_attention(wide, null_key=True)


def test_what_hosts_ask_for_beyond_masks_is_refused() -> None:
    model = build("bert")
    lf.convert_attention(model)
    layer, x = layers(model)[0], torch.randn(B, N, D)
    valid = torch.ones(B, N, dtype=torch.int64)
    valid[1, 4:] = 0  # as flash attention gets it
    wide = valid.bool()[:, None, None, :].expand(-1, 1, N, -1)
    torch.testing.assert_close(layer(x, valid)[0], layer(x, wide)[0])
    for name in ("encoder_hidden_states", "head_mask", "output_attentions"):
        with pytest.raises(ValueError, match=f"Hugging Face takes no {name}"):
            layer(x, **{name: x})
    with pytest.raises(ValueError, match="has is_causal=False, got True"):
        layer(x, is_causal=True)
    with pytest.raises(ValueError, match="2 to 4 dimensions, got str"):
        layer(x, "blocks")
    model = build("x-encoder")
    lf.convert_attention(model)
    with pytest.raises(ValueError, match="x-transformers takes no mem"):
        layers(model)[0](x, mem=x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("bert").bert.encoder.layer[0].attention.self, "is in the module that holds it"),
        (lambda: timm_vit(qk_norm=True), "its q_norm is LayerNorm, in plain attention Identity"),
        (lambda: x_transformer(Encoder, attn_kv_heads=2), "its kv_heads is 2, in plain attention 4"),
        (lambda: x_transformer(Encoder, attn_num_mem_kv=2), "its num_mem_kv is 2"),
        (lambda: x_transformer(Encoder, attn_qk_norm=True), "its qk_norm is True"),
        (lambda: x_transformer(Encoder, attn_sigmoid=True), "its attend.attn_fn is"),
        (lambda: x_transformer(Encoder, rel_pos_bias=True), "its model has rel_pos"),
        (lambda: x_transformer(Encoder, residual_attn=True), "its model has residual_attn"),
        (lambda: hugging_face(hf.SwinModel, embed_dim=8, depths=[1], num_heads=[1])(), "is not known"),
    ],
)
def test_what_has_no_counterpart_is_left(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        lf.convert_attention(make())


def test_cross_attention_of_hosts_is_left() -> None:
    gpt2 = hugging_face(hf.GPT2LMHeadModel, **GPT2, add_cross_attention=True)()
    bert = hugging_face(hf.BertLMHeadModel, **BERT, is_decoder=True, add_cross_attention=True)()
    for model in (gpt2, bert, x_transformer(Decoder, cross_attend=True)):
        done = lf.convert_attention(model)
        assert len(done.converted) == len(done.left) >= 1
        assert set(done.left.values()) == {"cross-attention"}
    tokens, context = torch.randint(1, V, (B, N)), torch.randn(B, 3, D)
    for model in (gpt2, bert):  # with a cache of both kinds
        assert model(tokens, encoder_hidden_states=context, use_cache=True).logits.shape == (B, N, V)


def test_a_model_that_recorded_its_attention_is_converted() -> None:
    """transformers then leaves hooks behind."""
    model, (args, kwargs) = build("distilbert"), inputs("distilbert")
    model(*args, **kwargs, output_hidden_states=True)
    assert len(lf.convert_attention(model).converted) == 1
    assert len(model(*args, **kwargs, output_hidden_states=True).hidden_states) == 2


def test_only_converted_models_are_loaded(tmp_path: Path) -> None:
    model = build("distilbert")
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match='holds no converted model: its config has no "convert_attention"'
    ):
        lf.load_converted(tmp_path)
    lf.convert_attention(model)
    model.config.convert_attention = {"value_proj": True}  # other than it was converted with
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do not fit its config.*v_proj") as refusal:
        lf.load_converted(tmp_path)
    assert len(str(refusal.value)) < 400


def test_options_of_other_layers_are_not_kept_as_the_models(tmp_path: Path) -> None:
    """One record cannot build layers of two kinds; that of a model beside them stays."""
    model, other = build("bert"), lf.convert_attention(build("bert"), any_mask=True).model
    lf.convert_attention(nn.ModuleList([other, build("bert")]))
    assert other.config.convert_attention == {"any_mask": True}
    lf.convert_attention(model.bert.encoder.layer[0], causal=True)
    model.bert.encoder.layer.append(type(model)(model.config).bert.encoder.layer[0])
    lf.convert_attention(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="convert the whole model in one call"):
        lf.load_converted(tmp_path)


def test_the_config_that_was_given_is_left_alone(tmp_path: Path) -> None:
    plain = build("bert")
    config, before = plain.config, plain.config.to_dict()
    lf.convert_attention(plain)
    assert config.to_dict() == before
    assert plain.config.convert_attention == {}
    assert all(part.config is plain.config for part in plain.modules() if hasattr(part, "config"))
    layers = len(plain.bert.encoder.layer)
    with pytest.raises(
        ValueError, match=rf"is already converted: {layers} layers \(bert.encoder.layer.0"
    ):
        lf.convert_attention(plain)
    type(plain)(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no converted model"):
        lf.load_converted(tmp_path)
