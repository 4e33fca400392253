"""The format `omni_int4` in numbers: what may be stored, and how large it is. `csrc/README.md` draws it.

Knows sizes only. `packing.py` makes the bytes, `artifact.py` checks them in a directory.
"""

from dataclasses import dataclass

from vllm_omni.errors import WeightError

QUANT_METHOD = "omni_int4"
METADATA_KEY = "omni_int4"
FORMAT_VERSION = 1
# Bits to the largest code. 8 bits stop at 254 so that a code less 127 is a signed byte of either sign.
MAX_CODES = {4: 15, 8: 254}
GROUP_SIZES = (32, 64, 128)
BLOCK_ROWS = 16
# A float16 scale and a float16 minimum for each row of a block.
CELL_HEAD_BYTES = 4 * BLOCK_ROWS
ALIGNMENT_BYTES = 64


def cell_bytes(bits: int, group_size: int) -> int:
    """Bytes that 16 rows take for one group, a multiple of 64."""
    return CELL_HEAD_BYTES + BLOCK_ROWS * group_size * bits // 8


@dataclass(frozen=True)
class MatrixFormat:
    """One packed matrix: its plain shape and how it is quantized.

    Attributes:
        rows: Outputs, 1 or more.
        columns: Inputs, 1 or more.
        bits: A key of `MAX_CODES`.
        group_size: One of `GROUP_SIZES`; columns sharing a scale and a minimum. The last group may be shorter.
    """

    rows: int
    columns: int
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        for name, accepted in (("bits", tuple(MAX_CODES)), ("group_size", GROUP_SIZES)):
            value = getattr(self, name)
            if type(value) is not int or value not in accepted:
                raise WeightError(f"{name} is {value!r}, accepted: {', '.join(map(str, accepted))}")
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise WeightError(f"{name} is {value!r}, accepted: a whole number, 1 or more")

    @property
    def num_groups(self) -> int:
        """Groups of one row."""
        return -(-self.columns // self.group_size)

    @property
    def packed_shape(self) -> tuple[int, int, int]:
        """Row blocks, groups, bytes of a cell: the shape of the stored U8 tensor."""
        return -(-self.rows // BLOCK_ROWS), self.num_groups, cell_bytes(self.bits, self.group_size)

    @property
    def num_bytes(self) -> int:
        blocks, groups, size = self.packed_shape
        return blocks * groups * size
