"""cookbook serve"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any
from urllib.parse import urlsplit

import click

from launcher import paths, venv
from launcher import site as sites
from launcher.cli import common, completion
from launcher.cli.common import note
from launcher.cli.number import FloatRange, IntRange
from launcher.errors import EndpointFault, UsageFault
from launcher.executors import choose, title
from launcher.observe.servers import listening, tunnel
from launcher.runs.directory import Run
from launcher.site import Site
from launcher.workflows import endpoint as endpoints
from launcher.workflows import keep as keeping
from launcher.workflows import keys as access
from launcher.workflows import models
from launcher.workflows import scale as scaling
from launcher.workflows import serve as workflow
from launcher.workflows import stats as statistics
from launcher.workflows.endpoint import Endpoint, Served
from runspec.endpoint import reachable


@click.command()
@click.argument("given", nargs=-1, metavar="[MODEL] [KEY=VALUE]...", shell_complete=completion.runs)
@click.option("--name", metavar="NAME", help="Name of the endpoint. [default: the registered name]")
@click.option("--config", help="Name in configs/serve, or a path. [default: default]")
@click.option(
    "--replicas", metavar="N|MIN-MAX", help="Jobs, one copy each; MIN-MAX: by load. [default: 1]"
)
@common.resource_options
@click.option(
    "--port", type=IntRange(1024, 65535), help="Port of the gateway. [default: a free one]"
)
@common.flag("--local", help="Serve on this host, without Slurm.")
@common.flag("--no-wait", help="Do not wait until it is ready, and start no gateway.")
@common.flag("--replace", help="Replace the running deployment of NAME without interruption.")
@click.option(
    "--share",
    type=FloatRange(0, 1),
    help="Add it to the running versions, with this share of the requests.",
)
@click.option("--list", "listed", is_flag=True, help="List the endpoints.")
@click.option("--url", "url", metavar="NAME", help="Print the URL of an endpoint.")
@click.option("--stop", "stopped", metavar="NAME", help="Stop an endpoint's jobs and gateway.")
@click.option("--stats", metavar="NAME", help="Show latency, throughput, errors, tokens and drift.")
@common.since_option("With --stats, requests since")
@click.option(
    "--keep", metavar="NAME", help="Maintain an endpoint: alias changes, time limits, ended jobs."
)
@common.flag("--once", help="With --keep: check once, as from cron.")
@click.option("--keys", metavar="NAME", help="List the users of an endpoint, with their limits.")
@click.option("--add-key", metavar="NAME", help="Create an API key for --user, and print it once.")
@click.option("--set-limits", metavar="NAME", help="Change the limits of --user; 0: no limit.")
@click.option("--revoke-key", metavar="NAME", help="Revoke the API key of --user.")
@click.option("--user", metavar="USER", help="User of these three.")
@click.option("--requests-per-day", type=IntRange(min=0), help="Limit of --user per UTC day.")
@click.option("--tokens-per-day", type=IntRange(min=0), help="Limit of --user per UTC day.")
@click.option("--adjust", metavar="NAME", hidden=True, help="Submit and end jobs by the load.")
@common.json_option
@common.cluster_option
def serve(
    given: tuple[str, ...],
    name: str | None,
    config: str | None,
    replicas: str | None,
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
    keys: str | None,
    add_key: str | None,
    set_limits: str | None,
    revoke_key: str | None,
    user: str | None,
    requests_per_day: int | None,
    tokens_per_day: int | None,
    adjust: str | None,
    as_json: bool,
    cluster: str | None,
    **resources: Any,
) -> None:
    """Serve MODEL (a run, a folder, or models:/NAME@ALIAS) with an OpenAI-compatible API, as a job.

    KEY=VALUE overrides a key of the configuration: engine=vllm, rate_per_s=20, bind=node.
    """
    site = sites.load(cluster)
    of_user = [each for each in (add_key, set_limits, revoke_key) if each is not None]
    named = (url, stopped, stats, keep, keys, *of_user, adjust)
    if listed + sum(each is not None for each in named) + bool(given) != 1:
        raise UsageFault(f"give MODEL, or one of {_ACTIONS}")
    if (user is None) != (not of_user):
        raise UsageFault(
            "--add-key, --set-limits and --revoke-key require --user USER; no other option uses it"
        )
    limits = {"requests_per_day": requests_per_day, "tokens_per_day": tokens_per_day}
    limits = {key: value or None for key, value in limits.items() if value is not None}
    if bool(limits) > bool(add_key or set_limits) or (set_limits and not limits):
        raise UsageFault(
            "--requests-per-day and --tokens-per-day are for --add-key and --set-limits, which "
            "needs one of them"
        )
    if since and stats is None:
        raise UsageFault("--since requires --stats: leave it out")
    if once and keep is None:
        raise UsageFault("--once requires --keep: leave it out")
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
    elif adjust is not None:
        scaling.adjust(site, endpoints.find(site, adjust), note)
    elif keys is not None:
        _list_keys(endpoints.find(site, keys), as_json)
    elif add_key is not None and user is not None:
        key = access.add(endpoints.find(site, add_key), user, limits)
        click.echo(json.dumps({"user": user, "key": key}) if as_json else key)
        note(f"  the key of {user} is not shown again")
    elif set_limits is not None and user is not None:
        access.limit(endpoints.find(site, set_limits), user, limits)
        _list_keys(endpoints.find(site, set_limits), as_json)
    elif revoke_key is not None and user is not None:
        access.revoke(endpoints.find(site, revoke_key), user)
        note(f"the key of {user} is revoked")
    elif stats is not None:
        _stats(site, endpoints.find(site, stats), since, as_json)
    else:
        if "=" in given[0] and not given[0].startswith("models:/"):
            raise UsageFault(f"MODEL comes first, before {given[0]}")
        if replace and (share is not None or no_wait):
            raise UsageFault(
                "--replace waits for the new deployment: leave --share and --no-wait out"
            )
        known = {key: value for key, value in resources.items() if value is not None}
        least, most = _range(replicas or "1")
        asked = Served(
            given[0], "", config or "default", given[1:], known, choose(local).name, least
        )
        asked = changed(asked, max_replicas=most)
        if replace:
            endpoint = endpoints.find(site, _name(site, asked, name))
            asked = _as_before(endpoint, asked, config, replicas)
        endpoint, runs = _start(site, asked, name, port, replace, share)
        for run in runs:
            note(f"submitted {run.name} as {title(run.job_id)}")
        _wait(site, endpoint, runs, port or 0, no_wait, as_json)


_ACTIONS = "--list, --url, --stop, --stats, --keep, --keys, --add-key, --set-limits, --revoke-key"


def _only_a_model(*given: Any, **resources: Any) -> None:
    """Raise UsageFault for an option that says how a MODEL is served, without a MODEL."""
    if any(given) or any(resources.values()):
        raise UsageFault(f"{_ACTIONS} accept no options for serving a MODEL: leave them out")


def _range(text: str) -> tuple[int, int | None]:
    """Return the least and the most replicas of N or MIN-MAX."""
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    if match is None or (match[2] is None and int(match[1]) < 1):
        raise UsageFault(f"--replicas {text}: give a number of 1 or more, or a range such as 0-4")
    least, most = int(match[1]), None if match[2] is None else int(match[2])
    if most is not None and (most < 1 or most < least):
        raise UsageFault(f"--replicas {text}: the second number must be 1 or more, and the larger")
    return least, most


def _name(site: Site, asked: Served, name: str | None) -> str:
    return workflow.name_of(models.resolve(site, asked.model), name)


def _as_before(
    endpoint: Endpoint, asked: Served, config: str | None, replicas: str | None
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
        executor=now.executor if asked.queued else asked.executor,
        replicas=asked.replicas if replicas else now.replicas,
        max_replicas=asked.max_replicas if replicas else now.max_replicas,
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
        with chosen.alone(60):
            return chosen, workflow.replace(site, chosen, asked, note)
    if share is None:
        return workflow.start(site, asked, name, note)
    endpoint = endpoints.find(site, chosen.name)
    version = models.resolve(site, asked.model).name
    before = list(dict.fromkeys(each.version for each in endpoint.served))
    if version in before or not before:
        raise UsageFault(f"--share needs a version other than {', '.join(before) or 'none'}")
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
    scaled = any(each.max_replicas is not None for each in endpoint.served)
    if scaled or any(map(reachable, endpoint.replicas)):
        workflow.start_gateway(site, endpoint, port)
        _print_url(site, endpoint, as_json)
        return
    facts = endpoint.replicas[0]
    number = int(str(facts["url"]).rpartition(":")[2])
    answer = {"endpoint": endpoint.name, "url": f"{facts['url']}/v1", "host": facts["host"]}
    if as_json:
        click.echo(json.dumps({**answer, "key_file": str(endpoint.key_file)}))
        return
    click.echo(f"{facts['url']}/v1 on {facts['host']}")
    note("  it has no gateway on this host: serve it with bind=node, which opens it to the cluster")
    note(f"  key       {endpoint.key_file}")
    note(f"  at home   {tunnel(number, site.jump_host, str(facts['host']))}")


def _print_url(site: Site, endpoint: Endpoint, as_json: bool) -> None:
    url = endpoint.url
    if as_json:
        answer = {"endpoint": endpoint.name, "url": f"{url}/v1", "key_file": str(endpoint.key_file)}
        click.echo(json.dumps(answer))
        return
    click.echo(f"{url}/v1")
    note(f"  key       {endpoint.key_file}")
    host, port = urlsplit(url).hostname, int(url.rpartition(":")[2])
    if not listening(host or "127.0.0.1", port, "/v1"):
        note(f"  at home   {tunnel(port, site.jump_host)}")
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
                "unlogged": sum(int(r.get("unlogged") or 0) for r in replicas),
                "ready": sum(r["state"] == "ready" for r in replicas),
                "replicas": max(len(replicas), sum(served.replicas for served in each.served)),
                "max_replicas": sum(s.max_replicas or s.replicas for s in each.served),
                "url": url,
                "runs": [name for served in each.served for name in served.runs],
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        note("there is no endpoint yet; start one with: cookbook serve MODEL")
    for row in rows:
        served = ", ".join(row["versions"]) or row["model"]
        most = row["max_replicas"]
        of = f"{row['replicas']}" if most <= row["replicas"] else f"up to {most}"
        count = f"{row['ready']} of {of} ready"
        click.echo(f"{row['endpoint']}  {served}  {count}  {row['url'] or 'not served'}")
        if row["unlogged"]:
            run = row["runs"][-1]
            note(f"  its log lacks {row['unlogged']:,} lines; see why: cookbook logs {run}")


def _list_keys(endpoint: Endpoint, as_json: bool) -> None:
    rows = access.rows(endpoint)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        note(
            f"there is no user yet; add one with: cookbook serve --add-key {endpoint.name} "
            "--user USER"
        )
    for row in rows:
        counts = []
        for kind in ("requests", "tokens"):
            limit = row.get(f"{kind}_per_day")
            of = "" if limit is None else f" of {limit:,}"
            counts.append(f"{row[kind]:,}{of} {kind} today")
        state = "valid" if row.get("revoked") is None else "revoked"
        click.echo(f"{row['user']}  {state}  {', '.join(counts)}")


def _stats(site: Site, endpoint: Endpoint, since: str | None, as_json: bool) -> None:
    argv = statistics.command(site, endpoint, since, note)
    argv += ["--json"] if as_json else []
    done = subprocess.run(argv, cwd=paths.REPO_ROOT, env=venv.environment())
    sys.exit(done.returncode)
