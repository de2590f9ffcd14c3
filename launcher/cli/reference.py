"""docs/commands.md, the reference of all commands: python -m launcher.cli.reference"""

from collections.abc import Iterator

import click

from launcher.cli import cookbook

_INTRODUCTION = """\
# The commands

Made by `python -m launcher.cli.reference > docs/commands.md`; do not edit it.
`cookbook COMMAND --help` prints the same. Results go to standard output, everything else to
standard error; `--json` prints JSON. The exit status is 0 for success, 1 for failure, 2 for wrong
usage.
"""


def markdown() -> str:
    """Return the page."""
    top = click.Context(cookbook, info_name="cookbook")
    parts = [_INTRODUCTION]
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


if __name__ == "__main__":
    click.echo(markdown(), nl=False)
