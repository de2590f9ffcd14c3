"""cookbook models"""

import json
from collections.abc import Iterator
from typing import Any

import click

from launcher import paths, yamlfile
from launcher.errors import UsageFault, nearest


@click.command()
@click.argument("family", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(family: str | None, as_json: bool) -> None:
    """List the model families and what the trainer supports for each, or explain FAMILY.

    The list covers Hub models that a recipe names only by their folder. The trainer tries a model
    of another family, and refuses it with the reason if it cannot train it. FAMILY may also be
    the model_type of a config.json.
    """
    known: dict[str, dict[str, Any]] = yamlfile.load(paths.FAMILIES)
    if family is not None:
        kinds = {row["model_type"]: name for name, row in reversed(known.items())}
        name = family if family in known else kinds.get(family)
        if name is None:
            hint = nearest(family, [*known, *kinds])
            raise UsageFault(
                f"no family {family!r}{hint} is tested: name its folder in a recipe, and see "
                "what the trainer reports with cookbook check"
            )
        known = {name: known[name]}
    if as_json:
        click.echo(json.dumps(known, indent=1))
    else:
        click.echo("\n".join(_table(known) if family is None else _reasons(known)))


def _table(known: dict[str, dict[str, Any]]) -> Iterator[str]:
    columns = [key for key in next(iter(known.values())) if key != "model_type"]
    widths = [max(map(len, known)), max(len(row["model_type"]) for row in known.values())]
    heads = [column.replace("_parallel", "").upper() for column in columns]
    yield "  ".join([f"{'FAMILY':<{widths[0]}}", f"{'MODEL TYPE':<{widths[1]}}", *heads])
    for name, row in known.items():
        cells = [
            f"{'yes' if row[column] is True else '-':<{len(head)}}"
            for column, head in zip(columns, heads, strict=True)
        ]
        told = [f"{name:<{widths[0]}}", f"{row['model_type']:<{widths[1]}}", *cells]
        yield "  ".join(told).rstrip()
    yield "yes: the trainer supports it; docs/models.md lists what the tests prove"
    yield "-: cookbook models FAMILY shows the reason"


def _reasons(known: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, row in known.items():
        yield f"{name} ({row['model_type']} in config.json)"
        for key, value in row.items():
            if key != "model_type":
                yield f"  {key:<16}  {'yes' if value is True else value}"
