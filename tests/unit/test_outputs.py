import json
from types import SimpleNamespace

from vllm_omni.outputs import OmniRequestOutput


def completion(text: str = "hello", index: int = 0) -> SimpleNamespace:
    """What a vLLM `CompletionOutput` has of the fields that are read here."""
    return SimpleNamespace(index=index, text=text, token_ids=(1, 2), finish_reason="stop", stop_reason=None)


def test_an_empty_output_says_so() -> None:
    output = OmniRequestOutput()
    assert output.text == ""
    assert output.finished
    assert not output.is_pipeline_output


def test_text_is_that_of_the_first_sequence() -> None:
    assert OmniRequestOutput(outputs=[completion("first"), completion("second", 1)]).text == "first"


def test_outputs_do_not_share_their_lists() -> None:
    first, second = OmniRequestOutput(), OmniRequestOutput()
    first.outputs.append(completion())
    assert second.outputs == []


def test_a_stage_output_keeps_its_fields_under_the_caller_s_id() -> None:
    raw = SimpleNamespace(
        request_id="internal-1", prompt="hi", outputs=[completion()], finished=False, num_cached_tokens=3
    )
    output = OmniRequestOutput.from_stage_output(raw, "caller-1", stage_id=0)
    assert output.request_id == "caller-1"
    assert raw.request_id == "internal-1"
    assert (output.prompt, output.finished, output.num_cached_tokens) == ("hi", False, 3)
    assert output.outputs is raw.outputs
    assert output.is_pipeline_output
    assert output.final_output_type == "text"


def test_a_subclass_wraps_as_itself() -> None:
    class Special(OmniRequestOutput):
        pass

    assert isinstance(Special.from_stage_output(SimpleNamespace(outputs=[]), "a", 0), Special)


def test_to_dict_holds_plain_values() -> None:
    output = OmniRequestOutput(request_id="a", prompt_token_ids=[5], outputs=[completion()], stage_id=0)
    assert json.loads(json.dumps(output.to_dict())) == {
        "request_id": "a",
        "prompt_token_ids": [5],
        "finished": True,
        "stage_id": 0,
        "final_output_type": "text",
        "outputs": [{"index": 0, "text": "hello", "token_ids": [1, 2], "finish_reason": "stop", "stop_reason": None}],
    }
