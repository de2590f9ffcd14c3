"""References in a recipe: ${a.b} is the value of the key a.b, as in OmegaConf."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from runspec.hints import nearest
from runspec.keys.key import Fault

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def resolve(
    config: Mapping[str, Any], variables: Mapping[str, str]
) -> tuple[dict[str, Any], list[Fault]]:
    """Return config with its references replaced, and the faults; a wrong reference stays as it is.

    variables: names that may be used beside the recipe's own keys.
    """
    root = {**variables, **config}
    faults: list[Fault] = []

    def look_up(reference: str, key: str, trail: tuple[str, ...]) -> Any:
        if reference in trail:
            faults.append(Fault(key, f"${{{reference}}} refers to itself"))
            return f"${{{reference}}}"
        value: Any = root
        for part in reference.strip().split("."):
            if not isinstance(value, dict) or part not in value:
                hint = nearest(part, value if isinstance(value, dict) else ())
                faults.append(Fault(key, f"${{{reference}}} leads nowhere{hint}"))
                return f"${{{reference}}}"
            value = value[part]
        return walk(value, key, (*trail, reference))

    def walk(value: Any, key: str, trail: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {
                name: walk(inner, f"{key}.{name}".lstrip(".") if not trail else key, trail)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [walk(inner, key, trail) for inner in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return copy.deepcopy(look_up(whole.group(1), key, trail))
        return _REFERENCE.sub(lambda match: str(look_up(match.group(1), key, trail)), value)

    return dict(walk(config, "")), faults
