"""`vllm-omni`: finds the subcommand and runs it. Importing it loads neither torch nor vLLM.

Only the module of the chosen subcommand is imported, so help answers at once. Exit codes: 0 done; 1 the engine or an
operation failed; 2 the user's input is wrong (as argparse's own errors); 130 interrupted.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Mapping, Sequence

from vllm_omni.errors import ConfigError, HardwareError, OmniError, WeightError
from vllm_omni.version import __version__

# Name to one line of help; each is implemented by `vllm_omni.entrypoints.cli.<name>` with `add_arguments(parser)` and
# `run(args, rest)`, where `rest` are the words that the parser does not know.
SUBCOMMANDS: Mapping[str, str] = {
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "convert": "import a GGUF file as a checkpoint directory that can be served",
    "quantize": "pack the weights of a checkpoint into 4 or 8 bits",
}
USER_ERRORS = (ConfigError, WeightError, HardwareError)


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of `command` alone; None leaves all subcommands without arguments."""
    parser = argparse.ArgumentParser(prog="vllm-omni", description="Language models on small CPU machines.")
    parser.add_argument("-v", "--version", action="version", version=f"vllm-omni-edge {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, help_line in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name == command:
            _module(name).add_arguments(subparser)
    return parser


def _module(command: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"vllm_omni.entrypoints.cli.{command}")


def configure_logging() -> None:
    """One line an event on stderr, for this package's loggers only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("vllm_omni")
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words and words[0] in SUBCOMMANDS else None
    parser = build_parser(command)
    args, rest = parser.parse_known_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    configure_logging()
    module = _module(args.command)
    try:
        return module.run(args, rest)
    except USER_ERRORS as error:
        print(f"vllm-omni {args.command}: error: {error}", file=sys.stderr)
        return 2
    except OmniError as error:
        print(f"vllm-omni {args.command}: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
