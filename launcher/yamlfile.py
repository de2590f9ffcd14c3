"""Reading YAML the way torchtune does: 1e-4 is a number, 12:00:00 is not, a key stands once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import RecipeFault

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader with the number rules of YAML 1.2, and no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1 reads 1e-4 as text, 12:30:00 as 45000 and 2026-01-02 as a date; a learning rate or a
# time limit must not depend on that.
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9]\d*)\Z",
    "tag:yaml.org,2002:float": (
        r"(?:[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in _NUMBERS and tag != "tag:yaml.org,2002:timestamp"
    ]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


def parse(text: str, origin: str) -> Any:
    """Return the one document in text; RecipeFault names origin, line and column of a fault."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        what = error.problem or error.context or "not YAML"
        raise RecipeFault(f"broken YAML in {where}: {what}: mend that line") from error
    except (yaml.YAMLError, ValueError) as error:
        what = " ".join(str(error).split())
        raise RecipeFault(f"broken YAML in {origin}: {what}") from error


def load(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; RecipeFault where it cannot be read or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeFault(f"cannot read {path}: it is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise RecipeFault(f"cannot read {path}: {error.strerror}") from error
    value = parse(text, str(path))
    if not isinstance(value, dict):
        raise RecipeFault(f"{path} holds no 'key: value' lines; a recipe is a YAML mapping")
    return value


class _Dumper(yaml.SafeDumper):
    """Block style, keys in the order they were written, lists indented under their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


# What parse() would read as a number has to be quoted where it is text.
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *resolvers]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def dump(value: dict[str, Any]) -> str:
    """Return value as YAML text that parse() and OmegaConf read back alike."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
