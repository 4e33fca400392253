"""Numbers of all rounds to a table and to plain data. Pure functions; nothing is measured or written here."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_VALUE = "-"


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: Key in the measurements.
        label: What a reader sees; states the unit.
        better: `higher` or `lower`.
        decimals: Digits after the point in the table.
    """

    name: str
    label: str
    better: str
    decimals: int = 1


METRICS = (
    Metric("cold_ready_s", "ready, empty caches, s", "lower"),
    Metric("ready_s", "ready, s", "lower"),
    Metric("num_processes", "processes", "lower", 0),
    Metric("rss_anon_ready_mib", "RssAnon when ready, MiB", "lower", 0),
    Metric("rss_anon_end_mib", "RssAnon after the load, MiB", "lower", 0),
    Metric("first_request_s", "first request, s", "lower", 3),
    Metric("second_request_s", "second request, s", "lower", 3),
    Metric("first_over_second", "first / second request", "lower", 2),
    Metric("ttft32_ms", "first token, 32 prompt tokens, ms", "lower"),
    Metric("decode_tok_s", "decode, batch 1, tok/s", "higher"),
    Metric("concurrent_decode_tok_s", "decode, all clients at once, tok/s", "higher"),
    Metric("pp512_tok_s", "prefill, 512 tokens, tok/s", "higher"),
    Metric("idle_cpu_percent", "idle, % of one core", "lower"),
)

# Arm to the values of its rounds, in order.
Rounds = Mapping[str, Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class Spread:
    """Median and range of one metric over the rounds."""

    median: float
    low: float
    high: float
    num_rounds: int

    def text(self, decimals: int) -> str:
        median, low, high = (f"{value:.{decimals}f}" for value in (self.median, self.low, self.high))
        return median if self.num_rounds == 1 else f"{median} ({low}..{high})"


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of `values`, which are not empty."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def round_ratios(edge: Sequence[float], stock: Sequence[float]) -> list[float] | None:
    """edge / stock of each round that both arms have finished; None when there is none or a divisor is 0."""
    pairs = list(zip(edge, stock, strict=False))
    if not pairs or any(divisor == 0 for _, divisor in pairs):
        return None
    return [value / divisor for value, divisor in pairs]


def metric_values(rounds: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Values of one metric, one for each round that has it."""
    return [values[name] for values in rounds if name in values]


def summarize(rounds: Rounds) -> dict[str, Any]:
    """Metric name to direction, spread of each arm, and edge/stock ratios; metrics that nobody has are left out."""
    summary: dict[str, Any] = {}
    for metric in METRICS:
        values = {arm: metric_values(measured, metric.name) for arm, measured in rounds.items()}
        arms = {arm: vars(spread(found)) for arm, found in values.items() if found}
        if not arms:
            continue
        ratios = round_ratios(values.get("edge", ()), values.get("stock", ()))
        summary[metric.name] = {"better": metric.better, "arms": arms, "edge_over_stock": ratios}
        summary[metric.name]["median_edge_over_stock"] = statistics.median(ratios) if ratios else None
    return summary


def table_rows(rounds: Rounds) -> list[list[str]]:
    """Header and one row a metric, as text."""
    summary = summarize(rounds)
    arms = list(rounds)
    rows = [["metric", "better", *arms, "edge/stock by round", "median"]]
    for metric in METRICS:
        if metric.name not in summary:
            continue
        entry = summary[metric.name]
        spreads = entry["arms"]
        cells = [Spread(**spreads[arm]).text(metric.decimals) if arm in spreads else NO_VALUE for arm in arms]
        ratios = entry["edge_over_stock"]
        by_round = " ".join(f"{ratio:.3g}" for ratio in ratios) if ratios else NO_VALUE
        median = f"{entry['median_edge_over_stock']:.3g}" if ratios else NO_VALUE
        rows.append([metric.label, metric.better, *cells, by_round, median])
    return rows


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in aligned columns; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def format_facts(facts: Mapping[str, Any]) -> str:
    """One `name: value` line a fact; an unknown is said to be one."""
    return "\n".join(f"{name}: {_fact_text(value)}" for name, value in facts.items())


def _fact_text(value: Any) -> str:
    if value is None:
        return "unknown"
    return " ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)
