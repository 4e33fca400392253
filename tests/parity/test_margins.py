"""How far the paths of the packed model are from float32, and the prompts on which that cannot change a token."""

from pathlib import Path

import pytest
import torch

from tests.margins import MIN_MARGIN, PROMPTS, QUESTION, ClearPrompt, Margins, NearTieError
from tests.parity.decoder_harness import Sequences, open_path, runnable_paths
from vllm_omni.quantization.artifact import read_artifact

TEXT = (
    "The lighthouse keeper climbed the narrow stairs every evening at dusk, carrying a lantern and a small book. From "
    "the gallery he could see the fishing boats returning to the harbour, their sails catching the last light of the "
    "sun. He wrote down the weather, the direction of the wind, and the names of the ships that passed. "
)
# How often the root mean square of the lead's difference goes into the bound, at least.
MIN_SIGMAS = 6.0


@pytest.fixture(scope="module")
def texts(margins: Margins) -> list[list[int]]:
    """Tokens of the clear prompts with their answers, and of a text whose continuation is open."""
    answered = [[*margins.token_ids(prompt), *margins.require(prompt).token_ids] for prompt in PROMPTS]
    return [*answered, list(margins.tokenizer(TEXT)["input_ids"])]


@torch.inference_mode()
def lead_differences(
    margins: Margins, path_name: str, kind: str, directory: Path, token_ids: list[int]
) -> torch.Tensor:
    """By how much the lead of the first choice in float32 differs on a path, for each token but the first few."""
    artifact = read_artifact(directory)
    path, shape = open_path(path_name, artifact)
    logits = Sequences(path, shape, dict(artifact.config), kind=kind).step({0: token_ids})
    path.close()
    reference = margins.model(torch.tensor([token_ids])).logits[0]
    first, second = reference.topk(2, dim=1).indices.T
    rows = torch.arange(len(token_ids))
    difference = logits - reference
    return (difference[rows, first] - difference[rows, second])[3:]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("path_name", runnable_paths())
def test_the_bound_is_above_what_a_path_changes(
    margins: Margins, texts: list[list[int]], smollm2_artifact: Path, path_name: str, kind: str
) -> None:
    found = torch.cat([lead_differences(margins, path_name, kind, smollm2_artifact, text) for text in texts])
    assert MIN_SIGMAS * found.square().mean().sqrt() < MIN_MARGIN
    assert found.abs().max() < MIN_MARGIN


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.text)
def test_a_clear_prompt_has_its_answer(margins: Margins, prompt: ClearPrompt) -> None:
    answer = margins.require(prompt)
    assert prompt.answer in answer.text
    assert len(answer.token_ids) == prompt.num_tokens


def test_the_question_is_answered_to_its_end(margins: Margins) -> None:
    assert margins.require(QUESTION).token_ids[-1] == margins.tokenizer.eos_token_id
    assert margins.require(QUESTION).text == "The capital of South Korea is Seoul."


def test_a_near_tie_is_refused_with_its_tokens(margins: Margins) -> None:
    """In float32 the first token has probability 0.155 and the second 0.140."""
    near_tie = ClearPrompt("What is the capital of France?", "Paris", 8, is_chat=True)
    with pytest.raises(NearTieError, match=r"near tie: tokens lead by less than 1.5 .*'The' by 0\.\d"):
        margins.require(near_tie)


def test_an_answer_that_the_model_does_not_give_is_refused(margins: Margins) -> None:
    with pytest.raises(NearTieError, match=r"is answered ' Paris' in float32, without 'Rome'"):
        margins.require(ClearPrompt("The capital of France is", "Rome", 1))
