"""How smooth are the attention layers of a model, on the inputs that they get?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.analysis.bounds.local import METHODS, local_bound
from lipformer.analysis.probes.gain_table import GainRow, GainTable
from lipformer.analysis.probes.probe import AttentionProbe, probe_attention
from lipformer.estimates import estimate_lipschitz


def layer_gains(
    model: nn.Module,
    tokens: Tensor | Sequence[Tensor],
    *,
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
    r"""The local gain of every self-attention layer of a model at the tokens that enter it.

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
            (B, N, D) of embedded tokens.
        lengths: of each sequence; what follows is padding and is cut off, so that it cannot matter.
        tol: relative tolerance of a gain.
        restarts: random directions that span the first search space of each gain.
        max_iter: largest number of steps of each gain.
        bound: method of `local_bound` for the upper bound beside each gain, or None for none. "min" and
            "sharp" are much closer and take far longer than the gain for long sequences. Layers whose
            logits depend on positions (ALiBi, rotary) have no bound.
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
    if bound is not None and bound not in METHODS:
        raise ValueError(f"bound must be None or one of {METHODS}, got {bound!r}")
    sequences = _sequences(tokens, lengths)
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


def _sequences(tokens: Tensor | Sequence[Tensor], lengths: Sequence[int] | None) -> list[Tensor]:
    """The sequences without their padding."""
    if isinstance(tokens, Tensor):
        allowed = 3 if tokens.is_floating_point() else 2
        if tokens.ndim != allowed:
            raise ValueError(
                "tokens must be ids (B, N), embedded tokens (B, N, D) or a list of sequences, got "
                f"{tokens.dtype} {tuple(tokens.shape)}"
            )
    if isinstance(tokens, Mapping):
        raise TypeError(
            f"tokens must be ids (B, N) or a list of sequences, got {type(tokens).__name__}: give "
            "batch['input_ids'], with lengths=batch['attention_mask'].sum(1).tolist() if it is padded"
        )
    sequences = list(tokens)
    for sequence in sequences:
        if not isinstance(sequence, Tensor):
            raise TypeError(
                "tokens must be a tensor or a list of tensors, ids (N,) or embedded tokens (N, D), got "
                f"{type(tokens).__name__} of {type(sequence).__name__}: give [torch.tensor(ids) for ids "
                "in ...]; a tensor of padded sequences takes lengths="
            )
    if not sequences:
        raise ValueError("tokens must hold at least one sequence, got none")
    if lengths is None:
        return sequences
    if len(lengths) != len(sequences):
        raise ValueError(
            f"lengths must be one for each of {len(sequences)} sequences, got {len(lengths)}"
        )
    for length, sequence in zip(lengths, sequences, strict=True):
        if not _is_length(length) or not 1 <= length <= len(sequence):
            raise ValueError(f"a length must be an integer in 1..{len(sequence)}, got {length!r}")
    return [sequence[: int(length)] for length, sequence in zip(lengths, sequences, strict=True)]


def _is_length(given: object) -> bool:
    """Whether it is an integer, or one of a tensor of them."""
    if isinstance(given, Tensor):
        return given.ndim == 0 and not given.is_floating_point() and given.dtype != torch.bool
    return isinstance(given, Integral) and not isinstance(given, bool)


@contextlib.contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[float], None]]:
    """A function that moves a progress bar by so many sequences."""
    if not shown:
        yield lambda _: None
        return
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as missing:
        raise ImportError("progress=True needs rich: pip install rich") from missing
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f}/{task.total}"),
    )
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("sequences", total=total)
        yield lambda amount: bar.advance(task, amount)
