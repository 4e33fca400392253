"""The ctypes mirror against the header it mirrors: by text, and by what a compiler makes of it."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.native.builds import ROOT, missing_compiler, native_build
from vllm_omni.native import spec, structures

HEADER = ROOT / "csrc" / "include" / "omni_native.h"
TEXT = re.sub(r"//.*", "", HEADER.read_text())
SCALARS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "omni_matrix": structures.MatrixStruct,
}


def structure_fields(name: str) -> list[tuple[str, Any]]:
    """Field names and ctypes types, as the header declares them."""
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + name + ";", TEXT)
    fields = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        kind, names = re.match(r"(.*?[ *])(\w+(?:, \w+)*)$", declaration, re.S).groups()  # type: ignore[union-attr]
        c_type = ctypes.c_void_p if "*" in kind else SCALARS[kind.replace("const", "").strip()]
        fields += [(field, c_type) for field in names.split(", ")]
    return fields


def functions() -> dict[str, tuple[str, list[str]]]:
    """Name to result and parameter types, as the header declares them."""
    found = re.findall(r"^((?:const )?\w+\*?) (omni_\w+)\(([^)]*)\);", TEXT, re.M)
    return {
        name: (
            result,
            [] if parameters == "void" else [re.sub(r"\s*\w+$", "", p.strip()) for p in parameters.split(",")],
        )
        for result, name, parameters in found
    }


def c_type_of(text: str) -> Any:
    """The ctypes type of a parameter or result."""
    words = text.replace("const ", "").strip()
    if words in structures.STRUCTURES or words.removesuffix("*") in structures.STRUCTURES:
        return ctypes.POINTER(structures.STRUCTURES[words.removesuffix("*")])
    if words == "char*":
        return ctypes.c_char_p
    if words.endswith("*"):
        return ctypes.c_void_p
    return {**SCALARS, "void": None}[words]


@pytest.mark.parametrize("name", structures.STRUCTURES)
def test_fields_are_those_of_the_header(name: str) -> None:
    assert list(structures.STRUCTURES[name]._fields_) == structure_fields(name)


def test_functions_are_those_of_the_header() -> None:
    assert set(structures.FUNCTIONS) == set(functions())


@pytest.mark.parametrize("name", structures.FUNCTIONS)
def test_a_signature_is_that_of_the_header(name: str) -> None:
    result, parameters = functions()[name]
    assert structures.FUNCTIONS[name] == (c_type_of(result), tuple(map(c_type_of, parameters)))


def test_the_header_has_what_is_looked_for() -> None:
    assert len(functions()) == TEXT.count("(")
    assert len(functions()) > 15
    assert structure_fields("omni_kv_cache")[-1] == ("kind", ctypes.c_int32)


def test_constants_are_those_of_the_header() -> None:
    (version,) = re.findall(r"#define OMNI_ABI_VERSION (\d+)", TEXT)
    values = dict(re.findall(r"(OMNI_\w+) = (-?\d+)", TEXT))
    assert int(version) == structures.ABI_VERSION
    for prefix, names in (("ACTIVATION", spec.ACTIVATIONS), ("KV", spec.KV_KINDS), ("ROPE", spec.ROPE_STYLES)):
        assert [int(values[f"OMNI_{prefix}_{name.upper()}"]) for name in names] == list(range(len(names)))
    for name in ("OK", "ERROR_ARGUMENT", "ERROR_ISA", "ERROR_MEMORY"):
        assert getattr(structures, name) == int(values[f"OMNI_{name}"])


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_offsets_are_those_of_the_compiler(tmp_path: Path) -> None:
    lines = []
    for name, structure in structures.STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));' for field in structure._fields_]
    code = f'#include <stdio.h>\n#include "{HEADER}"\nint main() {{ {" ".join(lines)} return 0; }}\n'
    (tmp_path / "offsets.cpp").write_text(code)
    subprocess.run(
        [*native_build.find_compiler(), str(tmp_path / "offsets.cpp"), "-o", str(tmp_path / "offsets")], check=True
    )
    printed = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True).stdout.split()
    expected = {}
    for name, structure in structures.STRUCTURES.items():
        expected[name] = ctypes.sizeof(structure)
        expected |= {f"{name}.{field[0]}": getattr(structure, field[0]).offset for field in structure._fields_}
    assert dict(zip(printed[::2], map(int, printed[1::2]), strict=True)) == expected
