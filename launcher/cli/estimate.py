"""cookbook estimate"""

from __future__ import annotations

import json
from typing import Any

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, recipe_arguments
from launcher.recipes import recipe as recipe_file
from launcher.sizing import estimate_text
from launcher.sizing.estimate import DEFAULT_MFU, Estimate


@click.command()
@recipe_arguments
@click.option("--gpu", metavar="KIND", help="h100-80, a100-40, l40s ...: see configs/gpus.yaml.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs on each node.")
@click.option(
    "--mfu",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=DEFAULT_MFU,
    show_default=True,
    help="Model FLOP utilisation of the recipe's step while no GPU waits for another: model FLOPs "
    "/ time / peak, without recomputation. --scaling, --tune and --compare add what is waited.",
)
@click.option("--compare", is_flag=True, help="Full, LoRA and QLoRA on 1, 2, 4 and 8 nodes.")
@click.option("--scaling", is_flag=True, help="What ranks send, and layouts on 2 to 64 nodes.")
@click.option("--tune", is_flag=True, help="The fastest settings that fit, each with its change.")
@click.option(
    "--network",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GBITS",
    help="Gbit/s per GPU between nodes, for --scaling, --tune and --compare. "
    "[default: the cluster's, or the GPU's]",
)
@click.option("--trace", is_flag=True, help="Also run the step on fake tensors: up to a minute.")
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
def estimate(
    recipe_name: str,
    gpu: str | None,
    mfu: float,
    compare: bool,
    scaling: bool,
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
    recipe = recipe_file.load(recipe_name, overrides, resources)
    site = sites.load(cluster)
    network = network or site.network_gbits
    found = Estimate(recipe, site.root, gpu, mfu, network, compares=compare, traces=trace)
    parts: dict[str, Any] = {}
    if scaling or tune:
        # Imported late: the estimate alone stays quick.
        from launcher.sizing import predictions

        parts |= {"scaling": predictions.Scaling(found.predictor)} if scaling else {}
        parts |= {"tuning": predictions.Tuning(found.predictor)} if tune else {}
    if as_json:
        shown = found.as_json() | {name: part.as_json() for name, part in parts.items()}
        click.echo(json.dumps(shown, indent=1))
    else:
        texts = (estimate_text.lines(found), *(part.lines() for part in parts.values()))
        click.echo("\n\n".join("\n".join(lines) for lines in texts))
