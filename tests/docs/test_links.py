"""Relative links of every Markdown file point to files that exist, and their anchors to headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (ROOT, *(ROOT / name for name in ("docs", "deploy", "benchmarks", "examples", "tests", "vllm_omni")))
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def markdown_files() -> list[Path]:
    """Those of the repository; the environment and the models lie elsewhere."""
    return sorted(path for place in PLACES for path in (place.glob("*.md") if place == ROOT else place.rglob("*.md")))


def links(text: str) -> list[str]:
    """Targets of the links in prose, without those to other sites."""
    found = LINK.findall(CODE.sub("", FENCE.sub("", text)))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def anchors(text: str) -> set[str]:
    """The names that headings get: lower case, punctuation dropped, spaces as hyphens."""
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(FENCE.sub("", text)))
    return {heading.strip().replace(" ", "-") for heading in headings}


def is_broken(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = page if not name else page.parent / name
    return not path.exists() or (bool(anchor) and anchor not in anchors(path.read_text()))


@pytest.mark.parametrize("page", markdown_files(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert [target for target in links(page.read_text()) if is_broken(page, target)] == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index.read_text())}
    pages = {path for path in markdown_files() if path.is_relative_to(index.parent)} - {index}
    assert pages - linked == set()


# The checks check.


def test_a_missing_file_and_a_missing_anchor_are_broken(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words: here\n\n[a](other.md) [b](#nothing) [c](#two-words-here) `[d](code.md)` [e](https://x.y)\n"
    )
    assert [target for target in links(page.read_text()) if is_broken(page, target)] == ["other.md", "#nothing"]


def test_pages_are_found() -> None:
    assert ROOT / "README.md" in markdown_files()
    assert ROOT / "docs" / "architecture.md" in markdown_files()
