"""The arms of the native core behind one interface: in this process, or in a driver for what it cannot run."""

import struct
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from tests.native.builds import VARIANTS, Variant
from tests.native.cases import Cache, Weights, packed_weights
from vllm_omni.native import ops, sampling
from vllm_omni.native.decoder import MATRICES, VECTORS, Batch, Decoder, attention
from vllm_omni.native.library import Library
from vllm_omni.native.ops import Matrix, Team
from vllm_omni.native.reference import AttentionOptions
from vllm_omni.native.spec import ACTIVATIONS, KV_KINDS, ROPE_STYLES, DecoderSpec, KvCacheView, StepRows

NULL = struct.pack("<Q", 2**64 - 1)
# Builds that run what the processor has not.
EMULATED = frozenset({"simde", "qemu"})
ISAS = ("avx512_vnni", "avx2", "neon_dotprod", "generic")
# Arms on their own: instruction set, build, threads.
ARMS = [
    *((isa, "native", threads) for isa in ISAS for threads in (1, 2, 3)),
    *((isa, "sanitized", 2) for isa in ("avx512_vnni", "avx2", "generic")),
    *((isa, "qemu", 2) for isa in ("neon_dotprod", "generic")),
    ("avx512_vnni", "simde", 2),
]


def name_of(arm: tuple[str, str, int]) -> str:
    isa, variant, threads = arm
    return f"{isa}-{threads}-thread{'s' if threads > 1 else ''}" if variant == "native" else f"{isa}-{variant}"


class Arm(Protocol):
    """Every operation of the native core, on arrays. Caches are written in place."""

    def quantize_rows(self, x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def linear(self, matrix: Matrix, x: np.ndarray) -> np.ndarray: ...
    def dequantize_rows(self, matrix: Matrix, ids: np.ndarray) -> np.ndarray: ...
    def dequantize_panel(self, matrix: Matrix, begin: int, count: int) -> np.ndarray: ...
    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray: ...
    def rope_table(self, frequencies: np.ndarray, magnitude: float, num_positions: int) -> np.ndarray: ...
    def rope(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, style: str) -> np.ndarray: ...
    def gated_activation(self, gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray: ...
    def store_kv(self, cache: Cache, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> None: ...
    def attention(self, q: np.ndarray, cache: Cache, rows: StepRows, options: AttentionOptions) -> np.ndarray: ...
    def decoder_steps(
        self, spec: DecoderSpec, weights: Weights, caches: Sequence[Cache], steps: Sequence[StepRows]
    ) -> list[np.ndarray]: ...
    def log_softmax(self, logits: np.ndarray) -> np.ndarray: ...
    def top(self, values: np.ndarray, count: int) -> np.ndarray: ...
    def sample(self, logits: np.ndarray, settings: np.ndarray) -> np.ndarray: ...
    def close(self) -> None: ...


def missing_arm(arm: tuple[str, str, int]) -> str | None:
    """Why this machine cannot run the arm; None where it can."""
    isa, name, _ = arm
    missing = VARIANTS[name].missing()
    if missing is not None:
        return missing
    # Emulated builds do not ask the processor, and need no library that this machine's compiler makes.
    if name in EMULATED or isa in runnable_isas():
        return None
    return f"this machine runs {', '.join(runnable_isas())}"


def runnable_arms() -> list[tuple[str, str, int]]:
    """The arms that run here, without an emulation on x86-64 of what the processor has itself.

    Of others there are no tests; `backends.py` names each instruction set that was not tested at all.
    """
    arms = [arm for arm in ARMS if missing_arm(arm) is None]
    native = {isa for isa, variant, _ in arms if variant == "native"}
    return [arm for arm in arms if arm[1] != "simde" or arm[0] not in native]


def open_arm(arm: tuple[str, str, int]) -> Arm:
    """The arm, or a skipped test where this machine cannot run it."""
    isa, name, threads = arm
    missing = missing_arm(arm)
    if missing is not None:
        pytest.skip(f"{name_of(arm)}: {missing}")
    variant = VARIANTS[name]
    if variant.launcher is None:
        return LibraryArm(Team(threads, isa, spin_us=100, library=native_library()))
    return DriverArm(variant, isa, threads)


@cache
def native_library() -> Library:
    """The library of the sources as they are, which need not be the installed one."""
    return Library(VARIANTS["native"].build())


def runnable_isas() -> tuple[str, ...]:
    return native_library().runnable_isas


class LibraryArm:
    """An arm of the library in this process, through the package's own bindings."""

    def __init__(self, team: Team):
        self.team = team

    def quantize_rows(self, x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return ops.quantize_rows(self.team, x, group_size)

    def linear(self, matrix: Matrix, x: np.ndarray) -> np.ndarray:
        return ops.linear(self.team, matrix, x)

    def dequantize_rows(self, matrix: Matrix, ids: np.ndarray) -> np.ndarray:
        return ops.dequantize_rows(self.team, matrix, ids)

    def dequantize_panel(self, matrix: Matrix, begin: int, count: int) -> np.ndarray:
        return ops.dequantize_panel(self.team, matrix, begin, count)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return ops.rms_norm(self.team, x, weight, eps)

    def rope_table(self, frequencies: np.ndarray, magnitude: float, num_positions: int) -> np.ndarray:
        return ops.rope_table(self.team, frequencies, magnitude, num_positions)

    def rope(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, style: str) -> np.ndarray:
        out = x.copy()
        ops.rope(self.team, out, positions, table, style)
        return out

    def gated_activation(self, gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
        return ops.gated_activation(self.team, gate, up, activation)

    def store_kv(self, cache: Cache, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> None:
        ops.store_kv(self.team, cache.view, k, v, slots)

    def attention(self, q: np.ndarray, cache: Cache, rows: StepRows, options: AttentionOptions) -> np.ndarray:
        return attention(
            self.team, cache.view, Batch.of_rows(rows), q, num_kv_heads=cache.num_kv_heads,
            scale=options.scale, window=options.window, kv_group=options.kv_group,
        )  # fmt: skip

    def decoder_steps(
        self, spec: DecoderSpec, weights: Weights, caches: Sequence[Cache], steps: Sequence[StepRows]
    ) -> list[np.ndarray]:
        decoder = Decoder(self.team, spec, packed_weights(weights))
        decoder.bind_cache([cache.view for cache in caches])
        results = [decoder.run(rows) for rows in steps]
        decoder.close()
        return results

    def log_softmax(self, logits: np.ndarray) -> np.ndarray:
        return sampling.log_softmax(self.team, logits)

    def top(self, values: np.ndarray, count: int) -> np.ndarray:
        return sampling.top(self.team, values, count)

    def sample(self, logits: np.ndarray, settings: np.ndarray) -> np.ndarray:
        return sampling.sample(self.team, logits, settings)

    def close(self) -> None:
        self.team.close()


class Request:
    """One request to the driver; `driver.cpp` draws it."""

    def __init__(self, name: str):
        self._name = name.encode()
        self._ints: list[int] = []
        self._floats: list[float] = []
        self._arrays: list[np.ndarray | None] = []

    def ints(self, *values: int) -> "Request":
        self._ints += values
        return self

    def floats(self, *values: float) -> "Request":
        self._floats += values
        return self

    def arrays(self, *values: np.ndarray | None) -> "Request":
        self._arrays += values
        return self

    def matrix(self, matrix: Matrix | None) -> "Request":
        if matrix is None:
            return self.ints(0, 0, 0, 0).arrays(None)
        return self.ints(matrix.rows, matrix.columns, matrix.bits, matrix.group_size).arrays(matrix.data)

    def cache(self, cache: Cache) -> "Request":
        view: KvCacheView = cache.view
        self.ints(view.num_blocks, view.block_stride, view.head_stride, view.block_size)
        return self.ints(KV_KINDS.index(view.kind)).arrays(cache.memory)

    def rows(self, rows: StepRows) -> "Request":
        self.ints(rows.num_rows, rows.num_seqs)
        self.arrays(rows.token_ids, rows.inputs, rows.positions, rows.query_start, rows.seq_lens)
        self.ints(len(rows.slots))
        for slots, table in zip(rows.slots, rows.block_tables, strict=True):
            self.ints(table.shape[1]).arrays(slots, table)
        return self

    def encode(self) -> bytes:
        ints, floats, count = len(self._ints), len(self._floats), len(self._arrays)
        parts = [
            struct.pack("<I", len(self._name)), self._name,
            struct.pack(f"<I{ints}q", ints, *self._ints), struct.pack(f"<I{floats}d", floats, *self._floats),
            struct.pack("<I", count),
        ]  # fmt: skip
        for array in self._arrays:
            parts += [NULL] if array is None else [struct.pack("<Q", array.nbytes), array.tobytes()]
        return b"".join(parts)


class DriverArm:
    """An arm in a process of its own, which is started when it is needed and again after it has died."""

    def __init__(self, variant: Variant, isa: str, threads: int):
        assert variant.launcher is not None
        self._command: list[str | Path] = [*variant.launcher(), variant.build(), isa, str(threads)]
        self._process: subprocess.Popen[bytes] | None = None

    def quantize_rows(self, x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = x.shape
        p, a, s = self._ask(Request("quantize_rows").ints(rows, columns, group_size).arrays(x))
        scales, sums = (np.frombuffer(part, np.float32).reshape(rows, -1) for part in (a, s))
        return np.frombuffer(p, np.int8).reshape(rows, -1), scales, sums

    def linear(self, matrix: Matrix, x: np.ndarray) -> np.ndarray:
        return self._floats(Request("linear").matrix(matrix).ints(len(x)).arrays(x), (len(x), matrix.rows))

    def dequantize_rows(self, matrix: Matrix, ids: np.ndarray) -> np.ndarray:
        request = Request("dequantize_rows").matrix(matrix).ints(len(ids)).arrays(ids)
        return self._floats(request, (len(ids), matrix.columns))

    def dequantize_panel(self, matrix: Matrix, begin: int, count: int) -> np.ndarray:
        (panel,) = self._ask(Request("dequantize_panel").matrix(matrix).ints(begin, count))
        return np.frombuffer(panel, np.uint16).reshape(count, matrix.columns)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return self._floats(Request("rms_norm").ints(*x.shape).arrays(x, weight).floats(eps), x.shape)

    def rope_table(self, frequencies: np.ndarray, magnitude: float, num_positions: int) -> np.ndarray:
        request = Request("rope_table").ints(len(frequencies), num_positions).arrays(frequencies).floats(magnitude)
        return self._floats(request, (num_positions, 2 * len(frequencies)))

    def rope(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, style: str) -> np.ndarray:
        request = Request("rope").ints(*x.shape, table.shape[1], ROPE_STYLES.index(style), len(table))
        request.arrays(x, positions, table)
        return self._floats(request, x.shape)

    def gated_activation(self, gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
        request = Request("gated_activation").ints(gate.size, ACTIVATIONS.index(activation)).arrays(gate, up)
        return self._floats(request, gate.shape)

    def store_kv(self, cache: Cache, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> None:
        (memory,) = self._ask(Request("store_kv").cache(cache).ints(*k.shape).arrays(k, v, slots))
        cache.memory[:] = np.frombuffer(memory, np.uint8)

    def attention(self, q: np.ndarray, cache: Cache, rows: StepRows, options: AttentionOptions) -> np.ndarray:
        request = Request("attention").cache(cache).rows(rows)
        request.ints(options.kv_group, q.shape[1], cache.num_kv_heads, q.shape[2], options.window)
        memory, out = self._ask(request.arrays(q).floats(options.scale))
        assert memory == cache.memory.tobytes(), "attention has changed the cache"
        return np.frombuffer(out, np.float32).reshape(q.shape)

    def decoder_steps(
        self, spec: DecoderSpec, weights: Weights, caches: Sequence[Cache], steps: Sequence[StepRows]
    ) -> list[np.ndarray]:
        request = _decoder_request(spec, packed_weights(weights), caches)
        request.ints(len(steps))
        for rows in steps:
            request.rows(rows)
        answer = self._ask(request)
        for layer, memory in zip(caches, answer, strict=False):
            layer.memory[:] = np.frombuffer(memory, np.uint8)
        return [np.frombuffer(out, np.float32).reshape(-1, spec.hidden_size) for out in answer[len(caches) :]]

    def log_softmax(self, logits: np.ndarray) -> np.ndarray:
        return self._floats(Request("log_softmax").ints(*logits.shape).arrays(logits), logits.shape)

    def top(self, values: np.ndarray, count: int) -> np.ndarray:
        (ids,) = self._ask(Request("top").ints(*values.shape, count).arrays(values))
        return np.frombuffer(ids, np.int64).reshape(len(values), count)

    def sample(self, logits: np.ndarray, settings: np.ndarray) -> np.ndarray:
        (ids,) = self._ask(Request("sample").ints(*logits.shape).arrays(logits, settings))
        return np.frombuffer(ids, np.int64)

    def close(self) -> None:
        """Ends the process; sanitizers report leaks by its exit code."""
        if self._process is not None:
            _, errors = self._process.communicate(timeout=60)
            assert self._process.returncode == 0, errors.decode()

    def _floats(self, request: Request, shape: tuple[int, ...]) -> np.ndarray:
        (out,) = self._ask(request)
        return np.frombuffer(out, np.float32).reshape(shape)

    def _ask(self, request: Request) -> list[bytes]:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(request.encode())
            process.stdin.flush()
            return self._answer()
        except (EOFError, BrokenPipeError):
            _, errors = process.communicate(timeout=60)
            self._process = None
            pytest.fail(f"the driver has ended with {process.returncode}: {errors.decode()[-4000:]}")

    def _start(self) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=pipe)
        return self._process

    def _answer(self) -> list[bytes]:
        (code,) = struct.unpack("<i", self._read(4))
        (count,) = struct.unpack("<I", self._read(4))
        if code != 0:
            pytest.fail(f"the driver refuses: {self._read(count).decode()}")
        return [self._read(struct.unpack("<Q", self._read(8))[0]) for _ in range(count)]

    def _read(self, size: int) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise EOFError
        return data


def _decoder_request(spec: DecoderSpec, weights: Any, caches: Sequence[Cache]) -> Request:
    request = Request("decoder_steps")
    request.ints(len(weights.layers), spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads)
    request.ints(spec.head_dim, ACTIVATIONS.index(spec.activation), ROPE_STYLES.index(spec.rope_style))
    request.ints(spec.num_kv_groups, spec.max_position).floats(spec.norm_eps, spec.attention_scale)
    request.arrays(weights.final_norm).matrix(weights.embedding)
    for layer in weights.layers:
        for name in MATRICES:
            request.matrix(getattr(layer, name))
        request.arrays(*(getattr(layer, name) for name in VECTORS))
        request.ints(layer.rotary_dim, layer.window, layer.kv_group)
    for cache_of_layer in caches:
        request.cache(cache_of_layer)
    return request
