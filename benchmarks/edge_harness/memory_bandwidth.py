"""How fast this machine reads memory: the ceiling of a decode that reads every weight once a token.

Threads look for a byte that is not there, each in its part of a buffer much larger than the caches. The C library's
search does nothing but load and compare whole vector registers, and gives up the interpreter's lock.
"""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vllm_omni.errors import HardwareError

BUFFER_BYTES = 1 << 30
TRIALS = 7
PRESENT, ABSENT = 1, 2


def streaming_ceiling(num_threads: int, num_bytes: int = BUFFER_BYTES, trials: int = TRIALS) -> list[float]:
    """GB/s (10^9 bytes) of each trial.

    Args:
        num_threads: Threads that read.
        num_bytes: Size of the buffer, a multiple of the threads.
        trials: Times that it is read; one more before is not timed.
    """
    # Written, so that every page is memory of its own and not the kernel's page of zeros.
    buffer = np.full(num_bytes, PRESENT, np.uint8)
    part = num_bytes // num_threads
    begins = [buffer.ctypes.data + part * number for number in range(num_threads)]
    rates = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(trials + 1):
            begin_ns = time.perf_counter_ns()
            found = list(pool.map(lambda begin: _search(begin, part), begins))
            rates.append(part * num_threads / (time.perf_counter_ns() - begin_ns))
            if any(found):
                raise HardwareError("memory does not hold what was written to it; the machine is faulty")
    return rates[1:]


def _search(begin: int, num_bytes: int) -> bool:
    return _memchr()(begin, ABSENT, num_bytes) is not None


def _memchr() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None).memchr
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    return function
