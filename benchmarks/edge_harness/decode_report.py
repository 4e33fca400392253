"""Numbers of the rounds of `bench_decode` to a table and to plain data: each arm, and ours over each of the peer's."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.edge_harness.decode_work import DECODE_NAME, NEW_TOKENS, PROMPT_LENGTHS, prefill_name
from benchmarks.edge_harness.report import NO_VALUE, Metric, Rounds, Spread, metric_values, round_ratios, spread

PEER = "llama"
METRICS = (
    *(Metric(prefill_name(length), f"prefill, {length} tokens, tok/s", "higher") for length in PROMPT_LENGTHS),
    Metric(DECODE_NAME, f"decode, {NEW_TOKENS} tokens, tok/s", "higher"),
    Metric("decode_gb_s", "weights read in decode, GB/s", "higher", 2),
    Metric("streaming_gb_s", "streaming ceiling just before, GB/s", "higher"),
    Metric("streaming_share_percent", "the same, % of the streaming ceiling", "higher"),
    Metric("ready_s", "ready, s", "lower", 2),
    Metric("rss_anon_ready_mib", "RssAnon when ready, MiB", "lower", 0),
    Metric("rss_anon_end_mib", "RssAnon after the load, MiB", "lower", 0),
    Metric("peak_rss_anon_mib", "RssAnon, the most seen, MiB", "lower", 0),
)


def summarize_decode(rounds: Rounds, metrics: Sequence[Metric] = METRICS) -> dict[str, Any]:
    """Metric name to direction, spread of each arm, and ratios of our arms over the peer's, round by round."""
    summary: dict[str, Any] = {}
    for metric in metrics:
        values = {arm: found for arm in rounds if (found := metric_values(rounds[arm], metric.name))}
        if values:
            arms = {arm: vars(spread(found)) for arm, found in values.items()}
            summary[metric.name] = {"better": metric.better, "arms": arms, "ratios": _ratios(values)}
    return summary


def _ratios(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """`ours/peer` to the ratio of each round and their median."""
    pairs = [(ours, peer) for ours in values for peer in values if not is_peer(ours) and is_peer(peer)]
    found = {f"{ours}/{peer}": round_ratios(values[ours], values[peer]) for ours, peer in pairs}
    return {name: {"rounds": ratios, "median": statistics.median(ratios)} for name, ratios in found.items() if ratios}


def is_peer(arm: str) -> bool:
    """Whether an arm is llama.cpp."""
    return arm.startswith(PEER)


def decode_rows(rounds: Rounds, metrics: Sequence[Metric] = METRICS) -> list[list[str]]:
    """Header and one row a metric: median and range over the rounds of each arm."""
    summary = summarize_decode(rounds, metrics)
    rows = [["metric", "better", *rounds]]
    for metric in metrics:
        if metric.name in summary:
            spreads = summary[metric.name]["arms"]
            cells = [Spread(**spreads[arm]).text(metric.decimals) if arm in spreads else NO_VALUE for arm in rounds]
            rows.append([metric.label, metric.better, *cells])
    return rows


def ratio_rows(rounds: Rounds, metrics: Sequence[Metric] = METRICS) -> list[list[str]]:
    """Header and one row a metric: median and range of the ratios of each pair; only the header without a peer."""
    summary = summarize_decode(rounds, metrics)
    pairs = list(dict.fromkeys(pair for entry in summary.values() for pair in entry["ratios"]))
    rows = [["ratio, by round", "better", *pairs]]
    for metric in metrics:
        ratios = summary[metric.name]["ratios"] if metric.name in summary else {}
        if ratios:
            cells = [spread(ratios[pair]["rounds"]).text(2) if pair in ratios else NO_VALUE for pair in pairs]
            rows.append([metric.label, metric.better, *cells])
    return rows
