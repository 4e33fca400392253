"""Panels: the runs of rows in which a matrix is read, quantized and packed."""

from collections.abc import Iterator

from vllm_omni.quantization.packed_format import BLOCK_ROWS

# 16 MiB of float32.
ELEMENTS_PER_PANEL = 1 << 22


def row_panels(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """First row and end of each panel; all but the last are whole row blocks."""
    rows_per_panel = max(1, ELEMENTS_PER_PANEL // columns // BLOCK_ROWS) * BLOCK_ROWS
    for begin in range(0, rows, rows_per_panel):
        yield begin, min(begin + rows_per_panel, rows)
