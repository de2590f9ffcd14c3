"""cookbook start"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from launcher import executors
from launcher import site as sites
from launcher.checks import faults_of
from launcher.cli import common
from launcher.cli.common import note
from launcher.cli.number import IntRange
from launcher.cli.samples import lines as sample_lines
from launcher.errors import UsageFault
from launcher.workflows import start as workflow


@click.command()
@click.argument("data", metavar="DATA|CONFIG")
@click.argument("model", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The recipe's file. [default: the data's name with .yaml, here; NAME_recipe.yaml beside a "
    "config]",
)
@click.option(
    "--samples",
    type=IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="Number of samples to print.",
)
@click.option("--data", "own_data", metavar="DATA", help="With a config: data in place of its own.")
@click.option("--nodes", type=IntRange(min=1), metavar="N", help="With a config: nodes.")
@click.option(
    "--gpus-per-node", type=IntRange(min=1), metavar="G", help="With a config: GPUs per node."
)
@click.option(
    "--entry",
    type=click.Choice(["sft", "dpo", "orpo", "kto", "reward"]),
    help="With a config of TRL, which does not say it: the method.",
)
@click.option(
    "--leave-out", multiple=True, metavar="KEY", help="With a config: a key to go without."
)
@common.json_option
@common.cluster_option
def start(
    data: str,
    model: str | None,
    output: Path | None,
    samples: int,
    as_json: bool,
    cluster: str | None,
    **of_config: Any,
) -> None:
    """Write a recipe that fine-tunes MODEL on DATA, and show what it needs.

    A config of axolotl, LLaMA-Factory, TRL, LitGPT or NeMo Automodel in place of DATA becomes a
    recipe of the same training: each of its keys is taken, unused or refused, as a table says.

    DATA is a CSV, JSON lines, JSON, Parquet or text file, or prepared:NAME@SPLIT. MODEL is a
    folder, or ORGANISATION/NAME of the Hugging Face Hub. The columns, the length of rows, the
    number of steps and the number of GPUs follow from the data and the model; every line of the
    recipe can be changed.

    Example: cookbook start faq.csv Qwen/Qwen3-8B
    """
    if data.endswith((".yaml", ".yml")):
        _convert(Path(data), model, output, as_json, of_config)
        return
    if given := [name for name, value in of_config.items() if value]:
        option = given[0].replace("own_data", "data").replace("_", "-")
        raise UsageFault(f"--{option} goes with a config of another trainer, and {data} is none")
    model = model or workflow.MODEL
    site = sites.load(cluster)
    file = (output or workflow.default_file(data)).absolute()
    made = workflow.draft(data, model, file, site, executors.choose(True), samples)
    file.write_text(made.text, encoding="utf-8")
    needs = workflow.needs(made)
    if as_json:
        answer = {"recipe": str(file), "form": made.form, "needs": needs, "samples": made.datasets}
        faults = [each.line for each in made.findings]
        click.echo(json.dumps({**answer, "notes": faults, "next": [*workflow.next_commands(made)]}))
        return
    click.echo(made.form)
    for line in workflow.needs_lines(needs):
        click.echo(line)
    for line in ["", *sample_lines(made.datasets, common.colours()), ""] if made.datasets else []:
        click.echo(line)
    for finding in made.findings:
        note(f"{finding.state}: {finding.line}")
    wrong = bool(faults_of(made.findings))
    click.echo(f"wrote {file}; {'fix these faults first, then' if wrong else 'next'}:")
    for command in workflow.next_commands(made):
        click.echo(f"  {command}")
    sys.exit(1 if wrong else 0)


def _convert(
    config: Path, model: str | None, output: Path | None, as_json: bool, options: dict[str, Any]
) -> None:
    # Most starts are from data, and the tables are long.
    from launcher.workflows import convert

    file = (output or convert.default_file(config)).absolute()
    if file.exists():
        raise UsageFault(f"{file} exists: choose another name with --output, or remove it")
    options["data"] = options.pop("own_data")
    message = [config.name if config.parent == Path() else str(config), *([model] if model else [])]
    made = convert.read(
        config, model, **options, command=shlex.join(["cookbook", "start", *message])
    )
    if made.text:
        file.write_text(made.text, encoding="utf-8")
    shown = made.lines(default=False)
    if as_json:
        keys = {line.key: {"state": line.state, "note": line.note} for line in shown}
        recipe = str(file) if made.text else None
        answer = {"trainer": made.peer.name, "recipe": recipe, "counts": made.counts, "keys": keys}
        click.echo(json.dumps(answer))
    else:
        _print(made)
    if not made.text:
        raise UsageFault(
            [*made.faults, f"no recipe is written; {made.peer.name} itself: {made.engine_way}"]
        )
    if not as_json:
        click.echo(f"wrote {file}; next:")
        name = shlex.quote(file.name if file.parent == Path.cwd() else str(file))
        for command in convert.next_commands(made, name):
            click.echo(f"  {command}")
        click.echo(f"or {made.peer.name} itself under the same launch: {made.engine_way}")


def _print(made: Any) -> None:
    """Print the table of keys, those that are taken first."""
    lines = sorted(made.lines(default=False), key=lambda line: made.states.index(line.state))
    width = max(len(line.key) for line in made.draft.lines)
    click.echo(f"{made.file} is a config of {made.peer.name}; method: {made.draft.entry}")
    for line in lines:
        click.echo(f"{line.state:<9} {line.key:<{width}}  {line.note}")
    for line in made.lines(default=True):
        click.echo(f"{'default':<9} {line.key:<{width}}  {line.note}")
    counts = ", ".join(f"{count} {state}" for state, count in made.counts.items() if count)
    click.echo(f"{len(lines)} keys: {counts}")
