"""Calibration: the text, its tokens, and the contract of what runs the layers on them.

Running layers needs torch and is done above this package (`model_executor/calibration.py`); a quantizer only sees the
second moments of the inputs of its matrices.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from vllm_omni.errors import ConfigError

DEFAULT_TEXT_PATH = Path(__file__).parent / "data" / "calibration.txt"
TOKENS_PER_WINDOW = 512
MAX_WINDOWS = 64
MIN_TOKENS = 64
# Matrices with the same input share its moments: the first stands for all.
SHARED_INPUTS = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


class LayerRunner(Protocol):
    """Runs a model on the calibration tokens, one decoder layer after another.

    Call order: for each layer from the first, `collect` at most once, then `advance` once; `finish` at the end, at
    most once. Only one layer's weights are held at a time.
    """

    def collect(self, layer: int, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a layer on its inputs and measures what its matrices meet.

        Args:
            layer: Its number.
            weights: Name within the layer (`mlp.down_proj.weight`) to float32, all tensors of the layer.

        Returns:
            Key of `SHARED_INPUTS` to mean second moments of that input: [K, K] float32, the mean of x transpose(x);
            [K] float32, its diagonal, where the runner was told that this is enough.
        """

    def advance(self, layer: int, weights: Mapping[str, np.ndarray] | None) -> None:
        """Makes a layer's outputs the inputs of the next one.

        Args:
            layer: Its number.
            weights: What to run the layer with; None: keep the outputs that `collect` had.
        """

    def finish(self, norm: np.ndarray) -> np.ndarray:
        """Moments of the output projection's input, after the final norm with weight `norm` [hidden] float32."""


def read_calibration(choice: str) -> str | None:
    """The text for `none`, `default` or the path of a file.

    Raises:
        ConfigError: There is no such file, it is not UTF-8, or it is empty.
    """
    if choice == "none":
        return None
    path = DEFAULT_TEXT_PATH if choice == "default" else Path(choice)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibration {choice}: {error}; accepted: none, default, or the path of a UTF-8 text file"
        ) from error
    if not text.strip():
        raise ConfigError(f"--calibration {choice}: the file is empty; pass a text such as the model will see")
    return text


def token_windows(tokenizer: Tokenizer, text: str, max_length: int = TOKENS_PER_WINDOW) -> list[np.ndarray]:
    """The text's tokens in windows of at most `max_length`, [tokens] int64 each, at most 64 of them.

    Raises:
        ConfigError: The text has fewer than 64 tokens.
    """
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    if len(ids) < MIN_TOKENS:
        raise ConfigError(f"--calibration: the text has {len(ids)} tokens, accepted: {MIN_TOKENS} or more")
    windows = [ids[begin : begin + max_length] for begin in range(0, len(ids), max_length)]
    return windows[:MAX_WINDOWS]
