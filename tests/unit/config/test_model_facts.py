import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni.config.model_facts import read_model_facts
from vllm_omni.errors import ConfigError


def test_reads_every_fact(make_model: Callable[..., Path]) -> None:
    files = {
        "generation_config.json": '{"temperature": 0.6}',
        "tokenizer_config.json": '{"chat_template": "from json"}',
        "chat_template.jinja": "from jinja",
    }
    directory = make_model(files, quantization_config={"quant_method": "awq"})
    facts = read_model_facts(str(directory))
    assert facts.path == directory
    assert (facts.model_type, facts.architectures) == ("llama", ("LlamaForCausalLM",))
    assert (facts.num_hidden_layers, facts.num_attention_heads, facts.num_key_value_heads) == (2, 4, 2)
    assert (facts.hidden_size, facts.head_dim, facts.vocab_size) == (64, 16, 256)
    assert (facts.max_position_embeddings, facts.dtype, facts.quant_method) == (2048, "bfloat16", "awq")
    assert facts.chat_template == "from jinja"
    assert facts.generation_defaults == {"temperature": 0.6}


def test_absent_facts_are_none(make_model: Callable[..., Path]) -> None:
    directory = make_model(
        architectures=None,
        max_position_embeddings=None,
        torch_dtype=None,
        num_key_value_heads=None,
        vocab_size=None,
        num_attention_heads=None,
    )
    facts = read_model_facts(str(directory))
    assert facts.architectures == ()
    assert (facts.max_position_embeddings, facts.dtype, facts.num_key_value_heads) == (None, None, None)
    assert (facts.head_dim, facts.vocab_size, facts.chat_template, facts.quant_method) == (None, None, None, None)


def test_stated_head_dim_and_default_key_value_heads(make_model: Callable[..., Path]) -> None:
    facts = read_model_facts(str(make_model(head_dim=128, num_key_value_heads=None)))
    assert (facts.head_dim, facts.num_key_value_heads) == (128, 4)


def test_nested_text_config_fills_what_the_top_lacks(make_model: Callable[..., Path]) -> None:
    facts = read_model_facts(str(make_model(vocab_size=None, text_config={"vocab_size": 7, "hidden_size": 1})))
    assert (facts.vocab_size, facts.hidden_size) == (7, 64)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2}, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", "factor": 8.0}, 2048),
    ],
)
def test_rope_factor_counts_only_where_positions_do_not_contain_it(
    make_model: Callable[..., Path], rope: dict, positions: int
) -> None:
    assert read_model_facts(str(make_model(rope_scaling=rope))).max_position_embeddings == positions


def test_named_chat_templates_give_the_default_one(make_model: Callable[..., Path]) -> None:
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    directory = make_model({"tokenizer_config.json": json.dumps({"chat_template": templates})})
    assert read_model_facts(str(directory)).chat_template == "yes"


def test_missing_path_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/absent' does not exist; accepted: the path of a checkpoint directory"):
        read_model_facts(str(tmp_path / "absent"))


def test_gguf_file_points_to_convert(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="Run `vllm-omni convert "):
        read_model_facts(str(file))


def test_other_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file; accepted: a checkpoint directory"):
        read_model_facts(str(file))


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json.*Is the download complete"):
        read_model_facts(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", r"config\.json is not valid JSON"), ("[]", "holds a JSON list; accepted: an object")],
)
def test_damaged_config(make_model: Callable[..., Path], text: str, message: str) -> None:
    directory = make_model({"config.json": text})
    with pytest.raises(ConfigError, match=message):
        read_model_facts(str(directory))


def test_config_that_is_no_text(make_model: Callable[..., Path]) -> None:
    directory = make_model()
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_facts(str(directory))


def test_missing_model_type(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="has no model_type; accepted"):
        read_model_facts(str(make_model(model_type=None)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "64", "hidden_size is '64'; accepted: a whole number"),
        ("vocab_size", True, "vocab_size is True; accepted: a whole number"),
        ("architectures", "X", "architectures is 'X'; accepted: a list"),
        ("architectures", [1], "accepted: a list of texts"),
        ("rope_scaling", 2, "rope_scaling is 2; accepted: an object"),
    ],
)
def test_wrong_types_name_file_and_key(make_model: Callable[..., Path], key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_facts(str(make_model(**{key: value})))


def test_hub_id_that_is_not_cached_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"is not on this machine.*`hf download org/name --local-dir DIR`"):
        read_model_facts("org/name")


def test_hub_id_that_is_cached_is_read(
    tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = tmp_path / "cache" / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    make_model().rename(repository / "snapshots" / ("a" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert read_model_facts("org/name").model_type == "llama"
