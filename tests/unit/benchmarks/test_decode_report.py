from benchmarks.edge_harness.decode_report import decode_rows, metrics_of, ratio_rows, summarize_decode
from benchmarks.edge_harness.measurement import Workload

METRICS = metrics_of(Workload(0, 3, 1, 100))
ROUNDS = {
    "native": [{"tg64_tok_s": 20.0, "ready_s": 1.0}, {"tg64_tok_s": 30.0, "ready_s": 1.0}],
    "engine": [{"tg64_tok_s": 10.0}, {"tg64_tok_s": 20.0}],
    "llama Q4_0": [{"tg64_tok_s": 10.0, "ready_s": 2.0}, {"tg64_tok_s": 10.0, "ready_s": 2.0}],
    "llama Q4_1": [{"tg64_tok_s": 5.0}],
}


def test_ratios_are_of_ours_over_each_peer_within_a_round() -> None:
    ratios = summarize_decode(ROUNDS, METRICS)["tg64_tok_s"]["ratios"]
    assert ratios["native/llama Q4_0"] == {"rounds": [2.0, 3.0], "median": 2.5}
    assert ratios["engine/llama Q4_0"] == {"rounds": [1.0, 2.0], "median": 1.5}
    # A round that the peer has not finished counts for nothing.
    assert ratios["native/llama Q4_1"]["rounds"] == [4.0]
    assert len(ratios) == 4


def test_the_table_has_a_column_for_each_arm() -> None:
    rows = decode_rows(ROUNDS, METRICS)
    assert rows[0] == ["metric", "better", "native", "engine", "llama Q4_0", "llama Q4_1"]
    assert rows[1] == [
        "decode, 64 tokens, tok/s", "higher", "25.0 (20.0..30.0)", "15.0 (10.0..20.0)", "10.0 (10.0..10.0)", "5.0",
    ]  # fmt: skip
    assert rows[2][0] == "ready, s"
    assert rows[2][3] == "-"


def test_the_ratios_have_a_table_of_their_own() -> None:
    rows = ratio_rows(ROUNDS, METRICS)
    assert rows[0][2:] == ["native/llama Q4_0", "native/llama Q4_1", "engine/llama Q4_0", "engine/llama Q4_1"]
    assert rows[1][2:] == ["2.50 (2.00..3.00)", "4.00", "1.50 (1.00..2.00)", "2.00"]
    assert rows[2] == ["ready, s", "lower", "0.50 (0.50..0.50)", "-", "-", "-"]


def test_without_a_peer_there_are_no_ratios() -> None:
    assert ratio_rows({"native": ROUNDS["native"]}, METRICS) == [["ratio, by round", "better"]]


def test_ratios_leave_out_rounds_in_which_one_arm_has_no_value() -> None:
    """An unsteady turn has no floor; the next round's value does not take its place."""
    rounds = {"native": [{"over_floor_d512": 1.0}, {"over_floor_d512": 2.0}], "llama": [{}, {"over_floor_d512": 4.0}]}
    summary = summarize_decode(rounds, metrics_of(Workload(0, 3, 1, 100, (512,))))
    assert summary["over_floor_d512"]["ratios"]["native/llama"] == {"rounds": [0.5], "median": 0.5}


def test_depths_have_a_row_for_prefill_decode_floor_and_their_ratio() -> None:
    names = [metric.name for metric in metrics_of(Workload(0, 3, 1, 100, (512, 4096)))]
    assert names[:2] == ["pp512_tok_s", "pp4096_tok_s"]
    assert names[2:5] == ["tg64_d512_tok_s", "floor_d512_ms", "over_floor_d512"]
    assert "tg64_tok_s" not in names
