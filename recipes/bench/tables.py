"""The benchmark's figures as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

# rich takes 80 columns where it does not write to a terminal, too few for three lengths.
_PLAIN_WIDTH = 120


def _times(ratio: dict[str, Any] | None, *, quartiles: bool) -> str:
    if ratio is None:
        return "-"
    digits = 3 if ratio["median"] < 0.2 else 2
    text = f"{ratio['median']:.{digits}f}"
    return f"{text} ({ratio['low']:.{digits}f}-{ratio['high']:.{digits}f})" if quartiles else text


def speed_table(document: dict[str, Any]) -> Table:
    """Milliseconds and times of nn.MultiheadAttention, a column pair for each length."""
    settings = document["settings"]
    clock = "processor" if settings["cpu_time"] else "wall-clock"
    table = Table(
        title=f"forward + backward, {settings['tokens']} tokens, D = {settings['dim']}, "
        f"H = {settings['heads']}, {settings['dtype']}, {settings['threads']} threads, {clock} time"
    )
    table.add_column("layer")
    for n in document["lengths"]:
        table.add_column(f"N = {n}\nms", justify="right")
        table.add_column("\n× MHA", justify="right")
    for rows in zip(*document["lengths"].values(), strict=True):
        cells: list[str] = []
        for row in rows:
            if "skipped" in row:
                cells += ["-", "-"]
            else:
                cells += [f"{row['median_ms']:.1f}", _times(row["ratio_to_mha"], quartiles=False)]
        table.add_row(rows[0]["label"], *cells)
    return table


def memory_table(document: dict[str, Any]) -> Table:
    """Peak memory of a process that runs one pass."""
    table = Table(title=f"peak memory, one sequence of {document['settings']['memory_length']} tokens")
    table.add_column("layer")
    table.add_column("process, MB", justify="right")
    table.add_column("of these the pass", justify="right")
    labels = {row["key"]: row["label"] for rows in document["lengths"].values() for row in rows}
    for key, memory in document["memory"].items():
        cells = ["not measured here", "-"]
        if memory is not None:
            cells = [f"{memory['peak'] / 1e6:.0f}", f"{(memory['peak'] - memory['before']) / 1e6:.0f}"]
        table.add_row(labels[key], *cells)
    return table


def target_table(document: dict[str, Any]) -> Table:
    """Every target, what was measured, and the verdict; unclear where load may have decided it."""
    table = Table(title="targets")
    for title in ("target", "N", "measured (quartiles)", "limit", ""):
        table.add_column(title, justify="left" if title in ("target", "") else "right")
    words = {True: "[green]met[/]", False: "[bold red]MISSED[/]", None: "not measured"}
    for target in document["targets"]:
        sign = "≤" if target["at_most"] else "≥"
        table.add_row(
            target["name"],
            str(target["length"]),
            _times(target["measured"], quartiles=True),
            f"{sign} {target['limit']:.2f}",
            words[target["passed"]] + (", unclear" if target["clear"] is False else ""),
        )
    return table


def show(document: dict[str, Any]) -> None:
    """Prints all tables, and why layers are missing from them."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(speed_table(document))
    rows = [row for rows in document["lengths"].values() for row in rows]
    for reason in sorted({f"{row['label']}: {row['skipped']}" for row in rows if "skipped" in row}):
        console.print(reason, markup=False, highlight=False, soft_wrap=True)
    console.print(memory_table(document))
    console.print(target_table(document))
    facts = document["environment"]
    console.print(
        f"torch {facts['torch']} on {facts['cpu_count']} cores ({facts['cpu_capability']}), "
        f"{facts['threads']} threads; share of measurements that no other process disturbed: "
        + ", ".join(f"{share:.0%} at N = {n}" for n, share in document["quiet_share"].items()),
        markup=False,
        highlight=False,
    )
