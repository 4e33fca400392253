from benchmarks.edge_harness.measurement import EXPECTED_ANSWER, FIRST_QUESTION, Measurement, Workload
from tests.margins import QUESTION

WORKLOAD = Workload(seed=0, trials=2, concurrency=4, vocab_size=1000)


def test_the_answer_that_is_checked_does_not_hang_on_rounding() -> None:
    assert (QUESTION.text, QUESTION.answer) == (FIRST_QUESTION, EXPECTED_ANSWER)


def test_a_prompt_is_the_same_in_both_arms() -> None:
    assert WORKLOAD.prompt(1, "decode/0", 32) == Workload(0, 5, 4, 1000).prompt(1, "decode/0", 32)


def test_prompts_differ_by_trial_round_and_seed() -> None:
    prompts = [
        WORKLOAD.prompt(1, "decode/0", 32),
        WORKLOAD.prompt(1, "decode/1", 32),
        WORKLOAD.prompt(2, "decode/0", 32),
        Workload(1, 2, 4, 1000).prompt(1, "decode/0", 32),
    ]
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert len({prompt[0] for prompt in prompts}) > 1


def test_prompt_ids_keep_away_from_the_ends_of_the_vocabulary() -> None:
    prompt = WORKLOAD.prompt(1, "prefill/0", 512)
    assert len(prompt) == 512
    assert min(prompt) >= 100
    assert max(prompt) < 750


def test_samples_are_kept_beside_their_median() -> None:
    result = Measurement()
    result.add_samples("decode_tok_s", [3.0, 1.0, 2.0])
    assert result.values == {"decode_tok_s": 2.0}
    assert result.samples == {"decode_tok_s": [3.0, 1.0, 2.0]}
