"""An output directory that appears complete or not at all.

A conversion writes into `DIR.partial` and the directory is renamed when everything is on disk. What a long conversion
leaves behind when it is stopped before the renaming is continued by the same call. Its journal stays until everything
else is done, so that a directory with a journal under its final name is known to lack only what `finish_directory`
does. A directory that is already there is replaced only on request, and only if a conversion of ours made it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_omni.errors import ConfigError
from vllm_omni.quantization.conversion_record import RECORD_NAME

PARTIAL_SUFFIX = ".partial"
# Of what `--overwrite` replaces, while it is being replaced.
REPLACED_SUFFIX = ".vllm-omni-replaced"
# Room for the small files beside the weights: tokenizer, configuration, record.
SMALL_FILES_BYTES = 32 << 20


@contextmanager
def staged_directory(out: Path, overwrite: bool, weight_bytes: int) -> Iterator[Path]:
    """Gives a new `out.partial` to write into; on a clean exit it becomes `out`, else it is deleted.

    Args:
        out: The directory to make; its parents are created.
        overwrite: Replace `out` if it exists and holds a conversion record.
        weight_bytes: Bytes about to be written, checked against the free space first.

    Raises:
        ConfigError: `out` exists and may not be replaced, `out.partial` exists, or writing is impossible (no
            space, no permission, read-only file system), also when that happens inside the block.
    """
    out = Path(os.path.abspath(out))
    _require_replaceable(out, overwrite)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    _create(partial, weight_bytes)
    try:
        with _published(partial, out, overwrite):
            yield partial
    finally:
        # Gone after a success; after a failure, the error on its way matters more than one of the clean-up.
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def resumable_directory(out: Path, overwrite: bool, weight_bytes: int, journal_name: str) -> Iterator[Path]:
    """Gives `out.partial`, new or as an earlier run left it; on a clean exit it becomes `out`, else it stays.

    The directory is locked: of two runs for one `out`, the second is refused. The lock moves to `out` with the name.

    Args:
        out: The directory to make; its parents are created.
        overwrite: Replace `out` if it exists and holds a conversion record.
        weight_bytes: Bytes that the directory will hold, checked against the free space first.
        journal_name: The file by which a directory that may be continued is known; written in the block, removed here.

    Raises:
        ConfigError: `out` exists and may not be replaced, `out.partial` is in use or is not one to continue, or
            writing is impossible, also when that happens inside the block.
    """
    out = Path(os.path.abspath(out))
    _require_replaceable(out, overwrite)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    if not os.path.lexists(partial):
        _create(partial, weight_bytes)
    with _locked(partial):
        _require_continuable(partial, journal_name)
        with _published(partial, out, overwrite):
            yield partial
        _finish(out, journal_name)


def finish_directory(out: Path, journal_name: str) -> None:
    """Does what is left of a `resumable_directory` whose run was killed after `out` had got its name.

    Args:
        out: A directory that such a run made, with its journal.
        journal_name: As the run had it.

    Raises:
        ConfigError: The run is still at it, or nothing can be removed there.
    """
    out = Path(os.path.abspath(out))
    with _locked(out):
        _finish(out, journal_name)


@contextmanager
def _published(partial: Path, out: Path, overwrite: bool) -> Iterator[None]:
    """Makes `partial` `out` when the block ends without an error and everything is on disk."""
    try:
        yield
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        # Another run may have made it meanwhile.
        _require_replaceable(out, overwrite)
        _publish(partial, out)
    except OSError as error:
        raise _cannot_write(out, error) from error


def _require_replaceable(out: Path, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise ConfigError(f"--out {out} exists; pass another directory, or --overwrite to replace a conversion")
    if out.is_symlink() or not (out / RECORD_NAME).is_file():
        raise ConfigError(
            f"--out {out} exists and is not a directory written by a conversion (it has no {RECORD_NAME}); "
            "--overwrite replaces only those. Remove it yourself or pass another directory"
        )


def _create(partial: Path, weight_bytes: int) -> None:
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(partial.parent).free
        needed_bytes = weight_bytes + SMALL_FILES_BYTES
        if free_bytes < needed_bytes:
            raise ConfigError(
                f"--out {partial.parent}: the file system has {free_bytes} bytes free, the conversion needs "
                f"{needed_bytes}; free space or pass a directory elsewhere"
            )
        partial.mkdir()
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename} exists: another conversion is writing it, or one was killed; remove it if none runs"
        ) from error
    except OSError as error:
        raise _cannot_write(partial, error) from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other runs from a directory; one that has another name by now belongs to the run that renamed it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise _in_use(directory) from None
    except OSError as error:
        raise _cannot_write(directory, error) from error
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(descriptor), os.stat(directory))
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    except OSError as error:
        raise _cannot_write(directory, error) from error
    if not is_ours:
        raise _in_use(directory)


def _require_continuable(partial: Path, journal_name: str) -> None:
    try:
        is_known = (partial / journal_name).is_file() or not any(partial.iterdir())
    except OSError as error:
        raise _cannot_write(partial, error) from error
    if not is_known:
        raise ConfigError(
            f"{partial} exists and has no {journal_name}, so it cannot be continued: another conversion is writing it, "
            "or one was killed; remove it if none runs"
        )


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(partial: Path, out: Path) -> None:
    # An earlier run may have been killed between any two of these lines.
    replaced = _replaced(out)
    if out.exists():
        _remove_tree(replaced)
        out.rename(replaced)
        _rename_or_restore(partial, out, replaced)
    else:
        partial.rename(out)
    _sync(out.parent)
    _remove_tree(replaced)


def _replaced(out: Path) -> Path:
    return out.with_name(f".{out.name}{REPLACED_SUFFIX}")


def _rename_or_restore(partial: Path, out: Path, replaced: Path) -> None:
    try:
        partial.rename(out)
    except OSError as error:
        try:
            replaced.rename(out)
        except OSError as second_error:
            raise ConfigError(
                f"--out {out}: {partial} cannot be given this name: {error}; what was there is in {replaced} and "
                f"cannot be moved back: {second_error}; move one of the two to {out} yourself"
            ) from error
        raise


def _remove_tree(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _finish(out: Path, journal_name: str) -> None:
    """The last steps, the journal the very last: it says that they are to be done."""
    try:
        _remove_tree(_replaced(out))
        (out / journal_name).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(out, error) from error


def _in_use(directory: Path) -> ConfigError:
    return ConfigError(f"{directory} is being written by another run; wait for it to end")


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {path}: cannot write there: {error}; pass a writable directory with enough space")
