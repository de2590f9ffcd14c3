"""cookbook start"""

import sys
from pathlib import Path

import click

from launcher import site as sites
from launcher.check import faults_of
from launcher.cli import common
from launcher.cli.common import note
from launcher.cli.samples import lines as sample_lines
from launcher.do import start as workflow
from launcher.slurm import executors


@click.command()
@click.argument("data")
@click.argument("model", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The recipe's file. [default: the data's name with .yaml, here]",
)
@common.cluster_option
def start(data: str, model: str | None, output: Path | None, cluster: str | None) -> None:
    """Write a recipe that fine-tunes MODEL on DATA, and show what it needs.

    DATA is a CSV, JSON lines, JSON, Parquet or text file, or prepared:NAME@SPLIT. MODEL is a
    folder, or ORGANISATION/NAME of the Hugging Face Hub. The columns, the length of rows, the
    number of steps and the number of GPUs follow from the data and the model; every line of the
    recipe can be changed.

    Example: cookbook start faq.csv Qwen/Qwen3-8B
    """
    model = model or workflow.MODEL
    site = sites.load(cluster)
    file = (output or workflow.default_file(data)).absolute()
    made = workflow.draft(data, model, file, site, executors.choose(True))
    file.write_text(made.text, encoding="utf-8")
    click.echo(made.form)
    for line in workflow.needed(made, site):
        click.echo(line)
    for line in ["", *sample_lines(made.datasets, common.colours()), ""] if made.datasets else []:
        click.echo(line)
    for finding in made.findings:
        note(f"{finding.state}: {finding.line}")
    if made.downloads and not made.datasets:
        note("after the download run this once more with --output: then it also counts your tokens")
    wrong = bool(faults_of(made.findings))
    click.echo(f"wrote {file}; {'fix these faults first, then' if wrong else 'next'}:")
    for command in workflow.next_commands(made):
        click.echo(f"  {command}")
    sys.exit(1 if wrong else 0)
