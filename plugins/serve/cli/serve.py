"""cookbook serve"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as changed
from typing import Any

import click

from launcher import site as sites
from launcher.cli import common
from launcher.cli.common import note
from launcher.do import models
from launcher.errors import EndpointFault, UsageFault
from launcher.look.servers import tunnel
from launcher.run.directory import Run
from launcher.site import Site
from launcher.slurm.executors import choose, title
from plugins.serve import stats
from plugins.serve.cli.since import since_option
from plugins.serve.endpoint import reachable
from plugins.serve.launcher import endpoint as endpoints
from plugins.serve.launcher import gateway
from plugins.serve.launcher import maintain as maintenance
from plugins.serve.launcher import serve as workflow
from plugins.serve.launcher.endpoint import Deployment, Endpoint


@click.command()
@click.argument("given", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--name", metavar="NAME", help="Name of the endpoint. [default: the registered name]")
@click.option("--config", help="Name in configs/serve, or a path. [default: default]")
@click.option("--replicas", type=click.IntRange(min=1), help="Jobs, one copy each. [default: 1]")
@common.resource_options
@click.option(
    "--port", type=click.IntRange(1024, 65535), help="Port of the gateway. [default: a free one]"
)
@common.flag("--local", help="Serve on this host, without Slurm.")
@common.flag("--no-wait", help="Do not wait until it is ready, and start no gateway.")
@common.flag("--replace", help="Replace the running deployment of NAME without interruption.")
@click.option("--list", "listed", is_flag=True, help="List the endpoints.")
@click.option("--url", metavar="NAME", help="Print the URL of an endpoint.")
@click.option("--stop", metavar="NAME", help="Stop an endpoint's jobs and gateway.")
@click.option("--stats", metavar="NAME", help="Show latency, throughput, errors and tokens.")
@since_option("With --stats, requests since")
@click.option(
    "--keep", metavar="NAME", help="Maintain an endpoint: alias changes, time limits, ended jobs."
)
@common.flag("--once", help="With --keep: check once, as from cron.")
@common.json_option
@common.cluster_option
def serve(
    given: tuple[str, ...], listed: bool, as_json: bool, cluster: str | None, **options: Any
) -> None:
    """Serve MODEL (a run, a folder, or models:/NAME@ALIAS) with an OpenAI-compatible API, as a job.

    KEY=VALUE overrides a key of the configuration: engine=vllm, bind=node.
    """
    site = sites.load(cluster)
    asked = [name for name in _ACTIONS if options[name] is not None]
    if listed + len(asked) + bool(given) != 1:
        raise UsageFault(f"give MODEL, or one of {_NAMED}")
    if options["since"] is not None and options["stats"] is None:
        raise UsageFault("--since requires --stats: leave it out")
    if options["once"] and options["keep"] is None:
        raise UsageFault("--once requires --keep: leave it out")
    if not given and any(options[name] for name in (*_OF_A_MODEL, *_RESOURCES)):
        raise UsageFault(f"{_NAMED} accept no options for serving a MODEL: leave them out")
    if given:
        _serve_model(site, given[0], given[1:], options, as_json)
    elif listed:
        _list(site, as_json)
    for action in asked:
        endpoint = endpoints.find(site, options[action])
        _ACTIONS[action](site, endpoint, {**options, "as_json": as_json})


# What is done with an endpoint, by the option that names it.
_ACTIONS: dict[str, Callable[[Site, Endpoint, Mapping[str, Any]], None]] = {
    "url": lambda site, one, given: _print_url(one, given["as_json"]),
    "stop": lambda site, one, given: workflow.stop(site, one, note),
    "stats": lambda site, one, given: _stats(one, given["since"], given["as_json"]),
    "keep": lambda site, one, given: maintenance.maintain(site, one, note, given["once"]),
}
_NAMED = "--list, --url, --stop, --stats, --keep"
_RESOURCES = ("nodes", "gpus_per_node", "time", "partition", "account", "qos", "environment")
_OF_A_MODEL = ("name", "config", "replicas", "port", "local", "no_wait", "replace")


def _serve_model(
    site: Site, model: str, overrides: Sequence[str], options: Mapping[str, Any], as_json: bool
) -> None:
    """Submit what serves a model, start its gateway, and print its address."""
    if "=" in model and not model.startswith("models:/"):
        raise UsageFault(f"MODEL comes first, before {model}")
    name, config, replicas = (options[key] for key in ("name", "config", "replicas"))
    replace, no_wait = options["replace"], options["no_wait"]
    if replace and no_wait:
        raise UsageFault("--replace waits for the new deployment: leave --no-wait out")
    asked = Deployment(
        model,
        "",
        config or "default",
        overrides,
        {key: options[key] for key in _RESOURCES if options[key] is not None},
        choose(options["local"]).name,
        replicas or 1,
    )
    if replace:
        before = endpoints.find(site, _name(site, asked, name))
        asked = _as_before(before, asked, config, replicas)
    endpoint, runs = _start(site, asked, name, options["port"], replace)
    for run in runs:
        note(f"submitted {run.name} as {title(run.job_id)}")
    _wait(site, endpoint, runs, options["port"] or 0, no_wait, as_json)


def _name(site: Site, asked: Deployment, name: str | None) -> str:
    return workflow.name_of(models.resolve(site, asked.model), name)


def _as_before(
    endpoint: Endpoint, asked: Deployment, config: str | None, replicas: int | None
) -> Deployment:
    """Return what was asked for, with what it does not say as it is served now."""
    if not endpoint.deployments:
        return asked
    now = endpoint.deployments[-1]
    return changed(
        now,
        model=asked.model,
        config=config or now.config,
        overrides=[*now.overrides, *asked.overrides],
        resources={**now.resources, **asked.resources},
        executor=now.executor if asked.queued else asked.executor,
        replicas=asked.replicas if replicas else now.replicas,
        runs=(),
    )


def _start(
    site: Site, asked: Deployment, name: str | None, port: int | None, replace: bool
) -> tuple[Endpoint, Sequence[Run]]:
    chosen = Endpoint(site.root / "endpoints" / _name(site, asked, name))
    if port is not None:
        gateway.check_port(chosen, port)
    if replace:
        with chosen.alone(60):
            return chosen, workflow.replace(site, chosen, asked, note)
    return workflow.start(site, asked, name, note)


def _wait(
    site: Site,
    endpoint: Endpoint,
    runs: Sequence[Run],
    port: int,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Wait until the runs are ready, start the gateway, and print the address."""
    later = f"start its gateway when it is ready: cookbook serve --keep {endpoint.name} --once"
    if no_wait:
        answer = {"endpoint": endpoint.name, "runs": [run.name for run in runs]}
        click.echo(json.dumps(answer) if as_json else later)
        return
    try:
        workflow.await_ready(endpoint, runs, note)
    except KeyboardInterrupt:
        note(f"{', '.join(run.name for run in runs)} continues; {later}")
        raise
    if any(map(reachable, endpoint.servers)):
        gateway.start(endpoint, port)
        _print_url(endpoint, as_json)
        return
    facts = endpoint.servers[0]
    _print_url(endpoint, as_json, str(facts["url"]), str(facts["host"]))


def _print_url(endpoint: Endpoint, as_json: bool, url: str = "", node: str | None = None) -> None:
    """Print an address, by default the endpoint's; node: the only host that can reach it."""
    url = url or endpoint.url
    if as_json:
        answer = {"endpoint": endpoint.name, "url": f"{url}/v1", "key_file": str(endpoint.key_file)}
        click.echo(json.dumps(answer | ({"host": node} if node else {})))
        return
    click.echo(f"{url}/v1" + (f" on {node}" if node else ""))
    if node:
        remedy = "serve it with bind=node, which opens it to the cluster"
        note(f"  it has no gateway on this host: {remedy}")
    note(f"  key       {endpoint.key_file}")
    note(f"  laptop    {tunnel(int(url.rpartition(':')[2]), node)}")
    if not node:
        note(f'  try it    cookbook query {endpoint.name} "What is Slurm used for?"')


def _stats(endpoint: Endpoint, since: float | None, as_json: bool) -> None:
    figures = workflow.figures(endpoint, since)
    click.echo(json.dumps(figures, indent=1) if as_json else "\n".join(stats.lines(figures)))


def _list(site: Site, as_json: bool) -> None:
    rows = []
    for each in endpoints.every(site):
        try:
            url = each.url
        except EndpointFault:
            url = None
        servers = each.servers
        rows.append(
            {
                "endpoint": each.name,
                "model": ", ".join(deployment.model for deployment in each.deployments),
                "versions": sorted({str(r["version"]) for r in servers if r.get("version")}),
                "unlogged": sum(int(r.get("unlogged") or 0) for r in servers),
                "ready": sum(r["state"] == "ready" for r in servers),
                "replicas": max(
                    len(servers), sum(deployment.replicas for deployment in each.deployments)
                ),
                "url": url,
                "runs": [name for deployment in each.deployments for name in deployment.runs],
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        note("there is no endpoint yet; start one with: cookbook serve MODEL")
    for row in rows:
        served = ", ".join(row["versions"]) or row["model"]
        count = f"{row['ready']} of {row['replicas']} ready"
        click.echo(f"{row['endpoint']}  {served}  {count}  {row['url'] or 'not served'}")
        if row["unlogged"]:
            run = row["runs"][-1]
            note(f"  its log lacks {row['unlogged']:,} lines; see why: cookbook logs {run}")
