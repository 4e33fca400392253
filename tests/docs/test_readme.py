"""The examples of the documentation run as they stand and print what their comments promise.

A comment `# prints ... "text"` in a block promises that its output contains `text`. A page's client blocks are one
program, in order; a block that imports `vllm_omni` is a program of its own. Only the server's address, the served name
and the model's path are replaced by those of the tests.
"""

import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.margins import COMPLETION, QUESTION, Margins
from tests.server import RunningServer

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/serving/*.md"))))
URL = "http://127.0.0.1:8000"
NAME = "SmolLM2-135M-Instruct-int4"
DIRECTORY = "models/SmolLM2-135M-Instruct-int4"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMISE = re.compile(r'# prints[^"\n]*"([^"\n]+)"')
TIMEOUT_S = 240
CURL_FLAGS = {"-s", "-N"}
ASKED = re.compile(r'(?:"content": |"prompt": |prompt=|input=|generate\(\[?)"([^"]+)"')
# What only the shape of the answer is promised of.
SHAPED = {"What is the weather in Paris?"}


def blocks(page: str, language: str) -> list[str]:
    return [code for name, code in BLOCK.findall((ROOT / page).read_text()) if name == language]


def is_engine(code: str) -> bool:
    return "vllm_omni" in code


ENGINE = [(page, code) for page in PAGES for code in blocks(page, "python") if is_engine(code)]
CLIENT = {page: "\n".join(code for code in blocks(page, "python") if not is_engine(code)) for page in PAGES}
CURL = [(page, code) for page in PAGES for code in blocks(page, "bash") if "curl " in code]


def assert_prints(code: str, output: str) -> None:
    """The output holds every promised text, in the promised order."""
    promises = PROMISE.findall(code)
    assert promises, f"the example promises nothing:\n{code}"
    position = 0
    for promise in promises:
        position = output.find(promise, position)
        assert position >= 0, f"{promise!r} is missing or comes too early in:\n{output}"


def replaced(code: str, old: str, new: str) -> str:
    assert old in code, f"{old} is not in the example:\n{code}"
    return code.replace(old, new)


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr
    return run.stdout


def run_shell(command: str) -> str:
    run = subprocess.run(["bash", "-ec", command], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr
    return run.stdout


def run_without_curl(command: str) -> str:
    """The request of one curl command, sent by Python; flags other than those of the examples are refused."""
    words = iter(shlex.split(command.replace("\\\n", " "), comments=True))
    assert next(words) == "curl"
    url, headers, body = "", {}, None
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(":")
            headers[name] = value.strip()
        elif word == "-d":
            body = next(words).encode()
        elif word not in CURL_FLAGS:
            assert word.startswith("http"), f"{word} is not expected in an example"
            url = word
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=TIMEOUT_S) as response:
        return response.read().decode()


@pytest.mark.engine
@pytest.mark.parametrize("page", [page for page in PAGES if CLIENT[page]])
def test_client_examples(page: str, server: RunningServer) -> None:
    code = replaced(replaced(CLIENT[page], URL, server.url), f'"{NAME}"', f'"{server.model}"')
    assert_prints(code, run_python(code))


@pytest.mark.engine
@pytest.mark.parametrize(("page", "code"), CURL, ids=[page for page, _ in CURL])
@pytest.mark.parametrize("run", [run_shell, run_without_curl], ids=["curl", "python"])
def test_curl_examples(page: str, code: str, run, server: RunningServer) -> None:  # type: ignore[no-untyped-def]
    if run is run_shell and shutil.which("curl") is None:
        pytest.skip("curl is not installed; the same request is sent by Python")
    assert_prints(code, run(replaced(code, URL, server.url).replace(f'"{NAME}"', f'"{server.model}"')))


@pytest.mark.engine
@pytest.mark.parametrize(("page", "code"), ENGINE, ids=[page for page, _ in ENGINE])
def test_engine_examples(page: str, code: str, smollm2_artifact: Path) -> None:
    assert_prints(code, run_python(replaced(code, DIRECTORY, str(smollm2_artifact))))


def test_words_are_promised_where_the_model_leads_clearly(margins: Margins) -> None:
    """No rounding on any processor makes the examples print something else than their comments say."""
    code = "\n".join(
        code for page in PAGES for name, code in BLOCK.findall((ROOT / page).read_text()) if name != "text"
    )
    assert set(ASKED.findall(code)) - SHAPED == {QUESTION.text, COMPLETION.text}
    for prompt in (QUESTION, COMPLETION):
        assert prompt.answer.strip() in PROMISE.findall(code)
        margins.require(prompt)


def test_commands_of_the_pages_use_the_model_that_make_prepares() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "ARTIFACT := $(MODELS)/SmolLM2-135M-Instruct-int4" in makefile
    assert all(DIRECTORY in (ROOT / page).read_text() for page in ("README.md", "docs/quickstart.md"))


def test_make_targets_exist() -> None:
    text = "\n".join((ROOT / page).read_text() for page in (*PAGES, "docs/contributing.md", "deploy/README.md"))
    named = {
        word
        for code in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for word in re.findall(r"^(?:sudo )?make ([a-z-]+)", code, re.MULTILINE)
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named and named <= targets


# The checks check.


def test_a_page_has_examples_of_each_kind() -> None:
    assert {page for page, _ in ENGINE} == {"README.md", "docs/serving/python_api.md"}
    assert {page for page in PAGES if CLIENT[page]} == {"README.md", "docs/quickstart.md", "docs/serving/openai_api.md"}
    assert {page for page, _ in CURL} == {"README.md", "docs/quickstart.md"}


@pytest.mark.parametrize("output", ["nothing", "b then a"])
def test_a_promise_that_is_not_kept_fails(output: str) -> None:
    with pytest.raises(AssertionError, match="is missing or comes too early"):
        assert_prints('f()  # prints "a"\ng()  # prints a line with "b"', output)


def test_an_example_without_a_promise_fails() -> None:
    with pytest.raises(AssertionError, match="promises nothing"):
        assert_prints("f()", "anything")
