"""What the user may choose when quantizing, and which format each matrix gets by it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.packed_format import GROUP_SIZES, MAX_CODES, MatrixFormat
from vllm_omni.quantization.tensor_table import TIED_NAME

METHODS = ("rtn", "gptq")
DEFAULT_BITS = 4
DEFAULT_GROUP_SIZE = 64
DEFAULT_METHOD = "rtn"
EMBEDDING_NAME = "model.embed_tokens.weight"
# Short names of overrides to the tensors they mean. The head of a tied model is the embedding.
SHORT_NAMES = {"head": TIED_NAME, "embedding": EMBEDDING_NAME, "down": "*.mlp.down_proj.weight"}
ACCEPTED_OVERRIDES = (
    "PATTERN=BITS or PATTERN=BITS:GROUP, PATTERN a tensor name with * and ?, or "
    f"{', '.join(SHORT_NAMES)}; bits {', '.join(map(str, MAX_CODES))}; groups {', '.join(map(str, GROUP_SIZES))}"
)


@dataclass(frozen=True)
class Override:
    """Another format for the matrices that a pattern meets; `group_size` None keeps the general one."""

    pattern: str
    bits: int
    group_size: int | None


@dataclass(frozen=True)
class QuantizeSettings:
    """How to quantize.

    Attributes:
        bits: 4 or 8.
        group_size: 32, 64 or 128.
        method: One of `METHODS`.
        calibration_text: Text whose activations weigh the errors; None: all weights of a matrix count alike.
        overrides: For single matrices; of several that meet one, the last counts.
        keep_grid: Matrices whose values lie on a grid of the format already (GGUF's Q4_0, Q4_1, Q8_0) are taken over
            exactly, unless an override meets them.
    """

    bits: int = DEFAULT_BITS
    group_size: int = DEFAULT_GROUP_SIZE
    method: str = DEFAULT_METHOD
    calibration_text: str | None = None
    overrides: tuple[Override, ...] = ()
    keep_grid: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method {self.method!r}, accepted: {', '.join(METHODS)}")
        if self.method == "gptq" and self.calibration_text is None:
            raise ConfigError("method 'gptq' needs calibration; pass --calibration default or a text file")


def parse_override(text: str) -> Override:
    """Reads `PATTERN=BITS[:GROUP]`.

    Raises:
        ConfigError: It has another form, or bits or group size are not accepted.
    """
    pattern, _, numbers = text.rpartition("=")
    bits, _, group = numbers.partition(":")
    if not pattern or not bits.isdigit() or (":" in numbers and not group.isdigit()):
        raise ConfigError(f"--override {text!r}, accepted: {ACCEPTED_OVERRIDES}")
    try:
        MatrixFormat(1, 1, int(bits), int(group or GROUP_SIZES[0]))
    except WeightError as error:
        raise ConfigError(f"--override {text!r}: {error}; accepted: {ACCEPTED_OVERRIDES}") from error
    return Override(pattern, int(bits), int(group) if group else None)


def choose_formats(
    settings: QuantizeSettings, shapes: Mapping[str, tuple[int, int]], grids: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, MatrixFormat], frozenset[str]]:
    """The format of each matrix, and the names of those that are taken over exactly.

    Args:
        settings: The user's choice.
        shapes: Name to rows and columns of each matrix to pack.
        grids: Name to bits and group size, for those that lie on a grid already.

    Raises:
        ConfigError: An override meets no matrix.
    """
    formats: dict[str, MatrixFormat] = {}
    kept: set[str] = set()
    for name, (rows, columns) in shapes.items():
        override = next((each for each in reversed(settings.overrides) if _meets(each, name, shapes)), None)
        if override:
            formats[name] = MatrixFormat(rows, columns, override.bits, override.group_size or settings.group_size)
        elif settings.keep_grid and name in grids:
            formats[name] = MatrixFormat(rows, columns, *grids[name])
            kept.add(name)
        else:
            formats[name] = MatrixFormat(rows, columns, settings.bits, settings.group_size)
    _require_useful(settings.overrides, shapes)
    return formats, frozenset(kept)


def _meets(override: Override, name: str, names: Iterable[str]) -> bool:
    pattern = SHORT_NAMES.get(override.pattern, override.pattern)
    if pattern == TIED_NAME and TIED_NAME not in names:
        pattern = EMBEDDING_NAME
    return fnmatchcase(name, pattern)


def _require_useful(overrides: Iterable[Override], shapes: Mapping[str, tuple[int, int]]) -> None:
    for override in overrides:
        if not any(_meets(override, name, shapes) for name in shapes):
            kinds = sorted({_without_numbers(name) for name in shapes})
            raise ConfigError(
                f"--override {override.pattern}: no matrix of this model has such a name; accepted: "
                f"{', '.join(SHORT_NAMES)}, or patterns for {', '.join(kinds)}"
            )


def _without_numbers(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
