"""A configuration tree built from layers, which knows for each value the layer it came from.

Paths are dotted, with the stage id in brackets: `orchestrator.init_timeout`, `stages[0].compilation_config.mode`.
Merging follows the deploy YAML's rules (`docs/profiles.md`); validation is not done here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Stage keys whose maps merge key by key when files are laid over each other; other maps are replaced as a whole.
MERGED_STAGE_MAPS = frozenset({"default_sampling_params", "engine_extras"})
MERGED_TOP_LEVEL_MAPS = frozenset({"connectors", "orchestrator"})


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf below `path`: scalars, lists, and empty maps."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


class LayeredTree:
    """The merged values and their sources. Not safe to share between threads.

    Attributes:
        top: Top-level keys except `stages`, `platforms` and `base_config`.
        stages: Stage id to its fields, without `stage_id`.
        sources: Leaf path to the text naming its layer; a path that is missing was set by no layer.
    """

    def __init__(self) -> None:
        self.top: dict[str, Any] = {}
        self.stages: dict[int, dict[str, Any]] = {}
        self.sources: dict[str, str] = {}
        self._platform_layers: list[tuple[str, Mapping[str, Any]]] = []

    def overlay_file(self, values: Mapping[str, Any], source: str) -> None:
        """Lays one deploy file over what is there; its platform sections are kept for `apply_platform`."""
        for key, value in values.items():
            if key not in ("stages", "platforms", "base_config"):
                self.assign(self.top, key, value, "", source, merge=key in MERGED_TOP_LEVEL_MAPS)
        self._overlay_stages(values.get("stages") or [], source)
        self._platform_layers.append((source, values.get("platforms") or {}))

    def apply_platform(self, platform: str) -> None:
        """Lays the sections of one platform over the stages, the base file's first."""
        for source, platforms in self._platform_layers:
            section = platforms.get(platform) or {}
            self._overlay_stages(section.get("stages") or [], f"platforms.{platform} of {source}")

    def platform_stage_ids(self) -> Iterator[tuple[str, str, int]]:
        """(source, platform, stage id) of every platform entry."""
        for source, platforms in self._platform_layers:
            for platform, section in platforms.items():
                for entry in (section or {}).get("stages") or []:
                    yield source, platform, entry["stage_id"]

    def set_stage_field(self, stage_id: int, key: str, value: Any, source: str) -> None:
        """Sets one field of one stage; a map merges into a map that is there."""
        self.assign(self.stages[stage_id], key, value, f"stages[{stage_id}]", source, merge=True)

    def set_top_field(self, key: str, value: Any, source: str, parent: str = "") -> None:
        """Sets a top-level key, or a key of the top-level map `parent`."""
        values = self.top.setdefault(parent, {}) if parent else self.top
        self.assign(values, key, value, parent, source, merge=True)

    def to_mapping(self) -> dict[str, Any]:
        """The tree in the shape of a deploy file, stages by id."""
        stages = [{"stage_id": stage_id, **self.stages[stage_id]} for stage_id in sorted(self.stages)]
        return {**self.top, "stages": stages}

    def source_of(self, path: str) -> str:
        """The layer of the value at `path`, of the first one below it, or of its nearest parent; else "default"."""
        below = [source for leaf, source in self.sources.items() if leaf.startswith((path + ".", path + "["))]
        candidate = path
        while candidate:
            if candidate in self.sources:
                return self.sources[candidate]
            candidate = candidate.rpartition(".")[0]
        return below[0] if below else "default"

    def assign(self, values: dict[str, Any], key: str, value: Any, parent: str, source: str, *, merge: bool) -> None:
        """Sets `values[key]`, whose path is `parent.key`, and records the source of every leaf that changed."""
        path = f"{parent}.{key}" if parent else str(key)
        present = values.get(key)
        if merge and isinstance(value, Mapping) and isinstance(present, dict):
            for child_key, child in value.items():
                self.assign(present, child_key, child, path, source, merge=True)
            if present:
                self.sources.pop(path, None)
            return
        self._forget(path)
        values[key] = _copy(value)
        self.sources.update({leaf: source for leaf, _ in leaves(value, path)})

    def _overlay_stages(self, entries: list[Mapping[str, Any]], source: str) -> None:
        for entry in entries:
            stage_id = entry["stage_id"]
            fields = self.stages.setdefault(stage_id, {})
            self.sources.setdefault(f"stages[{stage_id}].stage_id", source)
            for key, value in entry.items():
                if key != "stage_id":
                    self.assign(fields, key, value, f"stages[{stage_id}]", source, merge=key in MERGED_STAGE_MAPS)

    def _forget(self, path: str) -> None:
        for leaf in [leaf for leaf in self.sources if leaf == path or leaf.startswith(path + ".")]:
            del self.sources[leaf]


def _copy(value: Any) -> Any:
    """A copy of maps and lists, so that merging never changes what a caller gave."""
    if isinstance(value, Mapping):
        return {key: _copy(child) for key, child in value.items()}
    return [_copy(child) for child in value] if isinstance(value, list) else value
