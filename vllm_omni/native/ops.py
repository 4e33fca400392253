"""Single operations of the native core on numpy arrays, a team of threads, and packed matrices.

Arrays are checked (dtype, order, shape) and handed over without a copy. `native/reference.py` defines what each
operation computes; `csrc/README.md` draws the packed format.
"""

import ctypes
import os
import threading
import weakref
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_omni.errors import EngineError, HardwareError, WeightError
from vllm_omni.native.library import Library, native_library, native_status
from vllm_omni.native.spec import ACTIVATIONS, KV_KINDS, ROPE_STYLES, FloatArray, IntArray, KvCacheView, LongArray
from vllm_omni.native.spec import number_of as _number_of
from vllm_omni.native.structures import KvCacheStruct, MatrixStruct

ALIGNMENT = 64
BLOCK_ROWS = 16
CELL_HEADER_BYTES = 64
SPIN_US = 5000


_num_forks = 0


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Closable(Protocol):
    """What a team ends before it ends itself."""

    def close(self) -> None: ...


class Team:
    """Threads of the native core on one arm; the calling thread is one of them.

    The others spin for `spin_us` after the last work and then park, so that an idle team uses no processor. Calls from
    several threads wait for each other. A team is a context manager; `close` ends its threads and its decoders, and so
    does the end of the object. A team does not cross a fork: in the child its calls raise EngineError.
    """

    def __init__(
        self, num_threads: int, isa: str | None = None, spin_us: int = SPIN_US, library: Library | None = None
    ):
        """Starts the threads.

        Args:
            num_threads: Threads, the calling one included.
            isa: The arm; None: VLLM_OMNI_NATIVE_ISA, else the best.
            spin_us: Microseconds before an idle thread parks; 5000 covers the time between two decode steps.
            library: The library to use; None: the one of this process.

        Raises:
            HardwareError: There is no native core, or this machine cannot run the arm.
            EngineError: The threads could not be started.
        """
        self.library = library or _library_of_process()
        self.lock = threading.Lock()
        self._forks = _num_forks
        self._users: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.handle: int | None = None
        self.isa = self.library.select_isa(isa)
        self.num_threads = num_threads
        self.spin_us = spin_us
        self.handle = self.library.functions.omni_team_create(num_threads, self.isa.encode(), spin_us)
        if not self.handle:
            raise EngineError(f"native core: {self.library.last_error()}")
        self._finalizer = weakref.finalize(self, self.library.functions.omni_team_destroy, self.handle)
        # At exit a thread of the application may still be in a step; the operating system ends the rest.
        self._finalizer.atexit = False

    def check_process(self) -> None:
        """Raises EngineError in a process that was forked from the one that made the team.

        Call before the lock is taken: the fork may have copied it while another thread held it.
        """
        if self._forks != _num_forks:
            raise EngineError(
                "this engine was made before the process was forked, and its threads are not in the child; "
                "create the engine in the process that uses it"
            )

    def call(self, name: str, *arguments: Any) -> None:
        """Runs a function of the C ABI whose first parameter is a team."""
        self.check_process()
        with self.lock:
            if self.handle is None:
                raise EngineError(f"{name}: this team was closed")
            code = getattr(self.library.functions, name)(self.handle, *arguments)
        self.library.check(code)

    def register(self, user: Closable) -> None:
        """Has `user` closed before the team is."""
        self._users.add(user)

    def close(self) -> None:
        """Ends decoders and threads; a second call does nothing, nor does one in a forked process."""
        if self._forks != _num_forks:
            return
        for user in list(self._users):
            user.close()
        with self.lock:
            self.handle = None
            self._finalizer()

    def __enter__(self) -> "Team":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Matrix:
    """A packed matrix; it keeps the memory of `data` alive.

    Attributes:
        data: uint8, contiguous, aligned to 64 bytes; usually [row blocks, groups, bytes of a cell]. Read only.
        struct: The same for the C ABI.
    """

    __slots__ = ("bits", "columns", "data", "group_size", "rows", "struct")

    def __init__(self, data: npt.NDArray[np.uint8], rows: int, columns: int, bits: int, group_size: int):
        """Checks and keeps `data`.

        Raises:
            WeightError: Bits, group size or number of bytes do not fit the format, or the data are not aligned.
        """
        if bits not in (4, 8) or group_size not in (32, 64, 128):
            raise WeightError(
                f"packed matrix: bits={bits}, group_size={group_size}; accepted: bits 4, 8, group sizes 32, 64, 128"
            )
        needed = packed_bytes(rows, columns, bits, group_size)
        if data.dtype != np.uint8 or not data.flags.c_contiguous or data.nbytes != needed:
            raise WeightError(
                f"packed matrix [{rows}, {columns}], {bits} bits, groups of {group_size}: {needed} contiguous bytes "
                f"needed, {data.dtype} {list(data.shape)} with strides {list(data.strides)} given"
            )
        if data.ctypes.data % ALIGNMENT:
            raise WeightError(f"packed matrix at {data.ctypes.data:#x}: not aligned to {ALIGNMENT} bytes; map the file")
        self.data = data
        self.rows, self.columns, self.bits, self.group_size = rows, columns, bits, group_size
        self.struct = MatrixStruct(data.ctypes.data, rows, columns, bits, group_size)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group_size)


def packed_bytes(rows: int, columns: int, bits: int, group_size: int) -> int:
    """Bytes of a packed matrix."""
    cell = CELL_HEADER_BYTES + BLOCK_ROWS * group_size * bits // 8
    return -(-rows // BLOCK_ROWS) * -(-columns // group_size) * cell


def linear(team: Team, matrix: Matrix, x: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """[R, rows]: `x` [R, columns] float32 times the matrix, transposed. Fills `out` where one is given."""
    count = len(x)
    source = address_of(x, np.float32, (count, matrix.columns), "x")
    out = np.empty((count, matrix.rows), np.float32) if out is None else out
    target = address_of(out, np.float32, (count, matrix.rows), "out")
    team.call("omni_linear", ctypes.byref(matrix.struct), source, count, target)
    return out


def dequantize_rows(team: Team, matrix: Matrix, ids: IntArray, out: FloatArray | None = None) -> FloatArray:
    """[count, columns] float32: the rows `ids` [count] int32 of the matrix."""
    count = len(ids)
    source = address_of(ids, np.int32, (count,), "ids")
    out = np.empty((count, matrix.columns), np.float32) if out is None else out
    target = address_of(out, np.float32, (count, matrix.columns), "out")
    team.call("omni_dequantize_rows", ctypes.byref(matrix.struct), source, count, target)
    return out


def dequantize_panel(
    team: Team, matrix: Matrix, begin: int, count: int, out: npt.NDArray[np.uint16] | None = None
) -> npt.NDArray[np.uint16]:
    """[count, columns] bits of bfloat16: the rows from `begin` of the matrix."""
    out = np.empty((count, matrix.columns), np.uint16) if out is None else out
    target = address_of(out, np.uint16, (count, matrix.columns), "out")
    team.call("omni_dequantize_panel", ctypes.byref(matrix.struct), begin, count, target)
    return out


def quantize_rows(team: Team, x: FloatArray, group_size: int) -> tuple[npt.NDArray[np.int8], FloatArray, FloatArray]:
    """`x` [R, K] as p [R, K padded to whole groups] int8, a and s [R, groups] float32."""
    rows, columns = x.shape
    groups = -(-columns // group_size)
    p = np.empty((rows, groups * group_size), np.int8)
    a, s = np.empty((rows, groups), np.float32), np.empty((rows, groups), np.float32)
    source = address_of(x, np.float32, (rows, columns), "x")
    team.call("omni_quantize_rows", source, rows, columns, group_size, p.ctypes.data, a.ctypes.data, s.ctypes.data)
    return p, a, s


def rms_norm(team: Team, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """[R, C]: each row of `x` [R, C] over its root mean square, times `weight` [C]."""
    rows, columns = x.shape
    out = np.empty((rows, columns), np.float32)
    source = address_of(x, np.float32, (rows, columns), "x")
    factors = address_of(weight, np.float32, (columns,), "weight")
    team.call("omni_rms_norm", source, factors, rows, columns, eps, out.ctypes.data)
    return out


def rope_table(team: Team, frequencies: npt.NDArray[np.float64], magnitude: float, num_positions: int) -> FloatArray:
    """[num_positions, 2 * count] float32: cosines, then sines, of each position times `frequencies` [count].

    Args:
        team: Whose threads compute it.
        frequencies: Radians from position to position, 0 or more; times `num_positions` at most 2**23.
        magnitude: What cosines and sines are multiplied by.
        num_positions: Rows.

    Raises:
        EngineError: A frequency is out of range, or `num_positions` is below 1.
    """
    out = np.empty((num_positions, 2 * len(frequencies)), np.float32)
    source = address_of(frequencies, np.float64, (len(frequencies),), "frequencies")
    team.call("omni_rope_table", source, len(frequencies), num_positions, magnitude, out.ctypes.data)
    return out


def rope(team: Team, x: FloatArray, positions: LongArray, table: FloatArray, style: str = "halves") -> None:
    """Rotates the leading dimensions of each head of `x` [R, H, D] in place; `table` is [positions, rotary_dim]."""
    rows, heads, head_dim = x.shape
    team.call(
        "omni_rope",
        address_of(x, np.float32, (rows, heads, head_dim), "x"),
        address_of(positions, np.int64, (rows,), "positions"),
        address_of(table, np.float32, table.shape, "table"),
        len(table), rows, heads, head_dim, table.shape[1], _number_of(style, ROPE_STYLES, "rope style"),
    )  # fmt: skip


def gated_activation(team: Team, gate: FloatArray, up: FloatArray, activation: str = "silu") -> FloatArray:
    """activation(gate) * up, element by element."""
    out = np.empty(gate.shape, np.float32)
    team.call(
        "omni_gated_activation",
        address_of(gate, np.float32, gate.shape, "gate"),
        address_of(up, np.float32, gate.shape, "up"),
        gate.size, _number_of(activation, ACTIVATIONS, "activation"), out.ctypes.data,
    )  # fmt: skip
    return out


def store_kv(team: Team, cache: KvCacheView, k: FloatArray, v: FloatArray, slots: LongArray) -> None:
    """Writes `k` and `v` [R, KV heads, D] float32 into the cache at `slots` [R] int64; negative: not stored."""
    rows, heads, head_dim = k.shape
    team.call(
        "omni_store_kv",
        ctypes.byref(cache_struct(cache)),
        address_of(k, np.float32, k.shape, "k"),
        address_of(v, np.float32, k.shape, "v"),
        address_of(slots, np.int64, (rows,), "slots"),
        rows, heads, head_dim,
    )  # fmt: skip


def cache_struct(view: KvCacheView) -> KvCacheStruct:
    """A view of a cache for the C ABI."""
    return KvCacheStruct(
        view.address, view.num_blocks, view.block_stride, view.head_stride, view.block_size,
        _number_of(view.kind, KV_KINDS, "KV cache"),
    )  # fmt: skip


def address_of(array: npt.NDArray[Any], dtype: Any, shape: tuple[int, ...], name: str) -> int:
    """Address of the first element.

    Raises:
        EngineError: `array` is not contiguous, or has another dtype or shape.
    """
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise EngineError(
            f"{name}: contiguous {np.dtype(dtype).name} {list(shape)} needed, "
            f"{array.dtype} {list(array.shape)} with strides {list(array.strides)} given"
        )
    return int(array.ctypes.data)


def _library_of_process() -> Library:
    library = native_library()
    if library is None:
        raise HardwareError(str(native_status().reason))
    return library
