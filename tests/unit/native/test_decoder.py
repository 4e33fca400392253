"""What the binding of a decoder refuses, and that addresses work like arrays; numbers are tested in `tests/parity`."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.native.cases import Cache, CacheShape, Family, Sequences, empty_cache, packed_weights
from vllm_omni.errors import ConfigError, EngineError, WeightError
from vllm_omni.native.decoder import Batch, Decoder, attention
from vllm_omni.native.library import Library
from vllm_omni.native.ops import Team
from vllm_omni.native.spec import DecoderSpec, KvCacheView, StepRows

SPEC = DecoderSpec(
    hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, max_position=100, norm_eps=1e-5,
    attention_scale=0.35,
)  # fmt: skip
WEIGHTS = packed_weights(Family(SPEC, rotary_dim=8, has_qkv_bias=True).weights())
TOKENS = np.array([1, 2, 3], np.int32)


@pytest.fixture
def sequences() -> Sequences:
    return Sequences(num_seqs=2, block_size=16, max_tokens=64)


@pytest.fixture
def caches(sequences: Sequences) -> list[Cache]:
    shape = CacheShape(sequences.num_blocks, SPEC.num_kv_heads, 16, SPEC.head_dim, "bfloat16")
    return [empty_cache(shape) for _ in WEIGHTS.layers]


@pytest.fixture
def decoder(team: Team, caches: list[Cache]) -> Iterator[Decoder]:
    decoder = Decoder(team, SPEC, WEIGHTS)
    decoder.bind_cache([cache.view for cache in caches])
    yield decoder
    decoder.close()


def three_rows(sequences: Sequences) -> StepRows:
    return sequences.step({0: 2, 1: 1}, token_ids=TOKENS)


# Weights.


def test_weights_that_do_not_fit_are_listed_together(team: Team) -> None:
    first, second = WEIGHTS.layers
    wrong = replace(
        WEIGHTS,
        layers=(
            replace(first, q=first.k, down=None, q_bias=np.ones(3, np.float32)),  # type: ignore[arg-type]
            replace(second, input_norm=np.ones(32)),  # type: ignore[arg-type]
        ),
        final_norm=np.ones((64,), np.float32)[::2],
    )
    with pytest.raises(WeightError) as caught:
        Decoder(team, SPEC, wrong)
    assert str(caught.value) == (
        "5 weights do not fit the decoder: layer 0 q is [16, 32], [32, 32] needed; layer 0 down is missing; "
        "layer 0 q_bias is [3], [32] needed; "
        "layer 1 input_norm is float64 with strides [8], contiguous float32 needed; "
        "final_norm is float32 with strides [8], contiguous float32 needed"
    )


def test_an_embedding_of_another_width_is_refused(team: Team) -> None:
    with pytest.raises(WeightError, match=r"embedding is \[48, 32\], \[48, 16\] needed|embedding is"):
        Decoder(team, SPEC, replace(WEIGHTS, embedding=WEIGHTS.layers[0].down))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_groups": 0}, "num_kv_groups is 0, accepted: 1 or more"),
        ({"num_heads": 2, "num_kv_heads": 2, "head_dim": 12}, "head_dim is 12, accepted: a multiple of 8"),
    ],
)
def test_numbers_that_the_core_does_not_take_are_refused(team: Team, changes: dict[str, int], message: str) -> None:
    spec = replace(SPEC, **changes)  # type: ignore[arg-type]
    weights = packed_weights(Family(spec, rotary_dim=8).weights())
    with pytest.raises(EngineError, match=message):
        Decoder(team, spec, weights)


def test_a_window_or_group_that_cannot_be_is_refused(team: Team) -> None:
    for changes, message in (({"window": -1}, "layer 1: window is -1"), ({"kv_group": 1}, "layer 1: kv_group is 1")):
        layers = (WEIGHTS.layers[0], replace(WEIGHTS.layers[1], **changes))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=message):
            Decoder(team, SPEC, replace(WEIGHTS, layers=layers))


def test_an_unknown_activation_is_refused(team: Team) -> None:
    with pytest.raises(ConfigError, match="activation: 'relu' given, accepted: silu, gelu"):
        Decoder(team, replace(SPEC, activation="relu"), WEIGHTS)


# Caches.


def test_a_step_needs_a_cache(team: Team, sequences: Sequences) -> None:
    decoder = Decoder(team, SPEC, WEIGHTS)
    with pytest.raises(EngineError, match="cache is not bound, accepted: omni_decoder_bind_cache before a step"):
        decoder.run(three_rows(sequences))


def test_there_is_one_cache_per_layer(decoder: Decoder, caches: list[Cache]) -> None:
    with pytest.raises(EngineError, match="1 caches given, the decoder has 2 layers"):
        decoder.bind_cache([caches[0].view])


def test_a_cache_that_holds_no_cell_is_refused(decoder: Decoder, caches: list[Cache]) -> None:
    view = caches[0].view
    for wrong, message in (
        (replace(view, head_stride=8), "head_stride is 8, accepted: at least a head's 512 bytes of a page"),
        (replace(view, block_stride=516), "block_stride is 516, accepted: at least a page's bytes for 2 heads"),
        (replace(view, address=view.address + 2), "cache data is not aligned"),
        (replace(view, block_size=8), "block_size is 8, accepted: a multiple of 16"),
        (replace(view, address=0), "cache data is NULL"),
        (replace(view, block_size=0), "block_size is 0"),
    ):
        with pytest.raises(EngineError, match=message):
            decoder.bind_cache([view, wrong])


def test_a_kind_of_cache_that_is_not_known_is_refused(caches: list[Cache], decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="KV cache: 'float8' given, accepted: bfloat16, int8"):
        decoder.bind_cache([replace(caches[0].view, kind="float8")] * 2)


# Batches.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([0, 50, 0], np.int32)}, "token id is 50, accepted: 0 to 50 exclusive"),
        ({"positions": np.array([0, 1, 100])}, "position is 100, accepted: 0 to 100 exclusive"),
        ({"slots": (np.array([4, 5, 144]),)}, "slot is 144, accepted: below num_blocks"),
        ({"seq_lens": np.array([1, 1], np.int32)}, "seq_lens is 1, accepted: at least the sequence's 2 rows"),
        ({"seq_lens": np.array([65, 1], np.int32)}, "seq_lens is 65, accepted: at most what the block table's 4"),
        ({"query_start": np.array([0, 2, 2], np.int32)}, "query_start is 0 to 2, accepted: 0 to num_rows"),
        ({"block_tables": (np.full((2, 4), 9, np.int32),)}, "block table entry is 9, accepted: 0 to 9 exclusive"),
        ({"token_ids": None}, "inputs is NULL"),
    ],
)
def test_a_batch_that_would_leave_memory_is_refused(
    decoder: Decoder, sequences: Sequences, caches: list[Cache], changes: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(EngineError, match=f"native core: {message}"):
        decoder.run(replace(three_rows(sequences), **changes))  # type: ignore[arg-type]
    assert all((cache.memory == 0xFF).all() for cache in caches), "something was stored"


def test_arrays_of_another_dtype_or_shape_are_refused(decoder: Decoder, sequences: Sequences) -> None:
    rows = three_rows(sequences)
    for changes, message in (
        ({"token_ids": TOKENS.astype(np.int64)}, r"token_ids: contiguous int32 \[3\] needed, int64 \[3\]"),
        ({"slots": (np.array([4, 5]),)}, r"slots: contiguous int64 \[3\] needed, int64 \[2\]"),
        ({"token_ids": None, "inputs": np.ones((3, 31), np.float32)}, r"inputs: \[3, 32\] needed, \[3, 31\] given"),
        ({"block_tables": (), "slots": ()}, "0 block tables given, 1 KV groups needed"),
    ):
        with pytest.raises(EngineError, match=message):
            decoder.run(replace(rows, **changes))  # type: ignore[arg-type]


def test_addresses_work_like_arrays(decoder: Decoder, sequences: Sequences) -> None:
    """A caller that keeps a batch and refreshes its addresses gets what arrays give."""
    rows = three_rows(sequences)
    expected = decoder.run(rows)
    batch, hidden = Batch(num_kv_groups=1), np.empty((3, 32), np.float32)
    batch.set_group(0, rows.slots[0].ctypes.data, rows.block_tables[0].ctypes.data, rows.block_tables[0].shape[1])
    batch.struct.num_rows, batch.struct.num_seqs = 3, 2
    batch.struct.token_ids, batch.struct.positions = TOKENS.ctypes.data, rows.positions.ctypes.data
    batch.struct.query_start, batch.struct.seq_lens = rows.query_start.ctypes.data, rows.seq_lens.ctypes.data
    batch.struct.hidden = hidden.ctypes.data
    for _ in range(2):
        hidden[:] = 0
        decoder.step(batch)
        np.testing.assert_array_equal(hidden, expected)


def test_attention_on_queries_that_do_not_fit_the_batch_is_refused(
    team: Team, sequences: Sequences, caches: list[Cache]
) -> None:
    batch = Batch.of_rows(three_rows(sequences))
    with pytest.raises(EngineError, match=r"q: contiguous float32 \[3, 4, 8\] needed, float32 \[2, 4, 8\]"):
        attention(team, caches[0].view, batch, np.ones((2, 4, 8), np.float32), num_kv_heads=2, scale=1.0)
    with pytest.raises(EngineError, match="num_heads is 3, accepted: a multiple of num_kv_heads 2"):
        attention(team, caches[0].view, batch, np.ones((3, 3, 8), np.float32), num_kv_heads=2, scale=1.0)


# The end.


def test_a_closed_decoder_refuses_steps(decoder: Decoder, sequences: Sequences) -> None:
    decoder.close()
    decoder.close()
    with pytest.raises(EngineError, match="this decoder was closed"):
        decoder.run(three_rows(sequences))


def test_a_team_closes_its_decoders(library: Library, sequences: Sequences, caches: list[Cache]) -> None:
    team = Team(2, library=library)
    decoder = Decoder(team, SPEC, WEIGHTS)
    team.close()
    for use in (lambda: decoder.bind_cache([c.view for c in caches]), lambda: decoder.run(three_rows(sequences))):
        with pytest.raises(EngineError, match="this decoder was closed"):
            use()
    with pytest.raises(EngineError, match="decoder: its team was closed"):
        Decoder(team, SPEC, WEIGHTS)


def test_the_view_of_an_array_has_its_strides(caches: list[Cache]) -> None:
    cache = caches[0]
    assert cache.view == KvCacheView(cache.memory.ctypes.data, 9, 2 * 16 * 32, 16 * 32, 16, "bfloat16")
