"""The steps of a data recipe. Each takes rows and returns rows, and records which it removed."""

from collections.abc import Callable
from importlib import import_module

from plugins.data.rows import Rows, Work

# Name -> module and function; a module is imported when its step is used.
_STEPS = {
    "filter": "filters:condition",
    "length": "filters:length",
    "language": "scores:language",
    "quality": "scores:quality",
    "exact_duplicates": "exact:exact_duplicates",
    "near_duplicates": "near:near_duplicates",
    "decontaminate": "decontaminate:decontaminate",
    "personal_data": "personal:personal_data",
    "template": "templates:template",
    "tokens": "tokens:tokens",
    "mixture": "sampling:mixture",
    "cap": "sampling:cap",
    "split": "splits:split",
}


def find(name: str) -> Callable[[Rows, Work], Rows]:
    """Return the function of a step."""
    module, _, function = _STEPS[name].partition(":")
    step: Callable[[Rows, Work], Rows] = getattr(
        import_module(f"plugins.data.steps.{module}"), function
    )
    return step
