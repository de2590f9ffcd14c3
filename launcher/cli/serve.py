"""cookbook serve"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from launcher import paths, venv
from launcher import site as sites
from launcher.cli import common
from launcher.cli.common import note
from launcher.errors import EndpointFault, UsageFault
from launcher.executors import title
from launcher.observe.tensorboard import tunnel
from launcher.site import Site
from launcher.workflows import models
from launcher.workflows import serve as workflow
from launcher.workflows.serve import Endpoint


@click.command()
@click.argument("given", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--name", metavar="NAME", help="Of the endpoint. [default: the registered name]")
@click.option("--config", default="default", show_default=True, help="Of configs/serve, or a path.")
@click.option("--replicas", type=click.IntRange(min=1), help="Copies. [default: one per node]")
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
@click.option("--since", metavar="TIME", help="Of --stats: 90m, 12h, 3d, 2026-01-31.")
@click.option("--keep", metavar="NAME", help="Look after an endpoint: alias, time limit, death.")
@common.flag("--once", help="Of --keep: look once, as from cron.")
@common.json_option
@common.cluster_option
def serve(
    given: tuple[str, ...],
    name: str | None,
    config: str,
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
    if listed:
        _list(site, as_json)
    elif url is not None:
        _print_url(site, workflow.find(site, url), as_json)
    elif stopped is not None:
        workflow.stop(site, workflow.find(site, stopped), note)
    elif keep is not None:
        workflow.keep(site, workflow.find(site, keep), note, once)
    elif stats is not None:
        _stats(site, workflow.find(site, stats), since, as_json)
    else:
        model, overrides = given[0], list(given[1:])
        if "=" in model and not model.startswith("models:/"):
            raise UsageFault(f"MODEL comes first, before {model}")
        if replicas is not None:
            overrides.append(f"replicas={replicas}")
        _start(
            site, model, name, config, overrides, resources, local, no_wait, replace, share, port,
            as_json,
        )  # fmt: skip


def _start(
    site: Site,
    model: str,
    name: str | None,
    config: str,
    overrides: Sequence[str],
    resources: dict[str, Any],
    local: bool,
    no_wait: bool,
    replace: bool,
    share: float | None,
    port: int | None,
    as_json: bool,
) -> None:
    if replace:
        if share is not None or no_wait:
            raise UsageFault("--replace waits for the successor: leave --share and --no-wait out")
        known = models.resolve(site, model)
        endpoint = workflow.find(site, workflow.name_of(known, name))
        run = workflow.replace(site, endpoint, model, note)
    else:
        add = share is not None
        before = {}
        if add:
            known = models.resolve(site, model)
            endpoint = workflow.find(site, workflow.name_of(known, name))
            before = {str(each["version"]): 1.0 for each in endpoint.replicas if "version" in each}
            if known.name in before or not before:
                raise UsageFault(
                    f"--share needs another version than {', '.join(before) or 'none'}"
                )
            spread = {version: (1 - float(share or 0)) / len(before) for version in before}
            workflow.share(endpoint, {**spread, known.name: float(share or 0)})
        endpoint, run = workflow.start(
            site, model, name, config, overrides, resources, local, note, add
        )
    note(f"submitted {run.name} as {title(run.job_id)}")
    if not no_wait:
        workflow.await_ready(endpoint, run, 1e9 if not local else 1800, note)
        workflow.start_gateway(endpoint, port or 0)
        _print_url(site, endpoint, as_json)
    elif as_json:
        click.echo(json.dumps({"endpoint": endpoint.name, "run": run.name}))
    else:
        click.echo(f"its address, once it is ready: cookbook serve --url {endpoint.name}")


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
    for each in workflow.every(site):
        try:
            url = each.url
        except EndpointFault:
            url = None
        replicas = each.replicas
        rows.append(
            {
                "endpoint": each.name,
                "model": each.facts.get("model"),
                "versions": sorted({str(r["version"]) for r in replicas if r.get("version")}),
                "ready": sum(r["state"] == "ready" for r in replicas),
                "replicas": len(replicas),
                "url": url,
                "runs": each.facts.get("runs"),
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
    argv = [str(venv.python()), "-m", "serving.stats", str(endpoint.folder)]
    argv += ["--since", since] if since else []
    for run in _trained(site, endpoint):
        argv += ["--training-data", run]
    argv += ["--json"] if as_json else []
    done = subprocess.run(argv, cwd=paths.REPO_ROOT, env=venv.environment())
    sys.exit(done.returncode)


def _trained(site: Site, endpoint: Endpoint) -> list[str]:
    """Return the files that the served model was trained on."""
    from launcher.errors import CookbookError
    from launcher.workflows.evaluate import training_data

    try:
        model = models.resolve(site, str(endpoint.facts.get("model")))
    except CookbookError as error:
        note(f"warning: no drift is computed: {error.faults[0]}")
        return []
    return training_data(model.run) if model.run else []
