"""cookbook models"""

from collections.abc import Iterator, Mapping

import click

from launcher.errors import UsageFault, nearest
from plugins.estimate.launcher.shapes import families, support

Rows = Mapping[str, Mapping[str, bool | str]]


@click.command()
@click.argument("family", required=False)
def models(family: str | None) -> None:
    """List the model families and what the trainer supports for each, or explain FAMILY.

    FAMILY is the model_type in a model's config.json. The list covers Hub models that a recipe
    names only by their folder; it is computed from the descriptions in configs/descriptions. The
    trainer tries a model of another family, and refuses it with the reason if it cannot train it.
    """
    known: Rows = {name: support(shape) for name, shape in families().items()}
    if family is not None:
        # As their text part is called.
        name = family if family in known else f"{family}_text"
        if name not in known:
            raise UsageFault(
                f"no family {family!r}{nearest(family, known)} is described: name its folder in a "
                "recipe, and see what the trainer reports with cookbook check"
            )
        known = {name: known[name]}
    click.echo("\n".join(_table(known) if family is None else _reasons(known)))


def _table(known: Rows) -> Iterator[str]:
    columns, width = [*next(iter(known.values()))], max(map(len, known))
    heads = [column.replace("_parallel", "").upper() for column in columns]
    yield "  ".join([f"{'MODEL TYPE':<{width}}", *heads])
    for name, row in known.items():
        cells = [
            f"{'yes' if row[column] is True else '-':<{len(head)}}"
            for column, head in zip(columns, heads, strict=True)
        ]
        yield "  ".join([f"{name:<{width}}", *cells]).rstrip()
    yield "yes: the trainer supports it; docs/models.md lists what the tests prove"
    yield "-: cookbook models MODEL_TYPE shows the reason"


def _reasons(known: Rows) -> Iterator[str]:
    for name, row in known.items():
        yield name
        for key, value in row.items():
            yield f"  {key:<16}  {'yes' if value is True else value}"
