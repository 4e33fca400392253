"""The resolved configuration of one model on one platform, and its printed form."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_omni.config.deploy_config import DeployConfig, StageDeployConfig
from vllm_omni.config.model_facts import ModelFacts
from vllm_omni.config.pipeline_registry import PipelineConfig

LINE_BREAKS = re.compile("[\n\r\x85\u2028\u2029]")
# Used up by the resolution: their content is already in the other keys.
CONSUMED_KEYS = {"base_config", "platforms"}


@dataclass(frozen=True)
class Deployment:
    """What will run.

    Attributes:
        config: The effective values; `base_config` and `platforms` are applied and gone.
        provenance: Dotted leaf path, such as `stages[0].max_num_seqs`, to the layer that set it.
        files: Deploy files read: the chosen one, then its bases.
    """

    facts: ModelFacts
    pipeline: PipelineConfig
    config: DeployConfig
    provenance: Mapping[str, str]
    files: tuple[Path, ...]
    platform: str

    def stage(self, stage_id: int) -> StageDeployConfig:
        """The effective values of one stage; IndexError if there is none."""
        return self.config.stages[stage_id]

    def tree(self) -> dict[str, Any]:
        """The effective values as plain maps and lists."""
        return self.config.model_dump(exclude=CONSUMED_KEYS)

    def describe(self) -> str:
        """The effective tree as YAML; a comment after each value says where it came from. Loads back to `tree()`."""
        return "\n".join(_map_lines(self.tree(), "", 0, self.provenance)) + "\n"


class _OneLineDumper(yaml.SafeDumper):
    """Text with line breaks is written in double quotes, which keeps it on one line."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if LINE_BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_OneLineDumper.add_representer(str, _represent_text)


def _inline(value: Any) -> str:
    """A scalar, list or empty map as YAML on one line."""
    text = yaml.dump(value, Dumper=_OneLineDumper, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def _map_lines(values: Mapping[Any, Any], path: str, depth: int, provenance: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        child_path = f"{path}.{key}" if path else str(key)
        head = "  " * depth + _inline(key) + ":"
        if isinstance(value, Mapping) and value:
            yield head
            yield from _map_lines(value, child_path, depth + 1, provenance)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) and item for item in value):
            yield head
            yield from _list_lines(value, child_path, depth, provenance)
        else:
            yield f"{head} {_inline(value)}  # {_comment(child_path, provenance)}"


def _list_lines(items: list[Mapping[Any, Any]], path: str, depth: int, provenance: Mapping[str, str]) -> Iterator[str]:
    """A list of maps: each map's first line carries the dash in place of its indentation."""
    for index, item in enumerate(items):
        indent = "  " * depth
        for number, line in enumerate(_map_lines(item, f"{path}[{index}]", depth + 1, provenance)):
            yield line if number else f"{indent}- {line[len(indent) + 2 :]}"


def _comment(path: str, provenance: Mapping[str, str]) -> str:
    """The source of a leaf. Inside a list of maps below a free-form key, the list is the leaf."""
    source = provenance.get(path) or provenance.get(path.rpartition("[")[0], "default")
    return LINE_BREAKS.sub(" ", source)
