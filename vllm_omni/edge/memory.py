"""Gives heap memory that loading has freed back to the operating system.

glibc keeps freed arenas mapped; after a model load that is hundreds of megabytes of staging buffers and syntax trees.
"""

import ctypes
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# From glibc's malloc.h.
M_ARENA_MAX = -8

logger = logging.getLogger("vllm_omni.memory")


def anonymous_bytes(pid: str = "self", root: Path = Path("/proc")) -> int | None:
    """`RssAnon` of a process: what it allocated, without the pages of mapped files. None where it is not reported."""
    try:
        status = (root / pid / "status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


@contextmanager
def paused_collection() -> Iterator[None]:
    """Stops the cyclic garbage collector for a block that only allocates, such as importing vLLM.

    The collector walks the growing heap again and again and finds nothing. Nests.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def use_one_heap_arena() -> bool:
    """Makes all threads allocate from one glibc arena, so that memory freed by one is used by the next.

    Call before threads are started. One thread does nearly all allocation here, so they hardly wait for each other.
    False where glibc is not the C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_ARENA_MAX, 1))


def release_freed_memory() -> int | None:
    """Collects garbage and trims every heap arena. Returns the bytes given back, None where glibc is not the C library.

    What is left is then exempt from collection: it lives as long as the engine.

    Call it once, when loading has ended.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    before = anonymous_bytes()
    if trim is None or before is None:
        logger.warning("event=memory_not_released reason=the C library has no malloc_trim")
        return None
    trim(0)
    released_bytes = before - (anonymous_bytes() or before)
    logger.info("event=memory_released released_bytes=%d rss_anon_bytes=%d", released_bytes, before - released_bytes)
    return released_bytes
