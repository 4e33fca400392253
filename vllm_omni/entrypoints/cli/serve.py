"""`vllm-omni serve`: flags to overrides, then the server.

The flags of stages and of the orchestrator are made from the deploy schema, so a key, its flag and its help are written
once. Flags that are not listed but name a vLLM engine field are passed on; anything else is refused.
"""

import argparse
import logging
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel

from vllm_omni import envs
from vllm_omni.config.deploy_config import OrchestratorConfig, StageDeployConfig
from vllm_omni.edge.memory import use_one_heap_arena
from vllm_omni.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
# A stage's identity and free-form maps have no flag of their own: --stage-overrides and deploy files set them.
FIELDS_WITHOUT_FLAG = frozenset({"stage_id", "engine_extras"})
SCHEMAS: tuple[type[BaseModel], ...] = (StageDeployConfig, OrchestratorConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds everything that `serve` accepts."""
    # MODEL is not the parser's: it would take the value of an unlisted flag for it. `parse_unknown` finds it.
    parser.usage = "%(prog)s MODEL [options]"
    parser.add_argument("--model", metavar="MODEL", help="checkpoint directory to serve, as a flag")
    parser.add_argument("--omni", action="store_true", help="accepted for compatibility; this command always is Omni")
    _add_server_arguments(parser.add_argument_group("server"))
    _add_deploy_arguments(parser.add_argument_group("deployment"))
    for schema, title in ((StageDeployConfig, "stage (every stage)"), (OrchestratorConfig, "limits")):
        group = parser.add_argument_group(title)
        for name, field in flag_fields(schema):
            _add_field_flag(group, name, field)


def _add_server_arguments(group: Any) -> None:
    group.add_argument("--host", default=DEFAULT_HOST, help=f"address to listen on (default {DEFAULT_HOST})")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0: any free port (default {DEFAULT_PORT})")
    group.add_argument("--api-key", nargs="+", metavar="KEY", help="keys of which clients must send one")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that clients may use")
    group.add_argument("--disable-log-stats", action="store_true", help="collect no statistics for /metrics")
    group.add_argument("--enable-log-requests", action="store_true", help="log arrival and end of each request")
    levels = ["critical", "error", "warning", "info", "debug"]
    group.add_argument("--uvicorn-log-level", choices=levels, default="warning", help="connection-level messages")


def _add_deploy_arguments(group: Any) -> None:
    group.add_argument("--deploy-profile", metavar="P", help="packaged profile, such as `edge`")
    group.add_argument("--deploy-config", metavar="YAML", help="deploy file, or the name of a packaged one")
    group.add_argument("--stage-overrides", metavar="JSON", help='values of single stages: {"0": {"max_num_seqs": 2}}')
    group.add_argument("--async-chunk", action=argparse.BooleanOptionalAction, default=None, help="see the deploy key")
    group.add_argument("--print-config", action="store_true", help="print the effective configuration and exit")


def flag_fields(schema: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Name and field of each key of `schema` that has a flag."""
    return ((name, field) for name, field in schema.model_fields.items() if name not in FIELDS_WITHOUT_FLAG)


def _is_bool(annotation: Any) -> bool:
    members = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return bool in members


def _add_field_flag(group: Any, name: str, field: Any) -> None:
    """One flag; its text is parsed and checked with the deploy schema, where its value then counts as given."""
    flag = "--" + name.replace("_", "-")
    help_text = field.description.replace("%", "%%")
    if _is_bool(field.annotation):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text)
    else:
        group.add_argument(flag, metavar="V", default=argparse.SUPPRESS, help=help_text)


def parse_unknown(words: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The model, and flags that are not listed as overrides: `--name value`, `--name=value`, `--name`, `--no-name`.

    Raises:
        ConfigError: A word is neither a flag nor a flag's value, and a model was there already.
    """
    model: str | None = None
    overrides: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if model is None and not word.startswith("-"):
            model = word
            continue
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(f"unexpected argument {word!r}; `vllm-omni serve --help` lists what is accepted")
        name, separator, value = word[2:].partition("=")
        key = name.replace("-", "_")
        if separator:
            overrides[key] = value
        elif key.startswith("no_"):
            overrides[key.removeprefix("no_")] = False
        elif position < len(words) and not words[position].startswith("--") and not _is_switch(key):
            overrides[key] = words[position]
            position += 1
        else:
            overrides[key] = True
    return model, overrides


def _is_switch(key: str) -> bool:
    """Whether an unlisted flag stands for a truth value, so that the word after it is not its value."""
    from vllm_omni.config.engine_fields import engine_field_types
    from vllm_omni.config.overrides import STAGE_FIELD_PATTERN

    field = STAGE_FIELD_PATTERN.sub(r"\2", key)
    if field in StageDeployConfig.model_fields:
        return _is_bool(StageDeployConfig.model_fields[field].annotation)
    return engine_field_types().get(field) in ("bool", "bool | None")


def collect_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The values of listed flags that were typed, by field name."""
    names = [name for schema in SCHEMAS for name, _ in flag_fields(schema)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if args.async_chunk is not None:
        given["async_chunk"] = args.async_chunk
    return given


def served_names(model: str, configured: Sequence[str] | None) -> tuple[str, ...]:
    """Names that clients may use: those configured, else the model as given and its last path component."""
    if configured:
        return tuple(configured)
    return tuple(dict.fromkeys((model, Path(model).name)))


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Serves until stopped. Everything the user can have got wrong is found before torch or vLLM is imported."""
    from vllm_omni.entrypoints.omni_base import prepare

    started_at = time.monotonic()
    model_word, unlisted = parse_unknown(rest)
    model = model_word or args.model
    if not model:
        raise ConfigError("no model given; accepted: a checkpoint directory, as in `vllm-omni serve DIR`")
    if not args.print_config:
        require_port(args.host, args.port)
    deployment = prepare(
        model,
        deploy_config=args.deploy_config,
        deploy_profile=args.deploy_profile,
        stage_overrides=args.stage_overrides,
        overrides=collect_overrides(args) | unlisted,
        check_weights=not args.print_config,
    )
    if args.print_config:
        sys.stdout.write(deployment.describe())
        return 0

    if envs.VLLM_OMNI_CPU_RELEASE_MEMORY:
        use_one_heap_arena()

    from vllm_omni.entrypoints.openai.api_server import ServerOptions, run_server

    key = envs.VLLM_API_KEY
    options = ServerOptions(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key or ([key] if key else [])),
        served_model_names=served_names(model, args.served_model_name),
        log_stats=not args.disable_log_stats,
        log_requests=args.enable_log_requests,
        uvicorn_log_level=args.uvicorn_log_level,
    )
    leave(run_server(deployment, options, started_at))


def require_port(host: str, port: int) -> None:
    """Listens for an instant: hashing and packing a checkpoint can take minutes, and would be for nothing.

    The server binds the port anew, so that clients are turned away until it can answer them.

    Raises:
        ConfigError: As the server would raise it.
    """
    from vllm_omni.entrypoints.openai.api_server import bind_socket

    bind_socket(host, port).close()


def leave(code: int) -> NoReturn:
    """Ends the process. The engine is freed already; taking the interpreter apart object by object costs seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
