from benchmarks.edge_harness.memory_bandwidth import streaming_ceiling


def test_every_trial_gives_a_rate() -> None:
    rates = streaming_ceiling(2, num_bytes=8 << 20, trials=3)
    assert len(rates) == 3
    # Slower than a disk, or faster than any cache, would be a wrong unit.
    assert all(0.1 < rate < 2000 for rate in rates)
