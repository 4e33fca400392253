"""What must be quick and light is, in fresh interpreters.

Limits are in processor time of the child, the best of three: on a busy machine that is what a user alone on it waits.
"""

import json
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

from vllm_omni.entrypoints.cli.main import SUBCOMMANDS

PACKAGE = Path(__file__).parents[1] / "vllm_omni"
MAX_IMPORT_CPU_S = 0.3
MAX_HELP_CPU_S = 0.5
RUNS = 3
HEAVY = ("torch", "vllm", "transformers")
HELP_CODE = "import sys; from vllm_omni.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"

# Importing any module below one of these prefixes loads neither torch nor vLLM.
LIGHT_PREFIXES = (
    "vllm_omni.config",
    "vllm_omni.edge",
    "vllm_omni.engine.orchestrator",
    "vllm_omni.engine.stage",
    "vllm_omni.entrypoints.async_omni",
    "vllm_omni.entrypoints.cli",
    "vllm_omni.entrypoints.omni",
    "vllm_omni.entrypoints.omni_base",
    "vllm_omni.entrypoints.openai.api_server",
    "vllm_omni.entrypoints.openai.errors",
    "vllm_omni.entrypoints.openai.gateway",
    "vllm_omni.entrypoints.openai.middleware",
    "vllm_omni.envs",
    "vllm_omni.errors",
    "vllm_omni.outputs",
    "vllm_omni.platforms.cpu.plugin",
    "vllm_omni.platforms.cpu.threads",
    "vllm_omni.quantization",
    "vllm_omni.version",
)
# These load no array library either.
NO_NUMPY_PREFIXES = tuple(prefix for prefix in LIGHT_PREFIXES if prefix != "vllm_omni.quantization")


def run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def best_cpu_s(*arguments: str) -> float:
    """Processor seconds of the fastest of three runs."""
    seconds = []
    for _ in range(RUNS):
        before = getrusage(RUSAGE_CHILDREN)
        run(*arguments)
        after = getrusage(RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def modules_below(prefixes: tuple[str, ...]) -> list[str]:
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))]
    names = [name.removesuffix(".__init__") for name in names]
    return [name for name in names if name in prefixes or name.startswith(tuple(f"{prefix}." for prefix in prefixes))]


def first_loaders(modules: list[str], unwanted: tuple[str, ...]) -> dict[str, str]:
    """Unwanted module to the first of `modules` whose import loads it, importing one after another."""
    code = (
        "import importlib, json, sys\n"
        "found = {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    for heavy in json.loads(sys.argv[2]):\n"
        "        if heavy in sys.modules: found.setdefault(heavy, name)\n"
        "print(json.dumps(found))"
    )
    return json.loads(run("-c", code, json.dumps(modules), json.dumps(unwanted)))


def test_importing_the_package_is_quick() -> None:
    assert best_cpu_s("-c", "import vllm_omni") < MAX_IMPORT_CPU_S


def test_every_prefix_names_something() -> None:
    assert [prefix for prefix in LIGHT_PREFIXES if not modules_below((prefix,))] == []


def test_light_modules_load_neither_torch_nor_vllm() -> None:
    assert first_loaders(["vllm_omni", *modules_below(LIGHT_PREFIXES)], HEAVY) == {}


def test_light_modules_outside_quantization_load_no_numpy() -> None:
    modules = [
        name
        for name in modules_below(NO_NUMPY_PREFIXES)
        # Look into checkpoints, so they import parts of `quantization`.
        if not name.startswith("vllm_omni.entrypoints")
    ]
    assert first_loaders(modules, ("numpy",)) == {}


def test_a_heavy_module_would_be_noticed() -> None:
    assert first_loaders(["json", "email.message"], ("email",)) == {"email": "email.message"}


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in SUBCOMMANDS)], ids=" ".join)
def test_help_answers_at_once(words: list[str]) -> None:
    assert best_cpu_s("-c", HELP_CODE, *words) < MAX_HELP_CPU_S


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_help_loads_neither_torch_nor_vllm(command: str) -> None:
    code = (
        "import sys, contextlib, io\n"
        "from vllm_omni.entrypoints.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "    main([sys.argv[1], '--help'])\n"
        "print(len(text.getvalue()) > 100, [name for name in sys.argv[2:] if name in sys.modules])"
    )
    assert run("-c", code, command, *HEAVY).strip() == "True []"
