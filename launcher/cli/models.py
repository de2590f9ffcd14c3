"""cookbook models"""

import json
from collections.abc import Iterator
from typing import Any

import click

from launcher import paths, yamlfile
from launcher.errors import UsageFault, nearest


@click.command()
@click.argument("family", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
def models(family: str | None, as_json: bool) -> None:
    """List the families of models and what each can be trained with, or say why FAMILY cannot.

    These are models of the hub that a recipe names by their folder alone; a model of another family
    is tried, and refused with the reason. FAMILY may also be the model_type of a config.json.
    """
    known: dict[str, dict[str, Any]] = yamlfile.load(paths.FAMILIES)
    if family is not None:
        kinds = {row["model_type"]: name for name, row in reversed(known.items())}
        name = family if family in known else kinds.get(family)
        if name is None:
            hint = nearest(family, [*known, *kinds])
            raise UsageFault(
                f"no family {family!r}{hint} is proven: name its folder in a recipe, and "
                "cookbook check says what the trainer makes of it"
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
    yield "yes: the trainer takes it; docs/training.md says what tests prove"
    yield "-: cookbook models FAMILY says why not"


def _reasons(known: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, row in known.items():
        yield f"{name} ({row['model_type']} in config.json)"
        for key, value in row.items():
            if key != "model_type":
                yield f"  {key:<16}  {'yes' if value is True else value}"
