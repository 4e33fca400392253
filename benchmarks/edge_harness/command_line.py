"""What the programs of this package share: words of a command line, exit codes, errors, interruption."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Sequence

from vllm_omni.errors import ConfigError, OmniError, nearest

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def run_program(
    name: str,
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, Sequence[str]], None],
    argv: Sequence[str] | None,
) -> int:
    """Runs a program and returns its exit code: 0 done, 1 something measured failed, 2 wrong input, 130 interrupted.

    Args:
        name: Before its messages.
        parser: Its command line.
        run: The program, given the parsed words and the words themselves.
        argv: The words; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    # As Ctrl-C: an exception, so that what was started is stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(args, words)
    except OmniError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def positive_int(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a whole number of 1 or more")
    return int(text)


def parse_names(text: str, accepted: Iterable[str], what: str) -> list[str]:
    """Names separated by commas, each one of `accepted`, in the order given, none twice; `what` says what they name."""
    names, choices = text.split(","), tuple(accepted)
    for name in names:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"{name!r} is no {what}; {nearest(name, choices)}")
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names one {what} twice; give each once")
    return names
