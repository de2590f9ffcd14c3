"""docs/keys.md, the reference of all keys of a recipe: python -m runspec.keys > docs/keys.md"""

import json
from collections.abc import Iterable

from plugins.evaluate.recipe_keys import EVAL, TASK
from plugins.rl.recipe_keys import GrpoConfig, OnPolicyConfig
from plugins.serve.recipe_keys import SERVE
from runspec.keys.common import COMMAND, COMMON, ENGINE, SCRIPT
from runspec.keys.key import REQUIRED, Key, keys_of, may_change
from runspec.keys.methods import METHODS
from runspec.keys.train import TrainConfig

_METHODS: dict[str, type[TrainConfig]]
_METHODS = {**METHODS, "grpo": GrpoConfig, "distill_on_policy": OnPolicyConfig}
_KNOWN = {**COMMON, **SCRIPT, **COMMAND, **ENGINE, **EVAL, **TASK, **SERVE}
for _method in _METHODS.values():
    _KNOWN |= _method.keys()

_INTRODUCTION = """\
# The keys of a recipe

Made by `python -m runspec.keys > docs/keys.md`; do not edit it. `cookbook recipes --key
dataset.packed` explains one key.

A dotted name is a key inside a block: `resources.nodes` is `nodes` under `resources:`. On the
command line `resources.nodes=4` sets it. `null` is the same as leaving a key out. `${a.b}` is the
value of the key `a.b`; `${models_root}`, `${datasets_root}` and `${repo_root}` are folders of the
site. In a file, `extends:` names other files (of `configs/base`, recipes, or paths that end in
.yaml) whose keys it inherits; its own keys take precedence.

*At resume* says whether a run may resume with another value. *Not used*: accepted because
torchtune configs contain it, but it has no effect.
"""


def markdown() -> str:
    """Return the page."""
    sections = [_section("Every recipe", COMMON.values())]
    for group in TrainConfig.__bases__:
        title = f"Every training method of the kit. {str(group.__doc__).rstrip('.')}"
        sections.append(_section(title, keys_of(group).values()))
    sections += [_of_method(name, method) for name, method in _METHODS.items()]
    sections += [
        _section("Every training method of the kit. Other keys of torchtune", TrainConfig.ignored),
        _section("`entry: eval`", EVAL.values()),
        _section("`entry: eval`. A task, under `tasks.NAME`", TASK.values()),
        _section("`entry: serve`", SERVE.values()),
        _section("`entry: script:PATH`", SCRIPT.values()),
        _section("`entry: command`: also those of scripts", COMMAND.values()),
        _section("Other trainers: also `code_root`, `args` and `parameters`", ENGINE.values()),
    ]
    return "\n".join([_INTRODUCTION, *sections])


def _of_method(name: str, method: type[TrainConfig]) -> str:
    """The keys that a method adds to those that it takes from another one."""
    for other, base in _METHODS.items():
        if method is not base and issubclass(method, base):
            own = [key for n, key in method.own_keys().items() if n not in base.own_keys()]
            also = "also" if own else "all"
            return _section(f"`entry: {name}`: {also} those of `entry: {other}`", own)
    return _section(f"`entry: {name}`", method.own_keys().values())


def _section(title: str, keys: Iterable[Key]) -> str:
    head = "| key | type | default | at resume | what it does |\n|---|---|---|---|---|\n"
    rows = "".join(map(_row, keys))
    return f"## {title}\n\n{head}{rows}" if rows else f"## {title}\n"


def _row(key: Key) -> str:
    default = "required"
    if key.default is not REQUIRED:
        default = "" if key.default is None else f"`{json.dumps(key.default)}`"
    change = "may change" if may_change(_KNOWN, key.name) else "same"
    text = f"{key.help} Not used: {key.unused}." if key.unused else key.help
    text = f"{key.help} Refused: {key.refused}." if key.refused else text
    return f"| `{key.name}` | {key.expects} | {default} | {change} | {text} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
