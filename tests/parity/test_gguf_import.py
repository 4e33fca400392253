"""GGUF import against independent references: the block formulas, transformers models, and a published model."""

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.gguf_file import open_gguf
from vllm_omni.quantization.gguf_import import import_gguf, plan_import
from vllm_omni.quantization.gguf_tensors import decode_tensor

TOKENS = ["<end>", *sorted(ByteLevel.alphabet()), "he"]
TINY = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
TRICKY_TEXTS = [
    "The capital of France is Paris.",
    "  leading, trailing  and   inner spaces   ",
    "tabs\tnew\nlines\r\n\r\nand\n\n\nmore",
    "1234567890 3.14159 1,000,000 ½ Ⅷ",
    "naïve café Ünïcödé Ελληνικά русский עברית العربية हिन्दी",
    "日本語のテキスト 中文 한국어",
    "🙂🚀👩‍👩‍👧‍👦 zero​width",
    "def f(x: int) -> str:\n\treturn f'{x!r}' if x >= 0 else \"-\"  # ok?\n",
    "I'll they've WE'LL don't o'clock",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<repo_name>a/b<file_sep>x.py<jupyter_code>",
    "https://example.org/a?b=c&d=%20#frag <br/> \\n \\\\ ~~~ ###",
]


def reference_values(blocks: bytes, kind: str) -> np.ndarray:
    """Block by block, as the formats are defined: 32 values, half-precision scale, low nibbles first."""
    layouts = {"Q4_0": "<e16B", "Q4_1": "<2e16B", "Q8_0": "<e32b"}
    values: list[float] = []
    for scale, *rest in struct.iter_unpack(layouts[kind], blocks):
        if kind == "Q8_0":
            values += [scale * code for code in rest]
            continue
        minimum, codes = (rest[0], rest[1:]) if kind == "Q4_1" else (-8 * scale, rest)
        values += [scale * (code & 15) + minimum for code in codes]
        values += [scale * (code >> 4) + minimum for code in codes]
    return np.array(values)


def to_gguf(path: Path, model: PreTrainedModel, architecture: str, extra: dict[str, np.ndarray]) -> Path:
    """Writes a transformers model as GGUF, with query and key rows in pair order for Llama."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            writer.add_tensor(*gguf_tensor(name, tensor.numpy(), config, architecture))
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(0)


def gguf_tensor(name: str, values: np.ndarray, config: PretrainedConfig, architecture: str) -> tuple[str, np.ndarray]:
    globals_ = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in globals_:
        return globals_[name], values
    layer, part, kind = name.split(".")[2], name.split(".")[-2], name.split(".")[-1]
    if architecture == "llama" and part in ("q_proj", "k_proj"):
        values = pair_order(values, config.head_dim)
    return f"blk.{layer}.{PARTS[part]}.{kind}", values


def pair_order(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Row i of a head's first half goes to 2 i, row i of its second half to 2 i + 1."""
    result = np.empty_like(values)
    half = head_dim // 2
    for head in range(0, len(values), head_dim):
        for row in range(half):
            result[head + 2 * row] = values[head + row]
            result[head + 2 * row + 1] = values[head + half + row]
    return result


def llama3_factors(config: PretrainedConfig) -> np.ndarray:
    """The divisors that the model's own rotary embedding applies to the plain frequencies."""
    rotary = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / rotary).float().numpy()


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True)),
    "llama-untied-biased": (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE)),
    # This family has no head_dim of its own: 32 / 4 heads.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**{**TINY, "head_dim": 8}, rope_parameters={"rope_theta": 1e6})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY, tie_word_embeddings=True)),
}


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps verification markers out of the user's cache."""
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_model_comes_back_equal(family: str, tmp_path: Path) -> None:
    model_class, config = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    extra = {"rope_freqs.weight": llama3_factors(config)} if family == "llama3-rope" else {}
    path = to_gguf(tmp_path / "tiny.gguf", model, family.split("-")[0].replace("llama3", "llama"), extra)
    import_gguf(plan_import(path, "float32"), tmp_path / "out")

    check_checkpoint(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(again) is model_class
    assert again.config.rope_parameters == config.rope_parameters
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0, msg=name)
    ids = torch.randint(0, config.vocab_size, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (40, 96), (64,)])
def test_blocks_decode_as_defined(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // 32, block_bytes), dtype=np.uint8)
    num_scales = 2 if kind == "Q4_1" else 1
    blocks[:, : 2 * num_scales] = rng.standard_normal((len(blocks), num_scales)).astype(np.float16).view(np.uint8)
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    byte_shape = (*shape[:-1], shape[-1] // 32 * block_bytes)
    writer.add_tensor("x", blocks.reshape(byte_shape), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source = open_gguf(tmp_path / "x.gguf")
    decoded = decode_tensor(source, source.tensors["x"])
    assert decoded.shape == shape
    np.testing.assert_allclose(decoded.reshape(-1), reference_values(blocks.tobytes(), kind), rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2-135M-Instruct, imported in float32."""
    out = tmp_path_factory.mktemp("smollm2") / "hf"
    import_gguf(plan_import(smollm2_gguf, "float32"), out)
    yield out
    (out / "model.safetensors").unlink()


def test_smollm2_is_a_sound_checkpoint(smollm2: Path) -> None:
    report = check_checkpoint(smollm2)
    assert report.num_tensors == 272
    assert report.num_parameters == 134_515_008
    assert report.verified_hash


def test_smollm2_configuration_is_the_published_one(smollm2: Path) -> None:
    config = AutoConfig.from_pretrained(smollm2)
    published = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {name: getattr(config, name) for name in published} == published
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_smollm2_tensors_follow_the_block_formulas(smollm2: Path, smollm2_gguf: Path) -> None:
    weights = load_file(smollm2 / "model.safetensors")
    names = {
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.17.ffn_down.weight": "model.layers.17.mlp.down_proj.weight",
        "blk.29.attn_output.weight": "model.layers.29.self_attn.o_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }
    tensors = {tensor.name: tensor for tensor in GGUFReader(smollm2_gguf).tensors}
    for source_name, name in names.items():
        expected = reference_values(tensors[source_name].data.tobytes(), tensors[source_name].tensor_type.name)
        np.testing.assert_allclose(weights[name].reshape(-1), expected, rtol=1e-6, atol=1e-7, err_msg=name)
    rows = tensors["token_embd.weight"].data[40000:40050]
    np.testing.assert_allclose(
        weights["model.embed_tokens.weight"][40000:40050].reshape(-1),
        reference_values(rows.tobytes(), "Q8_0"),
        rtol=1e-6,
    )
    query = tensors["blk.5.attn_q.weight"]
    expected = reference_values(query.data.tobytes(), "Q4_1").reshape(576, 576)
    np.testing.assert_allclose(pair_order(weights["model.layers.5.self_attn.q_proj.weight"], 64), expected, rtol=1e-6)


def test_smollm2_answers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_smollm2_text_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm2_special_tokens_are_the_published_ones(tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.vocab_size == len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_smollm2_digits_stand_alone(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


def test_smollm2_adds_no_beginning(tokenizer: Any) -> None:
    assert tokenizer.encode("he") == tokenizer.encode("he", add_special_tokens=False)


def test_smollm2_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # Ids that the publisher's course material prints for this system prompt.
    published = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
    assert tokenizer.encode(text)[: len(published)] == published


def test_loading_warns_of_nothing(
    smollm2: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library keeps its messages from the root logger unless told.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        AutoTokenizer.from_pretrained(smollm2)
        AutoConfig.from_pretrained(smollm2)
    assert caplog.records == []
