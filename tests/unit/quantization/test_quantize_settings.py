import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.quantization.packed_format import MatrixFormat
from vllm_omni.quantization.quantize_settings import Override, QuantizeSettings, choose_formats, parse_override

SHAPES = {
    "model.embed_tokens.weight": (50, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.layers.1.mlp.down_proj.weight": (64, 96),
    "lm_head.weight": (50, 64),
}
TIED = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}


def bits_of(overrides: list[str], shapes: dict[str, tuple[int, int]]) -> dict[str, int]:
    settings = QuantizeSettings(overrides=tuple(map(parse_override, overrides)))
    return {name: each.bits for name, each in choose_formats(settings, shapes, {})[0].items()}


def test_without_choices_all_are_alike() -> None:
    formats, kept = choose_formats(QuantizeSettings(), SHAPES, {})
    assert formats == {name: MatrixFormat(*shape, 4, 64) for name, shape in SHAPES.items()}
    assert kept == frozenset()


@pytest.mark.parametrize(
    ("short_name", "met"),
    [
        ("head", {"lm_head.weight"}),
        ("embedding", {"model.embed_tokens.weight"}),
        ("down", {"model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"}),
        ("*.layers.1.*", {"model.layers.1.mlp.down_proj.weight"}),
    ],
)
def test_an_override_meets_its_tensors(short_name: str, met: set[str]) -> None:
    assert {name for name, bits in bits_of([f"{short_name}=8"], SHAPES).items() if bits == 8} == met


def test_the_head_of_a_tied_model_is_its_embedding() -> None:
    assert bits_of(["head=8"], TIED)["model.embed_tokens.weight"] == 8


def test_the_last_override_counts() -> None:
    bits = bits_of(["down=8", "*.layers.0.*=4"], SHAPES)
    assert bits["model.layers.0.mlp.down_proj.weight"] == 4
    assert bits["model.layers.1.mlp.down_proj.weight"] == 8


def test_an_override_that_meets_nothing_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--override donw: .*down.*model\.layers\.\*\.mlp\.down_proj\.weight"):
        bits_of(["donw=8"], SHAPES)


def test_matrices_on_a_grid_are_kept_unless_overridden() -> None:
    grids = {"model.layers.0.mlp.down_proj.weight": (4, 32), "model.layers.1.mlp.down_proj.weight": (8, 32)}
    settings = QuantizeSettings(overrides=(Override("*.0.mlp.down_proj.weight", 8, 128),), keep_grid=True)
    formats, kept = choose_formats(settings, SHAPES, grids)
    assert kept == {"model.layers.1.mlp.down_proj.weight"}
    assert formats["model.layers.1.mlp.down_proj.weight"] == MatrixFormat(64, 96, 8, 32)
    assert formats["model.layers.0.mlp.down_proj.weight"] == MatrixFormat(64, 96, 8, 128)
    assert choose_formats(QuantizeSettings(), SHAPES, grids)[1] == frozenset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("head=8", Override("head", 8, None)), ("a=b*=4:128", Override("a=b*", 4, 128))],
)
def test_overrides_are_read(text: str, expected: Override) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["head", "head=", "=8", "head=8:", "head=x", "head=6", "head=8:48", "head=8:64:1"])
def test_other_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--override '.*accepted: PATTERN=BITS"):
        parse_override(text)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="method 'awq', accepted: rtn, gptq"):
        QuantizeSettings(method="awq")
    with pytest.raises(ConfigError, match="needs calibration"):
        QuantizeSettings(method="gptq")
