"""The references: python -m benchmarks.reference keys > docs/keys.md, and commands likewise."""

import json
from collections.abc import Iterable, Iterator

import click

from launcher.cli import cookbook
from launcher.recipe import entries
from runspec.keys.common import COMMON
from runspec.keys.key import REQUIRED, Key, Keys, keys_of, may_change, table
from runspec.keys.train import ModelSpec, TrainConfig

_COMMANDS = """\
# The commands

Made by `python -m benchmarks.reference commands > docs/commands.md`; do not edit it.
`cookbook COMMAND --help` prints the same. Results go to standard output, everything else to
standard error; `--json` prints JSON. The exit status is 0 for success, 1 for failure, 2 for wrong
usage.
"""
_KEYS = """\
# The keys of a recipe

Made by `python -m benchmarks.reference keys > docs/keys.md`; do not edit it.

A dotted name is a key inside a block: `resources.nodes` is `nodes` under `resources:`. On the
command line `resources.nodes=4` sets it. `null` is the same as leaving a key out. `${a.b}` is the
value of the key `a.b`; `${models_root}`, `${datasets_root}` and `${repo_root}` are folders of the
site. In a file, `extends:` names other files (of `configs/base`, recipes, or paths that end in
.yaml) whose keys it inherits; its own keys take precedence.

*At resume* says whether a run may resume with another value. *Not used*: accepted because
torchtune configs contain it, but it has no effect.
"""


def commands() -> str:
    """Return the page of all commands."""
    top = click.Context(cookbook, info_name="cookbook")
    parts = [_COMMANDS]
    for name in cookbook.list_commands(top):
        command = cookbook.get_command(top, name)
        if command is not None:
            parts += _sections(command, click.Context(command, info_name=name, parent=top))
    return "\n".join(parts)


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    lines = [f"## {context.command_path}", "", f"`{' '.join(_usage(command, context))}`", ""]
    lines += [" ".join(part.split()) + "\n" for part in (command.help or "").split("\n\n")]
    records = (each.get_help_record(context) for each in command.get_params(context))
    rows = [record for record in records if record is not None and record[1]]
    rows = [(name, text) for name, text in rows if "--help" not in name]
    if rows:
        lines += ["| option | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in rows]
    yield "\n".join(lines) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _sections(inner, click.Context(inner, info_name=name, parent=context))


def _usage(command: click.Command, context: click.Context) -> list[str]:
    return [context.command_path, *command.collect_usage_pieces(context)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def keys() -> str:
    """Return the page of all keys; a section without a new key is left out."""
    rows, shared = entries.rows(), TrainConfig.keys()
    sections: list[tuple[str, Keys, Keys]] = [("Every recipe", COMMON, COMMON)]
    for group in (*ModelSpec.__bases__, *TrainConfig.__bases__[1:]):
        title = f"Every training method of the kit. {str(group.__doc__).rstrip('.')}"
        sections.append((title, keys_of(group), shared))
    for name, row in rows.items():
        if row.method:
            sections.append((*_of_method(name, row.method), row.keys))
    ignored = table(*TrainConfig.ignored)
    sections.append(("Every training method of the kit. Other keys of torchtune", ignored, shared))
    for name, row in rows.items():
        shown = [key for _, section, _ in sections for key in section.values()]
        own = {each: key for each, key in row.keys.items() if key not in shown}
        same = [other for other, each in rows.items() if own.keys() <= each.keys.keys()]
        if own and not row.other_keys:
            sections.append((", ".join(f"`entry: {other}`" for other in same), own, row.keys))
        for block, keys in row.inner.items():
            sections.append((f"`entry: {name}`. Under `{block}.NAME`", keys, keys))
    parts, before = [_KEYS], list[Key]()
    for title, section, known in sections:
        if not section or any(key not in before for key in section.values()):
            parts.append(_key_section(known, title, section.values()))
        before += section.values()
    return "\n".join(parts)


def _of_method(name: str, method: type[TrainConfig]) -> tuple[str, Keys]:
    """Return the title of a method, and the keys that it adds to those of its base."""
    for other, row in entries.rows().items():
        if row.method and method is not row.method and issubclass(method, row.method):
            below = row.method.own_keys()
            own = {each: key for each, key in method.own_keys().items() if each not in below}
            return f"`entry: {name}`: {'also' if own else 'all'} those of `entry: {other}`", own
    return f"`entry: {name}`", method.own_keys()


def _key_section(known: Keys, title: str, keys: Iterable[Key]) -> str:
    head = "| key | type | default | at resume | what it does |\n|---|---|---|---|---|\n"
    rows = "".join(_key_row(known, key) for key in keys)
    return f"## {title}\n\n{head}{rows}" if rows else f"## {title}\n"


def _key_row(known: Keys, key: Key) -> str:
    default = "required"
    if key.default is not REQUIRED:
        default = "" if key.default is None else f"`{json.dumps(key.default)}`"
    change = "may change" if may_change(known, key.name) else "same"
    text = f"{key.help} Not used: {key.unused}." if key.unused else key.help
    text = f"{key.help} Refused: {key.refused}." if key.refused else text
    return f"| `{key.name}` | {key.expects} | {default} | {change} | {text} |\n"


@click.command()
@click.argument("page", type=click.Choice(["keys", "commands"]))
def main(page: str) -> None:
    click.echo(keys() if page == "keys" else commands(), nl=False)


if __name__ == "__main__":
    main()
