import pytest

from benchmarks.edge_harness.report import (
    METRICS,
    Spread,
    format_facts,
    format_table,
    round_ratios,
    spread,
    summarize,
    table_rows,
)

ROUNDS = {
    "edge": [{"decode_tok_s": 30.0}, {"decode_tok_s": 40.0}, {"decode_tok_s": 20.0}],
    "stock": [{"decode_tok_s": 10.0}, {"decode_tok_s": 20.0}, {"decode_tok_s": 20.0}],
}


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0, num_rounds=3)


def test_the_median_of_two_lies_between_them() -> None:
    assert spread([1.0, 4.0]).median == pytest.approx(2.5)


def test_one_round_has_no_range_in_the_table() -> None:
    assert spread([1.25]).text(decimals=1) == "1.2"
    assert spread([1.0, 2.0]).text(decimals=1) == "1.5 (1.0..2.0)"


def test_ratios_are_taken_within_a_round() -> None:
    assert round_ratios([30.0, 40.0], [10.0, 20.0]) == [3.0, 2.0]


def test_a_round_that_only_one_arm_has_finished_has_no_ratio() -> None:
    assert round_ratios([30.0, 40.0], [10.0]) == [3.0]


@pytest.mark.parametrize("stock", [[], [0.0]])
def test_without_a_divisor_there_is_no_ratio(stock: list[float]) -> None:
    assert round_ratios([30.0], stock) is None


def test_the_summary_has_the_median_of_the_ratios_not_the_ratio_of_the_medians() -> None:
    entry = summarize(ROUNDS)["decode_tok_s"]
    assert entry["edge_over_stock"] == [3.0, 2.0, 1.0]
    assert entry["median_edge_over_stock"] == 2.0
    assert entry["arms"]["edge"]["median"] / entry["arms"]["stock"]["median"] == 1.5
    assert entry["arms"]["stock"] == {"median": 20.0, "low": 10.0, "high": 20.0, "num_rounds": 3}


def test_metrics_that_were_not_measured_have_no_row() -> None:
    assert [row[0] for row in table_rows(ROUNDS)] == ["metric", "decode, batch 1, tok/s"]


def test_a_row_holds_spreads_and_ratios() -> None:
    assert table_rows(ROUNDS)[1][1:] == ["higher", "30.0 (20.0..40.0)", "20.0 (10.0..20.0)", "3 2 1", "2"]


def test_one_arm_alone_has_no_ratios() -> None:
    rows = table_rows({"edge": [{"decode_tok_s": 30.0}]})
    assert rows[1] == ["decode, batch 1, tok/s", "higher", "30.0", "-", "-"]


def test_a_value_that_one_arm_lacks_is_a_dash() -> None:
    assert table_rows({"edge": [{"ready_s": 9.0}], "stock": []})[1][2:] == ["9.0", "-", "-", "-"]


def test_columns_are_aligned() -> None:
    lines = format_table([["a", "bbb"], ["cccc", "d"]]).splitlines()
    assert lines == ["a     bbb", "---------", "cccc  d"]


def test_facts_name_what_is_unknown() -> None:
    assert (
        format_facts({"governor": None, "cpus": [0, 1], "dirty": False}) == "governor: unknown\ncpus: 0 1\ndirty: False"
    )


def test_metric_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
