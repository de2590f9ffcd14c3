"""The cookbook command: one file per group of commands, no logic in them."""

import sys
from functools import partial
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any

import click

from launcher import __version__, plugins
from launcher.errors import CookbookError, UsageFault, nearest, of_the_system
from launcher.remote import chosen
from runspec.files import DamagedFile

# Name -> module and one line of help, so that `cookbook --help` imports no command.
_COMMANDS = {
    "start": ("start", "Write a recipe for your data and model, and show what it needs."),
    "recipes": ("recipes", "List the recipes, or show one with all settings resolved."),
    "environments": ("recipes", "List the environments in configs/environments."),
    "doctor": ("check", "Check whether this site can run the kit."),
    "download": ("check", "Download a recipe's model and dataset from the Hugging Face Hub."),
    "check": ("check", "Check everything that could stop a run, without submitting it."),
    "submit": ("submit", "Render a recipe's job script, check it and submit it."),
    "status": ("status", "Show the state of runs."),
    "watch": ("status", "Follow runs to their end."),
    "logs": ("observe", "Show or follow a run's logs."),
    "cancel": ("runs", "Cancel a run."),
    "resume": ("runs", "Continue a run from its last checkpoint."),
    "sweep": ("sweep", "Run a recipe with many settings, a run each."),
    "results": ("results", "Compare runs: settings, loss, speed, memory, GPU-hours, cost."),
    "report": ("results", "Write an HTML report of runs."),
    "diff": ("results", "Show the differences between two runs."),
    "replay": ("results", "Submit a run once more, from its provenance."),
    "profile": ("results", "Show the slowest operators of a run's profiled steps."),
    "tensorboard": ("observe", "Serve loss curves and profiler traces with TensorBoard."),
    "init": ("remote", "Install the kit on a cluster from this machine, and check it."),
    "fetch": ("remote", "Copy a run's model, adapter or logs from the cluster to this machine."),
}


# With --host they use the connection themselves.
_OF_THIS_MACHINE = ("fetch", "init")

# How --help groups them, with an example of each group.
_GROUPS = {
    "Prepare": (
        "cookbook start faq.csv Qwen/Qwen3-8B",
        "init start recipes environments download check doctor",
    ),
    "Run": (
        "cookbook submit llama70b_lora --nodes 2 --watch",
        "submit sweep cancel resume replay",
    ),
    "Look": (
        "cookbook logs last -f",
        "status watch logs results diff report profile tensorboard",
    ),
    "Deliver": (
        "cookbook --host NAME fetch last",
        "fetch",
    ),
}


def names() -> list[str]:
    """Return the names of all commands."""
    return [*_COMMANDS, *plugins.commands()]


class _Lazy(click.Group):
    """A group that imports a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in names():
            ctx.fail(f"No such command {cmd_name!r}{nearest(cmd_name, names())}.")
        # All that is not of a laptop alone renders templates, or lists what the checkout holds.
        if cmd_name not in _OF_THIS_MACHINE and find_spec("jinja2") is None:
            raise UsageFault(
                f"{cmd_name} runs on a cluster: cookbook --host NAME {cmd_name} ...; this machine "
                "has only the part of the kit for that. Install the kit on a cluster with: "
                "cookbook init --host NAME, or on this machine with: bash setup.sh"
            )
        if cmd_name in _COMMANDS:
            target = f"launcher.cli.{_COMMANDS[cmd_name][0]}:{cmd_name}"
        else:
            target = plugins.commands()[cmd_name].target
        command: click.Command = plugins.load(target)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        host = chosen(ctx.params.get("host"))
        if host is None or args[0] not in names() or args[0] in _OF_THIS_MACHINE:
            return super().resolve_command(ctx, args)
        return args[0], _There(host, args[0]), args[1:]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # As a shell says it; click would say "Aborted!".
            click.echo("interrupted", err=True)
            sys.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, (example, own) in _GROUPS.items():
            rows = [(name, _COMMANDS[name][1]) for name in own.split()]
            given = plugins.commands().items()
            rows += [(name, each.help) for name, each in given if each.group == title]
            with formatter.section(f"{title} ({example})"):
                formatter.write_dl(rows)


class _There(click.Command):
    """A command that runs on a host, which reads its words."""

    def __init__(self, host: str, name: str) -> None:
        super().__init__(name)
        self._host = host

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> None:
        from launcher.remote import client

        sys.exit(client.run(self._host, [str(self.name), *ctx.args], partial(click.echo, err=True)))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--host",
    metavar="NAME[:FOLDER]",
    help="Run the command by the kit on this host of your ssh configuration; local: here.",
)
@click.version_option(__version__, prog_name="cookbook")
def cookbook(host: str | None) -> None:
    """Fine-tune language models on a Slurm cluster, from one recipe file."""


def main() -> None:
    """The console script: expected errors are one line per fault, others keep their traceback."""
    for stream in (sys.stdout, sys.stderr):
        # A log may hold what the terminal's encoding cannot show.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        cookbook(prog_name="cookbook")
    except CookbookError as error:
        for fault in error.faults:
            click.echo(f"error: {fault}", err=True)
        sys.exit(error.exit_code)
    except DamagedFile as error:
        click.echo(f"error: {error}: move the file away, and try again", err=True)
        sys.exit(1)
    except OSError as error:
        if (line := of_the_system(error)) is None:
            raise
        click.echo(f"error: {line}", err=True)
        sys.exit(1)
