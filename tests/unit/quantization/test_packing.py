import numpy as np
import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization.packed_format import MAX_CODES, MatrixFormat
from vllm_omni.quantization.packing import QuantizedMatrix, cell_bytes, dequantize, pack, unpack

SHAPES = [(1, 1), (16, 64), (17, 65), (3, 31), (48, 192), (33, 100), (20, 576)]
KINDS = [(bits, group_size) for bits in (4, 8) for group_size in (32, 64, 128)]


def random_matrix(rows: int, columns: int, bits: int, group_size: int) -> QuantizedMatrix:
    rng = np.random.default_rng(rows + columns)
    groups = -(-columns // group_size)
    scale, minimum = (rng.standard_normal((rows, groups)).astype(np.float16) for _ in range(2))
    q = rng.integers(0, MAX_CODES[bits] + 1, (rows, columns), dtype=np.uint8)
    return QuantizedMatrix(q, scale, minimum, bits, group_size)


def pack_ref(matrix: QuantizedMatrix) -> np.ndarray:
    """Byte for byte, as `csrc/README.md` says it."""
    rows, columns = matrix.q.shape
    blocks, groups, size = matrix.format.packed_shape
    cells = np.zeros((blocks, groups, size), np.uint8)
    for row in range(rows):
        block, r = divmod(row, 16)
        for group in range(groups):
            cell = cells[block, group]
            cell[2 * r : 2 * r + 2] = np.frombuffer(matrix.scale[row, group].astype("<f2").tobytes(), np.uint8)
            cell[32 + 2 * r : 34 + 2 * r] = np.frombuffer(matrix.minimum[row, group].astype("<f2").tobytes(), np.uint8)
    for row in range(rows):
        for column in range(columns):
            group, k = divmod(column, matrix.group_size)
            cell = cells[row // 16, group, 64:]
            width = 8 if matrix.bits == 4 else 4
            chunk, i = divmod(k, width)
            place = 64 * chunk + 4 * (row % 16) + i % 4
            cell[place] |= int(matrix.q[row, column]) << (4 if i >= 4 else 0)
    return cells


def assert_equal(first: QuantizedMatrix, second: QuantizedMatrix) -> None:
    assert (first.bits, first.group_size) == (second.bits, second.group_size)
    for name in ("q", "scale", "minimum"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), strict=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 65), (33, 100), (16, 128)], ids=str)
def test_bytes_lie_as_documented(shape: tuple[int, int], kind: tuple[int, int]) -> None:
    matrix = random_matrix(*shape, *kind)
    np.testing.assert_array_equal(pack(matrix), pack_ref(matrix), strict=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacking_is_the_inverse(shape: tuple[int, int], kind: tuple[int, int]) -> None:
    matrix = random_matrix(*shape, *kind)
    assert_equal(unpack(pack(matrix), *shape, *kind), matrix)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packing_is_the_inverse(kind: tuple[int, int]) -> None:
    packed = pack(random_matrix(21, 70, *kind))
    np.testing.assert_array_equal(pack(unpack(packed, 21, 70, *kind)), packed)


def test_weights_are_scale_times_code_plus_minimum() -> None:
    matrix = random_matrix(5, 70, 4, 32)
    values = dequantize(matrix)
    assert values.dtype == np.float32
    for row, column in [(0, 0), (4, 69), (2, 31), (2, 32)]:
        scale, minimum = (np.float32(each[row, column // 32]) for each in (matrix.scale, matrix.minimum))
        assert values[row, column] == scale * np.float32(matrix.q[row, column]) + minimum


def test_panels_of_whole_blocks_concatenate() -> None:
    matrix = random_matrix(40, 96, 4, 32)
    parts = [
        QuantizedMatrix(matrix.q[part], matrix.scale[part], matrix.minimum[part], 4, 32)
        for part in (slice(0, 16), slice(16, 32), slice(32, 40))
    ]
    np.testing.assert_array_equal(np.concatenate([pack(part) for part in parts]), pack(matrix))


def test_non_contiguous_input_packs_alike() -> None:
    matrix = random_matrix(20, 64, 8, 32)
    turned = QuantizedMatrix(np.asfortranarray(matrix.q), matrix.scale[:, ::-1][:, ::-1], matrix.minimum, 8, 32)
    np.testing.assert_array_equal(pack(turned), pack(matrix))


@pytest.mark.parametrize(
    ("bits", "group_size", "expected"),
    [(4, 32, 320), (4, 64, 576), (4, 128, 1088), (8, 32, 576), (8, 64, 1088), (8, 128, 2112)],
)
def test_cells_have_the_documented_sizes(bits: int, group_size: int, expected: int) -> None:
    assert cell_bytes(bits, group_size) == expected
    assert MatrixFormat(17, 2 * group_size + 1, bits, group_size).packed_shape == (2, 3, expected)
    assert MatrixFormat(17, 2 * group_size + 1, bits, group_size).num_bytes == 6 * expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((4, 4, 5, 32), "bits is 5, accepted: 4, 8"),
        ((4, 4, 4, 48), "group_size is 48, accepted: 32, 64, 128"),
        ((0, 4, 4, 32), "rows is 0, accepted: a whole number, 1 or more"),
        ((4, 4.0, 4, 32), "columns is 4.0"),
        ((4, 4, True, 32), "bits is True"),
        ((4, 4, [4], 32), r"bits is \[4\]"),
    ],
)
def test_other_formats_are_refused(fields: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(WeightError, match=message):
        MatrixFormat(*fields)


def test_packed_bytes_of_another_shape_are_noticed() -> None:
    with pytest.raises(AssertionError, match="packed shape"):
        unpack(np.zeros((1, 1, 320), np.uint8), 17, 32, 4, 32)
