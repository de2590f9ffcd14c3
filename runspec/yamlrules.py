"""How YAML is read here, as torchtune reads it: 1e-4 is a number, 12:00:00 is not, a key is unique.

Standard library only: the caller hands over the yaml module.
"""

import re
from typing import Any

# YAML 1.1 reads 1e-4 as text, 12:30:00 as 45000 and 2026-01-02 as a date; a learning rate or a
# time limit must not depend on that.
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9]\d*)\Z",
    "tag:yaml.org,2002:float": (
        r"(?:[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
_REPLACED = (*_NUMBERS, "tag:yaml.org,2002:timestamp")
# Nothing of ours is so deep. libyaml's binding calls itself for each level, and ends the process
# at some 30,000.
_DEEPEST = 200


def loader(yaml: Any) -> Any:
    """Return PyYAML's safe loader with the number rules of YAML 1.2 and no duplicate keys."""
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        def __init__(self, stream: str) -> None:
            _check_depth(yaml, base, stream)
            super().__init__(stream)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                key = str(key_node.value)
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
            return dict(super().construct_mapping(node, deep))

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    for tag, pattern in _NUMBERS.items():
        Loader.add_implicit_resolver(tag, re.compile(pattern), list("-+.0123456789"))
    return Loader


def _check_depth(yaml: Any, base: Any, text: str) -> None:
    """Raise yaml's own error if a text is nested too deeply to be read."""
    if sum(map(text.count, "[{-?:")) < _DEEPEST:
        return  # each level needs one of them
    depth = 0
    for event in yaml.parse(text, Loader=base):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            problem = f"it is nested deeper than {_DEEPEST} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
