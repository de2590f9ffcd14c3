"""cookbook serve"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

import click

from launcher import paths, venv
from launcher import site as sites
from launcher.cli import common
from launcher.cli.common import note
from launcher.errors import EndpointFault, UsageFault
from launcher.executors import title
from launcher.observe.tensorboard import tunnel
from launcher.runs.directory import Run
from launcher.site import Site
from launcher.workflows import endpoint as endpoints
from launcher.workflows import keep as keeping
from launcher.workflows import models
from launcher.workflows import serve as workflow
from launcher.workflows import stats as statistics
from launcher.workflows.endpoint import Endpoint, Served
from runspec.endpoint import reachable


@click.command()
@click.argument("given", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--name", metavar="NAME", help="Of the endpoint. [default: the registered name]")
@click.option("--config", help="Of configs/serve, or a path. [default: default]")
@click.option("--replicas", type=click.IntRange(min=1), help="Jobs, each a copy. [default: 1]")
@common.resource_options
@click.option("--port", type=click.IntRange(1024, 65535), help="Of the gateway. [default: free]")
@common.flag("--local", help="Serve on this host, without Slurm.")
@common.flag("--no-wait", help="Do not wait until it is ready, and start no gateway.")
@common.flag("--replace", help="Take the place of what serves NAME now, without a gap.")
@click.option("--share", type=click.FloatRange(0, 1), help="Serve it beside, for this share.")
@click.option("--list", "listed", is_flag=True, help="List the endpoints.")
@click.option("--url", "url", metavar="NAME", help="Print the address of an endpoint.")
@click.option("--stop", "stopped", metavar="NAME", help="End an endpoint's jobs and gateway.")
@click.option("--stats", metavar="NAME", help="Latency, throughput, errors, tokens and drift.")
@common.since_option("Of --stats, requests since")
@click.option("--keep", metavar="NAME", help="Look after an endpoint: alias, time limit, death.")
@common.flag("--once", help="Of --keep: look once, as from cron.")
@common.json_option
@common.cluster_option
def serve(
    given: tuple[str, ...],
    name: str | None,
    config: str | None,
    replicas: int | None,
    port: int | None,
    local: bool,
    no_wait: bool,
    replace: bool,
    share: float | None,
    listed: bool,
    url: str | None,
    stopped: str | None,
    stats: str | None,
    since: str | None,
    keep: str | None,
    once: bool,
    as_json: bool,
    cluster: str | None,
    **resources: Any,
) -> None:
    """Serve MODEL under OpenAI's protocol, as a Slurm job: a run, a folder, or models:/NAME@ALIAS.

    KEY=VALUE replaces a key of the configuration: engine=vllm, rate_per_s=20, bind=node.
    """
    site = sites.load(cluster)
    actions = [listed, url is not None, stopped is not None, stats is not None, keep is not None]
    if sum(actions) + bool(given) != 1:
        raise UsageFault("give MODEL, or one of --list, --url, --stop, --stats and --keep")
    if since and stats is None:
        raise UsageFault("--since belongs to --stats: leave it out")
    if once and keep is None:
        raise UsageFault("--once belongs to --keep: leave it out")
    if not given:
        _only_a_model(name, config, replicas, port, local, no_wait, replace, share, **resources)
    if listed:
        _list(site, as_json)
    elif url is not None:
        _print_url(site, endpoints.find(site, url), as_json)
    elif stopped is not None:
        workflow.stop(site, endpoints.find(site, stopped), note)
    elif keep is not None:
        keeping.keep(site, endpoints.find(site, keep), note, once)
    elif stats is not None:
        _stats(site, endpoints.find(site, stats), since, as_json)
    else:
        if "=" in given[0] and not given[0].startswith("models:/"):
            raise UsageFault(f"MODEL comes first, before {given[0]}")
        if replace and (share is not None or no_wait):
            raise UsageFault("--replace waits for the successor: leave --share and --no-wait out")
        known = {key: value for key, value in resources.items() if value is not None}
        asked = Served(given[0], "", config or "default", given[1:], known, local, replicas or 1)
        if replace:
            endpoint = endpoints.find(site, _name(site, asked, name))
            asked = _as_before(endpoint, asked, config, replicas)
        endpoint, runs = _start(site, asked, name, port, replace, share)
        for run in runs:
            note(f"submitted {run.name} as {title(run.job_id)}")
        _wait(site, endpoint, runs, port or 0, no_wait, as_json)


def _only_a_model(*given: Any, **resources: Any) -> None:
    """Raise UsageFault for an option that says how a MODEL is served, without a MODEL."""
    if any(given) or any(resources.values()):
        raise UsageFault(
            "--list, --url, --stop, --stats and --keep take no option that says how a MODEL is "
            "served: leave it out"
        )


def _name(site: Site, asked: Served, name: str | None) -> str:
    return workflow.name_of(models.resolve(site, asked.model), name)


def _as_before(
    endpoint: Endpoint, asked: Served, config: str | None, replicas: int | None
) -> Served:
    """Return what was asked for, with what it does not say as it is served now."""
    if not endpoint.served:
        return asked
    now = endpoint.served[-1]
    return changed(
        now,
        model=asked.model,
        config=config or now.config,
        overrides=[*now.overrides, *asked.overrides],
        resources={**now.resources, **asked.resources},
        local=asked.local or now.local,
        replicas=replicas or now.replicas,
        runs=(),
    )


def _start(
    site: Site,
    asked: Served,
    name: str | None,
    port: int | None,
    replace: bool,
    share: float | None,
) -> tuple[Endpoint, Sequence[Run]]:
    chosen = Endpoint(site.root / "endpoints" / _name(site, asked, name))
    if port is not None:
        workflow.check_port(chosen, port)
    if replace:
        return chosen, workflow.replace(site, chosen, asked, note)
    if share is None:
        return workflow.start(site, asked, name, note)
    endpoint = endpoints.find(site, chosen.name)
    version = models.resolve(site, asked.model).name
    before = list(dict.fromkeys(each.version for each in endpoint.served))
    if version in before or not before:
        raise UsageFault(f"--share needs another version than {', '.join(before) or 'none'}")
    made = workflow.start(site, asked, name, note, add=True)
    spread = {each: (1 - share) / len(before) for each in before}
    workflow.share(endpoint, {**spread, version: share})
    return made


def _wait(
    site: Site,
    endpoint: Endpoint,
    runs: Sequence[Run],
    port: int,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Wait until the runs are ready, start the gateway, and print the address."""
    later = f"its gateway, once it is ready: cookbook serve --keep {endpoint.name} --once"
    if no_wait:
        told = {"endpoint": endpoint.name, "runs": [run.name for run in runs]}
        click.echo(json.dumps(told) if as_json else later)
        return
    try:
        workflow.await_ready(endpoint, runs, note)
    except KeyboardInterrupt:
        note(f"{', '.join(run.name for run in runs)} goes on; {later}")
        raise
    if any(map(reachable, endpoint.replicas)):
        workflow.start_gateway(endpoint, port)
        _print_url(site, endpoint, as_json)
        return
    facts = endpoint.replicas[0]
    number = int(str(facts["url"]).rpartition(":")[2])
    told = {"endpoint": endpoint.name, "url": f"{facts['url']}/v1", "host": facts["host"]}
    if as_json:
        click.echo(json.dumps({**told, "key_file": str(endpoint.key_file)}))
        return
    click.echo(f"{facts['url']}/v1 on {facts['host']}")
    note("  it has no gateway here: serve it with bind=node, which opens it to the cluster")
    note(f"  key       {endpoint.key_file}")
    note(f"  at home   {tunnel(number, site.jump_host, str(facts['host']))}")


def _print_url(site: Site, endpoint: Endpoint, as_json: bool) -> None:
    url = endpoint.url
    if as_json:
        told = {"endpoint": endpoint.name, "url": f"{url}/v1", "key_file": str(endpoint.key_file)}
        click.echo(json.dumps(told))
        return
    click.echo(f"{url}/v1")
    note(f"  key       {endpoint.key_file}")
    note(f"  at home   {tunnel(int(url.rpartition(':')[2]), site.jump_host)}")
    note(f'  try it    cookbook query {endpoint.name} "What is Slurm used for?"')


def _list(site: Site, as_json: bool) -> None:
    rows = []
    for each in endpoints.every(site):
        try:
            url = each.url
        except EndpointFault:
            url = None
        replicas = each.replicas
        rows.append(
            {
                "endpoint": each.name,
                "model": ", ".join(served.model for served in each.served),
                "versions": sorted({str(r["version"]) for r in replicas if r.get("version")}),
                "ready": sum(r["state"] == "ready" for r in replicas),
                "replicas": max(len(replicas), sum(served.replicas for served in each.served)),
                "url": url,
                "runs": [name for served in each.served for name in served.runs],
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        note("no endpoint yet: start one with: cookbook serve MODEL")
    for row in rows:
        served = ", ".join(row["versions"]) or row["model"]
        words = f"{row['ready']} of {row['replicas']} ready"
        click.echo(f"{row['endpoint']}  {served}  {words}  {row['url'] or 'not served'}")


def _stats(site: Site, endpoint: Endpoint, since: str | None, as_json: bool) -> None:
    argv = statistics.command(site, endpoint, since, note)
    argv += ["--json"] if as_json else []
    done = subprocess.run(argv, cwd=paths.REPO_ROOT, env=venv.environment())
    sys.exit(done.returncode)
