"""The page of the command line's help is what the commands print. To write it anew, from the root of the repository:

python -m tests.docs.test_cli_reference --write
"""

import os
import subprocess
import sys
from pathlib import Path

from vllm_omni.entrypoints.cli.main import SUBCOMMANDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serving" / "cli_reference.md"
COMMAND = "python -m tests.docs.test_cli_reference --write"
COLUMNS = "100"
HEAD = f"""# Command line

Written by `{COMMAND}`; do not edit.

`serve` also takes any vLLM engine field as a flag, and flags of one stage: `--stage-0-max-num-seqs 2`.
[Profiles](../profiles.md) tells what wins over what; [architecture](../architecture.md#errors) lists the exit codes.
"""
CODE = "import sys; from vllm_omni.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"


def help_page(*words: str) -> str:
    """What `vllm-omni <words> --help` prints on a terminal of 100 columns."""
    environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1"}
    command = [sys.executable, "-c", CODE, *words, "--help"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def render() -> str:
    """The whole page."""
    sections = [HEAD]
    for words in ((), *((name,) for name in SUBCOMMANDS)):
        title = " ".join(("vllm-omni", *words))
        sections.append(f"## {title}\n\n```text\n{help_page(*words).rstrip()}\n```\n")
    return "\n".join(sections)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), f"run: {COMMAND}"


def test_every_command_has_its_section() -> None:
    text = PAGE.read_text()
    assert [name for name in SUBCOMMANDS if f"usage: vllm-omni {name} " not in text] == []


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {COMMAND}")
    PAGE.write_text(render())
