"""Prompts whose greedy answer is the same on every numeric path: the model in float32 leads clearly at each step.

Arms of the native core, the torch path and the caches round differently. Where the two largest logits are close, each
of them may choose another token without being wrong. A test that asserts words, or compares tokens of two paths, takes
its prompt from here, and `Margins.require` refuses the prompt when it does not lead by `MIN_MARGIN`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Logits. Measured on torch and on the native arms avx512_vnni, avx2 and generic, with both caches: the lead of the
# first choice differs from that in float32 by at most 0.19 as root mean square, and by 1.05 at the worst token.
# tests/parity/test_margins.py measures it again.
MIN_MARGIN = 1.5


@dataclass(frozen=True)
class ClearPrompt:
    """A prompt for SmolLM2-135M-Instruct.

    Attributes:
        text: A completion's prompt, or a user's only message.
        answer: What the clear tokens contain.
        num_tokens: Greedy tokens that lead clearly, an end of turn included; tests may rely on these and no others.
        is_chat: The text is a message in the model's chat template.
    """

    text: str
    answer: str
    num_tokens: int
    is_chat: bool = False


# The whole answer, its end included.
QUESTION = ClearPrompt("What is the capital of South Korea?", "Seoul", 9, is_chat=True)
COMPLETION = ClearPrompt("The capital of France is", " Paris", 1)
COUNTING = ClearPrompt("1, 2, 3, 4,", " 5, 6, 7, 8, 9, 10, 11, 12", 26)
PROMPTS = (QUESTION, COMPLETION, COUNTING)


class NearTieError(AssertionError):
    """A prompt on which numeric paths may differ without being wrong."""


@dataclass(frozen=True)
class ClearAnswer:
    """Greedy tokens of the float32 model, and their text without control tokens."""

    token_ids: tuple[int, ...]
    text: str


class Margins:
    """The plain model in float32, and what it says to prompts."""

    def __init__(self, checkpoint: Path):
        # Not above: servers' clients and child processes that must begin without torch import the prompts.
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._answers: dict[ClearPrompt, ClearAnswer] = {}

    def token_ids(self, prompt: ClearPrompt) -> list[int]:
        """The tokens that a server makes of the prompt."""
        if not prompt.is_chat:
            return list(self.tokenizer(prompt.text)["input_ids"])
        messages = [{"role": "user", "content": prompt.text}]
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        return list(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)

    def generate(self, token_ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens, and by how much each one's logit leads the next largest."""
        import torch

        chosen, leads = [], []
        step, past = token_ids, None
        with torch.inference_mode():
            for _ in range(num_tokens):
                out: Any = self.model(torch.tensor([step]), past_key_values=past, use_cache=True, logits_to_keep=1)
                top = out.logits[0, -1].topk(2)
                step, past = [int(top.indices[0])], out.past_key_values
                chosen.append(step[0])
                leads.append(float(top.values[0] - top.values[1]))
        return chosen, leads

    def require(self, prompt: ClearPrompt) -> ClearAnswer:
        """The prompt's clear tokens, of which each leads by `MIN_MARGIN`.

        Raises:
            NearTieError: One does not, or they do not contain `prompt.answer`.
        """
        if prompt not in self._answers:
            self._answers[prompt] = self._measure(prompt)
        return self._answers[prompt]

    def _measure(self, prompt: ClearPrompt) -> ClearAnswer:
        chosen, leads = self.generate(self.token_ids(prompt), prompt.num_tokens)
        said = [f"{self.tokenizer.decode([token])!r} by {lead:.2f}" for token, lead in zip(chosen, leads, strict=True)]
        if min(leads) < MIN_MARGIN:
            raise NearTieError(
                f"{prompt.text[-80:]!r} is a near tie: tokens lead by less than {MIN_MARGIN:g} in float32, so that "
                f"rounding may change them: {', '.join(said)}. Take another prompt, or fewer of its tokens"
            )
        text = self.tokenizer.decode(chosen, skip_special_tokens=True)
        if prompt.answer not in text:
            raise NearTieError(f"{prompt.text[-80:]!r} is answered {text!r} in float32, without {prompt.answer!r}")
        return ClearAnswer(tuple(chosen), text)
