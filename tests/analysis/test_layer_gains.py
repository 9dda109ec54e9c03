"""Gains of attention layers: right, and cheap."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipformer as lf
from lipformer.analysis import AttentionProbe, GainRow, GainTable, layer_gains, probe_attention
from tests.analysis.models import VOCABULARY, Nested, hugging_face, spread
from tests.memory import NEEDS_PROC, memory_of

IDS = torch.arange(3, 12) * 7 % VOCABULARY


def dense_gain(fn: Any, x: Tensor) -> float:
    """The largest singular value of the whole Jacobian, built entry by entry in float64."""
    jacobian = torch.autograd.functional.jacobian(fn, x.double()).reshape(-1, x.numel())
    return float(torch.linalg.matrix_norm(jacobian, ord=2))


def in_double(probe: AttentionProbe) -> Any:
    maps = probe.maps()
    assert maps is not None
    return lambda x: maps(x, probe.mask)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "distilbert"])
@pytest.mark.parametrize("output_projection", [True, False])
def test_gains_are_those_of_the_dense_jacobian(kind: str, output_projection: bool) -> None:
    model = hugging_face(kind)
    sequences = [IDS[:2], IDS[:5], IDS]
    options: dict[str, Any] = {"output_projection": output_projection}
    found = layer_gains(model, sequences, generator=torch.Generator().manual_seed(0), **options)
    assert [(row.sequence, row.index, row.n) for row in found.rows] == [
        (s, i, n) for s, n in enumerate((2, 5, 9)) for i in range(2)
    ]
    for row in found.rows:
        probe = probe_attention(model, sequences[row.sequence], **options)[row.index]
        assert row.converged
        assert row.gain == pytest.approx(dense_gain(in_double(probe), probe.tokens), rel=1e-5)
        assert row.radius == pytest.approx(float(probe.tokens.norm(dim=-1).max()))
        assert row.bound is not None
        assert row.gain <= row.bound


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_grouped_queries_and_rotary_positions(kind: str) -> None:
    """Against the Jacobian of the model's own module, called as the model calls it."""
    model, calls = hugging_face(kind, "sdpa").double().eval(), []
    layers = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
    model(IDS[None], use_cache=False)
    for layer in layers:
        layer._forward_pre_hooks.clear()
    table = layer_gains(model, [IDS])
    assert len(table) == 2
    for row, (layer, _, given) in zip(table.rows, calls, strict=True):

        def attention(x: Tensor, layer: Any = layer, given: Any = given) -> Tensor:
            return layer(**{**given, "hidden_states": x[None]})[0][0]

        x = given["hidden_states"][0]
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.func.jacrev(attention)(x).reshape(-1, x.numel())
        assert row.converged
        assert row.gain == pytest.approx(float(torch.linalg.matrix_norm(jacobian, ord=2)), rel=1e-5)
        assert row.bound is None
    short = layer_gains(model, [IDS[:3]], output_projection=False)
    assert all(row.gain > 0.0 for row in short.rows)


def test_texts_need_a_tokenizer_and_are_its_ids() -> None:
    words = WordLevel({"[UNK]": 1, "how": 5, "smooth": 9, "is": 17, "attention": 23}, "[UNK]")
    inner = Tokenizer(words)
    inner.pre_tokenizer = Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    model = hugging_face("llama")

    def gains(tokens: Any, **options: Any) -> GainTable:
        return layer_gains(model, tokens, generator=torch.Generator().manual_seed(0), **options)

    expected = gains([torch.tensor([5, 9, 17, 23]), torch.tensor([9, 1])])
    assert gains(["how smooth is attention", "smooth what"], tokenizer=tokenizer) == expected
    assert gains("how smooth is attention", tokenizer=tokenizer).rows == expected.rows[:2]
    for tokens, given in (("how", None), (["how"], None), ([IDS, "how"], tokenizer), ([IDS], tokenizer)):
        with pytest.raises(ValueError, match="only texts need a tokenizer"):
            gains(tokens, tokenizer=given)
    with pytest.raises(ValueError, match=r"give batch\['input_ids'\]"):
        gains(tokenizer("how smooth"))


def test_nested_model_padding_and_bounds() -> None:
    model = spread(Nested())
    padded = torch.zeros(2, 9, dtype=torch.long)
    padded[0], padded[1, :4] = IDS, IDS[:4]
    apart = layer_gains(model, [IDS, IDS[:4]], bound="min", generator=torch.Generator().manual_seed(0))
    padding = torch.Generator().manual_seed(0)
    together = layer_gains(model, padded, lengths=[9, 4], bound="min", generator=padding)
    assert together == apart
    padding = torch.Generator().manual_seed(0)
    whole = layer_gains(model, padded, bound=None, generator=padding)  # padding taken for text
    assert abs(whole.rows[2].gain / apart.rows[2].gain - 1) > 1e-2
    for row in apart.rows:
        assert row.bound is not None
        assert row.gain <= row.bound < 100 * row.gain


def test_logits_with_positions_have_a_gain_and_no_bound() -> None:
    config = lf.models.LanguageModelConfig(
        vocab_size=VOCABULARY,
        dim=24,
        num_heads=3,
        num_layers=1,
        variant="dot_product",
        positions="alibi",
    )
    model = spread(lf.models.LanguageModel(config)).double()
    (row,) = layer_gains(model, IDS[None]).rows
    (layer,) = [m for m in model.modules() if type(m).__name__ == "DotProductAttention"]
    x = probe_attention(model, IDS)[0].tokens
    assert row.gain == pytest.approx(dense_gain(lambda x: layer.eval()(x[None])[0], x), rel=1e-5)
    assert row.bound is None


def test_few_products_are_needed() -> None:
    """Power iteration takes several times as many to the same residual."""
    model = hugging_face("gpt2").double()
    ids = [(IDS + 5 * start) % VOCABULARY for start in range(4)]
    generator = torch.Generator().manual_seed(1)
    table = layer_gains(model, ids, restarts=1, bound=None, generator=generator)
    assert max(row.products for row in table.rows) <= 16


def test_dropout_is_off_and_the_tolerance_relative() -> None:
    model = hugging_face("gpt2").double()  # in training mode, dropout 0.5
    for parameter in model.transformer.h[0].attn.c_proj.parameters():
        parameter.mul_(1e-3)
    start = torch.Generator().manual_seed(0)
    table = layer_gains(model, [IDS], bound=None, generator=start)
    assert table == layer_gains(model.eval(), [IDS], bound=None, generator=start.manual_seed(0))
    probe = probe_attention(model, IDS)[0]
    truth = dense_gain(probe, probe.tokens)
    assert truth < 0.1
    assert table.rows[0].gain == pytest.approx(truth, rel=1e-5)


def row(layer: int, n: int, gain: float, **changes: Any) -> GainRow:
    values: dict[str, Any] = {
        "radius": 2.0 * n,
        "bound": None,
        "products": 9,
        "converged": True,
        **changes,
    }
    return GainRow(sequence=n, layer=f"h.{layer}", index=layer, n=n, gain=gain, **values)


def test_exponents() -> None:
    table = GainTable(tuple(row(layer, n, 3 * n**layer) for layer in (0, 1) for n in (2, 5, 11, 40)))
    for layer, fit in enumerate(table.exponents()):
        assert (fit.layer, fit.rows) == (f"h.{layer}", 4)
        assert fit.exponent == pytest.approx(layer, abs=1e-12)
        assert fit.error == pytest.approx(0, abs=1e-7)
        assert fit.factor == pytest.approx(3)
    # Against scipy, on points that lie on no line.
    points = [(2, 1.0), (3, 1.9), (7, 1.7), (20, 4.0), (50, 3.0)]
    (fit,) = GainTable(tuple(row(0, n, g) for n, g in points)).exponents("radius")
    line = scipy.stats.linregress([math.log(2 * n) for n, _ in points], [math.log(g) for _, g in points])
    assert fit.exponent == pytest.approx(line.slope)
    assert fit.error == pytest.approx(line.stderr)
    assert math.isnan(GainTable((row(0, 2, 1.0), row(0, 4, 2.0))).exponents()[0].error)


def test_files(tmp_path: Path) -> None:
    table = GainTable((row(0, 2, 1.0), row(0, 4, 1.5, bound=2.0), row(1, 2, 1.0), row(1, 8, 1.1)))
    table.to_csv(tmp_path / "gains.csv")
    with (tmp_path / "gains.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(line["gain"]) for line in read] == [1.0, 1.5, 1.0, 1.1]
    assert [line["bound"] for line in read] == ["", "2.0", "", ""]
    frame = table.to_pandas()
    assert list(frame["n"]) == [2, 4, 2, 8]
    table.plot(tmp_path / "gains.png", title="a title")
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gains.csv", "gains.png"]
    before = (tmp_path / "gains.png").read_bytes()
    with pytest.raises(ValueError, match="zero has no logarithm"):
        GainTable((row(0, 2, 1.0), row(0, 4, 0.0))).plot(tmp_path / "gains.png")
    assert (tmp_path / "gains.png").read_bytes() == before
    table.to_csv(tmp_path / "new" / "place" / "gains.csv")
    single = GainTable((row(0, 4, 1.0), row(0, 4, 2.0), row(1, 4, 3.0)))
    single.plot(tmp_path / "new" / "place" / "gains.png")  # one length: points without a fit
    assert len(list((tmp_path / "new" / "place").iterdir())) == 2


def test_a_table_is_shown_by_layers() -> None:
    table = GainTable(tuple(row(i, n, n / 3) for i in (0, 1) for n in (2, 4, 6)))
    shown = str(table).splitlines()
    assert shown[0] == "GainTable of 6 gains"
    assert shown[1].endswith(": 3 sequences, n 2..6, gain 0.6667..2")
    assert len(shown) == 3


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    layer_gains(spread(Nested()), IDS[None], progress=True)
    assert "1.0/1" in capsys.readouterr().out


BEFORE = """
from torch import nn
from lipformer.analysis import layer_gains
layer_gains(nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 4, 8), bound=None)
torch.manual_seed(0)
layer = nn.MultiheadAttention(768, 12, batch_first=True).requires_grad_(False)
x = torch.randn(1, 512, 768)
"""
MEASURED = """
(row,) = layer_gains(layer, x, bound=None, generator=torch.Generator().manual_seed(0)).rows
assert row.converged
assert row.products < 100, row.products
"""


@pytest.mark.slow
@NEEDS_PROC
def test_long_sequences_need_no_dense_matrix() -> None:
    """N = 512, D = 768, 12 heads: a dense Jacobian would have (N D)^2 entries, 620 GB."""
    before, after = memory_of(BEFORE, MEASURED)
    assert after - before < 1500 * 2**20, f"{(after - before) / 2**20:.0f} MB"


def test_exponents_refuse() -> None:
    for rows, message in (
        ((row(0, 4, 1.0), row(0, 4, 2.0)), "two different values of n, got 4"),
        ((row(0, 4, 1.0), row(0, 5, 0.0)), "zero has no logarithm"),
    ):
        with pytest.raises(ValueError, match=message):
            GainTable(rows).exponents()
