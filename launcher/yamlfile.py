"""Reading YAML the way torchtune does: 1e-4 is a number, 12:00:00 is not, each key once."""

from pathlib import Path
from typing import Any

import yaml

from launcher.errors import RecipeFault, nearest
from runspec import yamlrules
from runspec.keys.key import NAME, NAME_RULE

_Loader = yamlrules.loader(yaml)


def names(folder: Path) -> list[str]:
    """Return the names of a folder's YAML files, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find(kind: str, name: str, folder: Path, remedy: str = "") -> Path:
    """Return one of the kit's files by its name in a folder, or the user's own by its path.

    Args:
        kind: what the file is, for messages.
        remedy: how to find an existing name; "" lists them.

    Raises:
        RecipeFault: there is none, or its name could not become a part of a run's.
    """
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name).expanduser().absolute() if is_path else folder / f"{name}.yaml"
    if not NAME.match(path.stem if is_path else name):
        raise RecipeFault(
            f"the {kind}'s name {path.stem if is_path else name!r} may contain only {NAME_RULE}: "
            "rename it, or give your own file as a path that ends in .yaml"
        )
    if path.is_file():
        return path
    known = names(folder)
    shown = name if is_path else f"{name!r}{nearest(name, known)}"
    remedy = remedy or f"give one of {', '.join(known) or 'none'}, or the path of a YAML file"
    raise RecipeFault(f"there is no {kind} {shown}: {remedy}")


def parse(text: str, origin: str) -> Any:
    """Return the one document in text; RecipeFault names origin, line and column of a fault."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        what = error.problem or error.context or "not YAML"
        raise RecipeFault(f"broken YAML in {where}: {what}: fix that line") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeFault(f"broken YAML in {origin}: {' '.join(str(error).split())}") from error


def load(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; RecipeFault if it cannot be read or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeFault(f"cannot read {path}: it is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise RecipeFault(f"cannot read {path}: {error.strerror}") from error
    value = parse(text, str(path))
    if not isinstance(value, dict):
        raise RecipeFault(f"{path} has no 'key: value' lines; a recipe is a YAML mapping")
    return value


def line_of(path: Path, key: str) -> int | None:
    """Return the line on which a YAML file gives a dotted key, None if it does not."""
    node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    line = None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        pair = next(((name, value) for name, value in pairs if name.value == part), None)
        if pair is None:
            return None
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


class _Dumper(yaml.SafeDumper):
    """Block style, keys in the order they were written, lists indented under their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


# Text that parse() would read as a number has to be quoted.
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *resolvers]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def dump(value: dict[str, Any]) -> str:
    """Return value as YAML text that parse() and OmegaConf read back alike."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
