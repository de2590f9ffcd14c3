"""cookbook estimate"""

from __future__ import annotations

import json
from typing import Any

import click

from launcher import cluster as clusters
from launcher import estimate as estimates
from launcher import recipe as recipe_file
from launcher.cli.common import cluster_option


@click.command()
@click.argument("recipe_name", metavar="NAME")
@click.option("--gpu", metavar="KIND", help="h100-80, a100-40, l40s ...: see configs/gpus.yaml.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs on each node.")
@click.option(
    "--mfu",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=estimates.DEFAULT_MFU,
    show_default=True,
    help="Model FLOP utilisation that the time is worked out for.",
)
@click.option("--compare", is_flag=True, help="Full, LoRA and QLoRA on 1, 2, 4 and 8 nodes.")
@click.option("--scaling", is_flag=True, help="What ranks send, and layouts on 2 to 64 nodes.")
@click.option("--tune", is_flag=True, help="The fastest settings that fit, each with its change.")
@click.option(
    "--network",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GBITS",
    help="Gbit/s of each GPU between nodes, for --scaling and --tune. "
    "[default: the cluster's, or the GPU's]",
)
@click.option("--trace", is_flag=True, help="Also run the step on fake tensors: up to a minute.")
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
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
    """Compute what a recipe would need of each GPU, and what to change where it does not fit.

    Nothing is measured, nothing is started and no GPU is needed.
    """
    recipe = recipe_file.load(recipe_name, overrides, resources)
    site = clusters.load(cluster)
    report = estimates.Report.of(recipe, site.root, gpu, mfu, compare, trace)
    parts: dict[str, Any] = {}
    # Imported late: the estimate alone stays as quick as it was.
    if scaling:
        from launcher.scaling import Scaling

        parts["scaling"] = Scaling(report, network or site.network_gbits)
    if tune:
        from launcher.tuning import Tuning

        parts["tuning"] = Tuning(report, network or site.network_gbits)
    if as_json:
        found = report.as_json() | {name: part.as_json() for name, part in parts.items()}
        click.echo(json.dumps(found, indent=1))
    else:
        texts = (report, *parts.values())
        click.echo("\n\n".join("\n".join(text.lines()) for text in texts))
