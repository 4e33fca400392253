"""Numbers of the rounds of `bench_decode` to a table and to plain data: each arm, and ours over each of the peer's."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.edge_harness.decode_work import (
    NEW_TOKENS,
    decode_depths,
    decode_name,
    prefill_name,
    prompt_lengths,
)
from benchmarks.edge_harness.measurement import Workload
from benchmarks.edge_harness.report import NO_VALUE, Metric, Rounds, Spread, metric_values, round_ratios, spread

PEER = "llama"
RESOURCES = (
    Metric("decode_gb_s", "weights read in decode, GB/s", "higher", 2),
    Metric("streaming_gb_s", "streaming ceiling, before and after, GB/s", "higher"),
    Metric("streaming_share_percent", "weights read, % of the streaming ceiling", "higher"),
    Metric("unsteady", "1: the ceiling changed by over 15%", "lower", 0),
    Metric("ready_s", "ready, s", "lower", 2),
    Metric("rss_anon_ready_mib", "RssAnon when ready, MiB", "lower", 0),
    Metric("rss_anon_end_mib", "RssAnon after the load, MiB", "lower", 0),
    Metric("peak_rss_anon_mib", "RssAnon, the most seen, MiB", "lower", 0),
)


def floor_name(depth: int) -> str:
    """Metric: the time that memory allows for a step after `depth` tokens."""
    return f"floor_d{depth}_ms"


def over_floor_name(depth: int) -> str:
    """Metric: how many times as long the step took."""
    return f"over_floor_d{depth}"


def metrics_of(work: Workload) -> tuple[Metric, ...]:
    """The rows of a table about `work`."""
    prefill = [Metric(prefill_name(n), f"prefill, {n} tokens, tok/s", "higher") for n in prompt_lengths(work)]
    decode = []
    for depth in decode_depths(work):
        where = f" after {depth}" if depth else ""
        decode.append(Metric(decode_name(depth), f"decode, {NEW_TOKENS} tokens{where}, tok/s", "higher"))
        if depth:
            decode.append(Metric(floor_name(depth), f"floor of a step after {depth}, ms", "lower", 2))
            decode.append(Metric(over_floor_name(depth), f"step over floor after {depth}", "lower", 2))
    return (*prefill, *decode, *RESOURCES)


def summarize_decode(rounds: Rounds, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Metric name to direction, spread of each arm, and ratios of our arms over the peer's, round by round."""
    summary: dict[str, Any] = {}
    for metric in metrics:
        values = {arm: found for arm in rounds if (found := metric_values(rounds[arm], metric.name))}
        if values:
            arms = {arm: vars(spread(found)) for arm, found in values.items()}
            summary[metric.name] = {"better": metric.better, "arms": arms, "ratios": _ratios(rounds, metric.name)}
    return summary


def _ratios(rounds: Rounds, name: str) -> dict[str, dict[str, Any]]:
    """`ours/peer` to the ratio of each round in which both have the metric, and their median."""
    found = {}
    for ours, peer in itertools.product(rounds, rounds):
        if is_peer(ours) or not is_peer(peer):
            continue
        both = [pair for pair in zip(rounds[ours], rounds[peer], strict=False) if all(name in each for each in pair)]
        found[f"{ours}/{peer}"] = round_ratios([one[name] for one, _ in both], [other[name] for _, other in both])
    return {name: {"rounds": ratios, "median": statistics.median(ratios)} for name, ratios in found.items() if ratios}


def is_peer(arm: str) -> bool:
    """Whether an arm is llama.cpp."""
    return arm.startswith(PEER)


def decode_rows(rounds: Rounds, metrics: Sequence[Metric]) -> list[list[str]]:
    """Header and one row a metric: median and range over the rounds of each arm."""
    summary = summarize_decode(rounds, metrics)
    rows = [["metric", "better", *rounds]]
    for metric in metrics:
        if metric.name in summary:
            spreads = summary[metric.name]["arms"]
            cells = [Spread(**spreads[arm]).text(metric.decimals) if arm in spreads else NO_VALUE for arm in rounds]
            rows.append([metric.label, metric.better, *cells])
    return rows


def ratio_rows(rounds: Rounds, metrics: Sequence[Metric]) -> list[list[str]]:
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
