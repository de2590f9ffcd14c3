"""cookbook register, promote and registry"""

import json
from datetime import UTC, datetime

import click

from launcher import paths, yamlfile
from launcher import site as sites
from launcher.cli.common import cluster_option, flag, json_option, note
from launcher.do import models
from launcher.errors import UsageFault
from launcher.look.text import plain
from plugins.registry.launcher import promote as workflow
from plugins.registry.launcher import registry as registered
from plugins.registry.launcher import store as stores

_ALIAS = click.Choice(registered.ALIASES)


@click.command()
@click.argument("model")
@click.option("--as", "name", required=True, metavar="NAME", help="Name in the registry.")
@flag("--copy", help="Copy the weights. [default: refer to their folder]")
@json_option
@cluster_option
def register(model: str, name: str, copy: bool, as_json: bool, cluster: str | None) -> None:
    """Register MODEL (a run or a model folder) as the next version of NAME, its candidate."""
    site = sites.load(cluster)
    made = workflow.register(site, models.resolve(site, model), name, copy)
    if as_json:
        click.echo(json.dumps(_row(made), indent=1))
    else:
        click.echo(f"registered {made.name} v{made.number} ({made.folder}), alias candidate")
        click.echo(f"  promote it  cookbook promote {made.name} --to champion --why TEXT")


@click.command()
@click.argument("name")
@click.option("--to", "alias", type=_ALIAS, help="Alias to assign.")
@click.option(
    "--version", "number", type=click.IntRange(min=1), help="Version. [default: the candidate]"
)
@click.option(
    "--gates",
    "rules",
    metavar="NAME|FILE|none",
    help="NAME's gates from now on; none: no gate, this once. [default: those that it has]",
)
@click.option(
    "--rollback", "back", type=_ALIAS, help="Move this alias back to its previous version."
)
@click.option("--why", metavar="TEXT", help="Reason, for the history.")
@json_option
@cluster_option
def promote(
    name: str,
    alias: str | None,
    number: int | None,
    rules: str | None,
    back: str | None,
    why: str | None,
    as_json: bool,
    cluster: str | None,
) -> None:
    """Assign an alias of NAME to a version that passes the gates, or show which gates failed."""
    site = sites.load(cluster)
    if (alias is None) == (back is None):
        raise UsageFault("give one of --to ALIAS and --rollback ALIAS")
    if back is not None:
        if number is not None:
            raise UsageFault(
                "--rollback does not accept --version: it moves back to the previous version"
            )
        before, now = workflow.rollback(site, name, back, why)
        message = f"{back} of {name} is v{now.number} again, was v{before}"
        for line in workflow.still_served(site, name, back, before):
            note(line)
    else:
        without = rules == "none"
        file = None
        if rules and not without:
            file = yamlfile.find("gates file", rules, paths.GATES)
        now = workflow.promote(site, name, str(alias), number, file, why, note, without)
        message = f"{alias} of {name} is v{now.number}"
    click.echo(json.dumps(_row(now), indent=1) if as_json else message)


@click.command()
@click.argument("name", required=False)
@json_option
@cluster_option
def registry(name: str | None, as_json: bool, cluster: str | None) -> None:
    """List the registered models, or the versions and the history of NAME."""
    site = sites.load(cluster)
    store = stores.at(site.root, site.tracking)
    with stores.client(store, write=False) as client:
        if name is None:
            known = {each: registered.aliases_of(client, each) for each in registered.names(client)}
            if as_json:
                click.echo(json.dumps(known, indent=1))
                return
            for one, aliases in known.items():
                listed = ", ".join(f"{alias} v{number}" for alias, number in aliases.items())
                click.echo(f"{one}  {listed}")
            if not known:
                note(
                    "no model is registered yet; register one with: cookbook register RUN --as NAME"
                )
            return
        if name not in registered.names(client):
            registered.version(client, name, "candidate")
        versions = registered.versions(client, name)
    changes, own = registered.history(store, name), registered.gates_of(store, name)
    rules = own[0] if own else "default"
    if as_json:
        rows = [_row(each) for each in versions]
        answer = {"versions": rows, "gates": rules, "history": changes}
        click.echo(json.dumps(answer, indent=1))
        return
    for each in versions:
        named = f"  [{', '.join(each.aliases)}]" if each.aliases else ""
        click.echo(f"v{each.number}{named}  {_time(each.created)}  {each.folder}")
        shown = ("run", "job_id", "gpu_hours", "commit", "data_sha256")
        facts = [f"{key} {str(each.tags[key])[:40]}" for key in shown if each.tags.get(key)]
        facts += [f"{k[5:]} {v}" for k, v in sorted(each.tags.items()) if k.startswith("eval.")]
        if facts:
            click.echo(plain(f"    {'; '.join(facts)}"))
    click.echo(plain(f"gates  {rules}"))
    click.echo("history")
    for line in changes:
        before = f", was v{line['before']}" if line.get("before") else ""
        why = f": {line['why']}" if line.get("why") else ""
        by = "".join(f", evaluated by {run}" for run in line.get("evaluations") or [])
        by += f", gates {line['gates']}" if line.get("gates") else ""
        what = f" v{line['version']}" if line.get("version") else ""
        text = f"{line['user']}  {line['change']}{what}{before}{by}{why}"
        click.echo(plain(f"  {_time(float(line['time']))}  {text}"))


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _row(version: registered.Version) -> dict[str, object]:
    return {
        "name": version.name,
        "version": version.number,
        "aliases": list(version.aliases),
        "folder": str(version.folder),
        "uri": f"models:/{version.name}/{version.number}",
        "tags": dict(version.tags),
    }
