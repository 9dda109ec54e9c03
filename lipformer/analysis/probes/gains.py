"""How smooth are the attention layers of a model, on the inputs that they get?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.analysis.bounds.local import local_bound
from lipformer.analysis.probes.gain_table import GainRow, GainTable
from lipformer.analysis.probes.probe import AttentionProbe, probe_attention
from lipformer.estimates import estimate_lipschitz


def layer_gains(
    model: nn.Module,
    tokens: Tensor | Sequence[Tensor] | Sequence[str],
    *,
    tokenizer: Callable[[str], Any] | None = None,
    lengths: Sequence[int] | None = None,
    tol: float = 1e-4,
    restarts: int = 2,
    max_iter: int = 500,
    bound: str | None = "jasmin",
    output_projection: bool = True,
    forward: Callable[[Tensor], Any] | None = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> GainTable:
    r"""Measures the local gain of every self-attention layer of a model at its input tokens.

    For each sequence the model runs once; for each layer the largest singular value of the Jacobian of
    its pure attention (no residual, no normalisation, no dropout; its own mask) at the tokens (N, D)
    that entered it, in the Frobenius norm over all tokens. Lanczos with products alone: memory is a few
    (H, N, N) tensors and 32 vectors of N D entries, never a matrix of N^2 D^2. The values are lower
    estimates that met a relative tolerance, or say that they did not.

    The experiment of Castin, Ablin, Peyré, "How Smooth Is Attention?" (ICML 2024), where the gain of
    most layers of BERT and GPT-2 grows like n^0.24 to n^0.26 on text.

    Args:
        model: see `probe_attention`.
        tokens: sequences: a list of ids (N,) or embedded tokens (N, D), or one tensor (B, N) of ids or
            (B, N, D) of embedded tokens; or texts, one or a list.
        tokenizer: of texts, as Hugging Face's: ``tokenizer(text)["input_ids"]`` are the ids.
        lengths: of each sequence; what follows is padding and is cut off, so that it cannot matter.
        tol: relative tolerance of a gain.
        restarts: random directions that span the first search space of each gain.
        max_iter: largest number of steps of each gain.
        bound: method of `local_bound` for the upper bound beside each gain, or None for none. "min" and
            "sharp" are much closer and take far longer than the gain for long sequences. Layers whose
            logits depend on positions (ALiBi, rotary) or normalise queries have no bound.
        output_projection: whether attention includes the layer's output projection.
        forward: calls the model on a batch of one, see `probe_attention`.
        progress: shows a progress bar (needs rich).
        generator: source of the starting directions; the result is a function of it.

    Returns:
        A `GainTable` with a row for each sequence and layer.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
        >>> table = layer_gains(model, torch.randn(3, 6, 8), lengths=[2, 4, 6])
        >>> [(row.layer, row.n, row.gain < row.bound) for row in table.rows]
        [('self_attn', 2, True), ('self_attn', 4, True), ('self_attn', 6, True)]
    """
    sequences = _sequences(_encoded(model, tokens, tokenizer), lengths)
    rows: list[GainRow] = []
    with _bar(progress, len(sequences)) as advance:
        for number, ids in enumerate(sequences):
            probes = probe_attention(model, ids, output_projection=output_projection, forward=forward)
            for probe in probes:
                found = estimate_lipschitz(
                    probe, probe.tokens,
                    tol=tol, max_iter=max_iter, restarts=restarts, generator=generator,
                )  # fmt: skip
                x = probe.tokens
                rows.append(
                    GainRow(
                        sequence=number,
                        layer=probe.name,
                        index=probe.index,
                        n=x.shape[0],
                        radius=float(x.norm(dim=-1).max()),
                        gain=found.value,
                        bound=None if bound is None else _bound(probe, bound),
                        products=found.iterations,
                        converged=found.converged,
                    )
                )
                advance(1 / len(probes))
    return GainTable(tuple(rows))


def _bound(probe: AttentionProbe, method: str) -> float | None:
    maps = probe.maps()
    if maps is None:
        return None
    with torch.no_grad():
        return float(local_bound(maps, probe.tokens, probe.mask, method=method))


def _encoded(
    model: nn.Module,
    tokens: Tensor | Sequence[Tensor] | Sequence[str],
    tokenizer: Callable[[str], Any] | None,
) -> Any:
    """Texts as ids on the device of the model; all else as it is."""
    given = [tokens] if isinstance(tokens, str) else tokens
    texts = [] if isinstance(given, (Tensor, Mapping)) else [t for t in given if isinstance(t, str)]
    if bool(texts) != (tokenizer is not None) or len(texts) not in (0, len(given)):
        raise ValueError(
            'only texts need a tokenizer, and tokenizer(text)["input_ids"] must be their ids; got '
            f"{len(texts)} texts among {len(given)} sequences and tokenizer={tokenizer!r}"
        )
    if tokenizer is None:
        return tokens
    device = next(model.parameters()).device
    return [torch.tensor(tokenizer(text)["input_ids"], device=device) for text in texts]


def _sequences(tokens: Tensor | Sequence[Tensor], lengths: Sequence[int] | None) -> list[Tensor]:
    """The sequences without their padding."""
    if isinstance(tokens, Tensor):
        fits = tokens.ndim == (3 if tokens.is_floating_point() else 2) and len(tokens) > 0
    else:
        fits = len(tokens) > 0 and all(isinstance(sequence, Tensor) for sequence in tokens)
    if not fits:
        given = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(
            "tokens must be ids (B, N), embedded tokens (B, N, D) or a list of tensors, one for each "
            f"sequence, at least one; got {given}. Of a tokenizer's batch give batch['input_ids'], with "
            "lengths=batch['attention_mask'].sum(1).tolist() if it is padded"
        )
    sequences = list(tokens)
    if lengths is None:
        return sequences
    sizes = [len(sequence) for sequence in sequences]
    if len(lengths) != len(sizes) or any(not 1 <= k <= n for k, n in zip(lengths, sizes, strict=True)):
        raise ValueError(f"lengths must be one for each sequence, in 1..{sizes}, got {lengths}")
    return [sequence[:length] for length, sequence in zip(lengths, sequences, strict=True)]


@contextlib.contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[float], None]]:
    """A function that moves a progress bar by so many sequences."""
    if not shown:
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f}/{task.total}"),
    )
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("sequences", total=total)
        yield lambda amount: bar.advance(task, amount)
