"""cookbook estimate"""

import json

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, own_options, recipe_arguments
from launcher.do import models
from launcher.recipe import load as recipe_file
from plugins.estimate.launcher import estimate as estimates
from plugins.estimate.launcher import text
from plugins.estimate.launcher.tuning import Tuning


@click.command()
@recipe_arguments
@own_options
@click.option(
    "--gpu", metavar="KIND", help="GPU type: h100-80, a100-40, l40s ... See configs/gpus.yaml."
)
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs per node.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens to train, for time and cost. [default: an epoch of a local file, else a million]",
)
@click.option(
    "--tune", is_flag=True, help="Show the fastest settings that fit, each with its change."
)
@click.option(
    "--network",
    type=click.FloatRange(min=0, min_open=True),
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
    recipe = models.in_recipe(recipe, site)
    estimated = estimates.Estimate.of(
        recipe, site.root, gpu, tokens=tokens, network_gbits=network or site.network_gbits
    )
    traced = None
    if trace:
        config, ranks = recipe.train_config(site.root, "run"), estimated.step.layout.ranks
        traced = estimates.trace(config, estimated.method.objective, ranks)
    tuning = Tuning(estimated.predictor) if tune else None
    price, cost = site.gpu_hour_price, None
    if price is not None:
        cost = estimated.hours * estimated.step.layout.ranks * price
    if as_json:
        shown = {"recipe": recipe.name, **estimated.as_json(), "cost": cost, "traced": traced}
        shown |= {"tuning": tuning.as_json()} if tuning else {}
        click.echo(json.dumps(shown, indent=1))
        return
    title = f"{recipe.name}: {recipe.description}" if recipe.description else recipe.name
    cost_text = "" if cost is None else f"{cost:,.2f} {site.currency or ''}".rstrip()
    click.echo("\n".join([title, *text.lines(estimated, traced, cost_text)]))
    if tuning:
        click.echo("\n" + "\n".join(tuning.lines()))
