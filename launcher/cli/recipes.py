"""cookbook recipes, estimate"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from launcher import site as sites
from launcher import yamlfile
from launcher.cli import completion
from launcher.cli.common import cluster_option, own_options, recipe_arguments
from launcher.cli.number import FloatRange, IntRange
from launcher.recipes import entries
from launcher.recipes import recipe as recipe_file
from launcher.sizing import gpus
from launcher.sizing.estimate import Estimate, peak_gib
from launcher.sizing.tuning import Tuning
from launcher.workflows import registered


@click.command()
@click.argument("name", required=False, shell_complete=completion.recipes)
@click.option("--key", metavar="KEY", help="Explain a recipe key, such as dataset.packed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@cluster_option
def recipes(name: str | None, key: str | None, as_json: bool, cluster: str | None) -> None:
    """List the recipes, show NAME with all settings resolved, or explain a KEY."""
    answer: Any
    if key is not None:
        answer = entries.explain(key)
        lines = _explanation(answer)
    elif name is not None:
        answer = recipe_file.load(name).resolved(sites.load(cluster).root, "RUN_DIRECTORY")
        lines = iter(yamlfile.dump(answer).splitlines())
    else:
        root = sites.load(cluster).root
        answer = [_row(recipe_file.load(each), root) for each in recipe_file.names()]
        lines = _table(answer)
    click.echo(json.dumps(answer, indent=1) if as_json else "\n".join(lines))


def _explanation(about: dict[str, Any]) -> Iterator[str]:
    default = about["default"]
    shown = default if isinstance(default, str) else json.dumps(default)
    yield f"{about['key']}: {about['help']}"
    yield f"  type       {about['type']}"
    yield f"  default    {'none' if default is None else shown}"
    yield f"  entries    {', '.join(about['entries'])}"
    yield f"  at resume  {'may change' if about['may_change_at_resume'] else 'must be the same'}"
    for word in ("not_used", "refused"):
        if about[word]:
            yield f"  {word.replace('_', ' '):<9}  {about[word]}"
    if about["keys"]:
        yield "  keys"
        width = max(map(len, about["keys"]))
        yield from (f"    {name:<{width}}  {text}" for name, text in about["keys"].items())


def _row(recipe: recipe_file.Recipe, root: Path) -> dict[str, Any]:
    """What the table says of a recipe; memory is None if the kit cannot compute it."""
    peak = peak_gib(recipe, root) if recipe.entry.can_estimate else None
    return {
        "name": recipe.name,
        "method": recipe.method,
        "nodes": recipe.resources.nodes,
        "gpus_per_node": recipe.resources.gpus_per_node,
        "peak_gib": None if peak is None else round(peak, 2),
        "smallest_gpu": None if peak is None else gpus.smallest(peak),
        "model": (recipe.config.get("hub") or {}).get("model"),
        "description": recipe.description,
    }


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    width = max(len(row["name"]) for row in rows)
    yield f"{'RECIPE':<{width}}  METHOD  NODES x GPUS  MEMORY PER GPU  ON       DESCRIPTION"
    for row in rows:
        layout = f"{row['nodes']} x {row['gpus_per_node']}"
        memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        yield (
            f"{row['name']:<{width}}  {row['method']:<7} {layout:<13} {memory:>14}  "
            f"{row['smallest_gpu'] or '-':<8} {row['description']}"
        )
    yield (
        "Memory is computed, not measured; cookbook estimate NAME shows the terms. ON is the "
        "smallest GPU type with enough memory."
    )


@click.command()
@recipe_arguments
@own_options
@click.option(
    "--gpu", metavar="KIND", help="GPU type: h100-80, a100-40, l40s ... See configs/gpus.yaml."
)
@click.option("--nodes", type=IntRange(min=1), help="Number of nodes.")
@click.option("--gpus-per-node", type=IntRange(min=1), help="GPUs per node.")
@click.option(
    "--mfu",
    type=FloatRange(min=0, max=1, min_open=True),
    help="Model FLOPs utilisation that a run on one node has shown (mfu in its metrics); all times "
    "are predicted from it. [default: computed from kernels' published speeds]",
)
@click.option(
    "--tokens",
    type=IntRange(min=1),
    metavar="N",
    help="Tokens to train, for time and cost. [default: an epoch of a local file, else a million]",
)
@click.option(
    "--tune", is_flag=True, help="Show the fastest settings that fit, each with its change."
)
@click.option(
    "--network",
    type=FloatRange(min=0, min_open=True),
    metavar="GBITS",
    help="Gbit/s per GPU between nodes. [default: the cluster's, or the GPU's]",
)
@click.option(
    "--trace", is_flag=True, help="Also run the step on fake tensors; takes up to a minute."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@cluster_option
def estimate(
    recipe_name: str,
    data: str | None,
    model: str | None,
    gpu: str | None,
    mfu: float | None,
    tokens: int | None,
    tune: bool,
    network: float | None,
    trace: bool,
    as_json: bool,
    cluster: str | None,
    overrides: tuple[str, ...],
    **resources: int | None,
) -> None:
    """Compute what a recipe needs per GPU, and what to change if it does not fit.

    Nothing is measured, nothing is started and no GPU is needed.
    """
    site = sites.load(cluster)
    recipe = recipe_file.load(recipe_name, overrides, resources, data, model)
    recipe = registered.in_recipe(recipe, site)
    network = network or site.network_gbits
    estimated = Estimate(
        recipe,
        site.root,
        gpu,
        mfu,
        network,
        tokens=tokens,
        price=site.gpu_hour_price,
        currency=site.currency or "",
        traces=trace,
    )
    tuning = Tuning(estimated.predictor) if tune else None
    if as_json:
        shown = estimated.as_json() | ({"tuning": tuning.as_json()} if tuning else {})
        click.echo(json.dumps(shown, indent=1))
        return
    click.echo("\n".join(estimated.lines()))
    if tuning:
        click.echo("\n" + "\n".join(tuning.lines()))
