"""The progress bar of what writes tensors: conversions, quantizing, and packing at a first start."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(num_bytes: int, label: str) -> Iterator[Callable[[str, int], None]]:
    """Shows a bar on stderr; gives what is called with each tensor's name and the bytes written of it.

    Args:
        num_bytes: Bytes that will be written in all.
        label: Text before the bar.
    """
    from tqdm import tqdm

    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=label) as bar:

        def advance(tensor_name: str, written_bytes: int) -> None:
            bar.set_postfix_str(tensor_name, refresh=False)
            bar.update(written_bytes)

        yield advance
