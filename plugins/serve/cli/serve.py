"""cookbook serve"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace as changed
from typing import Any
from urllib.parse import urlsplit

import click

from launcher import site as sites
from launcher.cli import common, completion
from launcher.cli.common import note
from launcher.cli.number import FloatRange, IntRange
from launcher.do import models
from launcher.errors import EndpointFault, UsageFault
from launcher.look.servers import listening, tunnel
from launcher.run.directory import Run
from launcher.site import Site
from launcher.slurm.executors import choose, title
from plugins.serve.endpoint import reachable
from plugins.serve.launcher import endpoint as endpoints
from plugins.serve.launcher import gateway
from plugins.serve.launcher import keys as access
from plugins.serve.launcher import maintain as maintenance
from plugins.serve.launcher import scale as scaling
from plugins.serve.launcher import serve as workflow
from plugins.serve.launcher.endpoint import Deployment, Endpoint


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
@click.option("--url", metavar="NAME", help="Print the URL of an endpoint.")
@click.option("--stop", metavar="NAME", help="Stop an endpoint's jobs and gateway.")
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
    given: tuple[str, ...], listed: bool, as_json: bool, cluster: str | None, **options: Any
) -> None:
    """Serve MODEL (a run, a folder, or models:/NAME@ALIAS) with an OpenAI-compatible API, as a job.

    KEY=VALUE overrides a key of the configuration: engine=vllm, rate_per_s=20, bind=node.
    """
    site = sites.load(cluster)
    asked = [name for name in _ACTIONS if options[name] is not None]
    if listed + len(asked) + bool(given) != 1:
        raise UsageFault(f"give MODEL, or one of {_NAMED}")
    limits = {key: options[key] for key in ("requests_per_day", "tokens_per_day")}
    limits = {key: value or None for key, value in limits.items() if value is not None}
    _check_user(asked, options["user"], limits)
    if options["since"] and options["stats"] is None:
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
        _ACTIONS[action](site, endpoint, {**options, "limits": limits, "as_json": as_json})


# What is done with an endpoint, by the option that names it.
_ACTIONS: dict[str, Callable[[Site, Endpoint, Mapping[str, Any]], None]] = {
    "url": lambda site, one, given: _print_url(site, one, given["as_json"]),
    "stop": lambda site, one, given: workflow.stop(site, one, note),
    "stats": lambda site, one, given: _stats(site, one, given["since"], given["as_json"]),
    "keep": lambda site, one, given: maintenance.maintain(site, one, note, given["once"]),
    "keys": lambda site, one, given: _list_keys(one, given["as_json"]),
    "add_key": lambda site, one, given: _add_key(
        one, given["user"], given["limits"], given["as_json"]
    ),
    "set_limits": lambda site, one, given: _set_limits(
        one, given["user"], given["limits"], given["as_json"]
    ),
    "revoke_key": lambda site, one, given: _revoke_key(one, given["user"]),
    "adjust": lambda site, one, given: scaling.adjust(site, one, note),
}
_NAMED = "--list, --url, --stop, --stats, --keep, --keys, --add-key, --set-limits, --revoke-key"
_RESOURCES = ("nodes", "gpus_per_node", "time", "partition", "account", "qos", "environment")
_OF_A_MODEL = ("name", "config", "replicas", "port", "local", "no_wait", "replace", "share")


def _check_user(asked: Collection[str], user: str | None, limits: Mapping[str, int | None]) -> None:
    """Raise UsageFault for options of a user without their action, or the other way around."""
    if (user is None) == bool({"add_key", "set_limits", "revoke_key"} & set(asked)):
        raise UsageFault(
            "--add-key, --set-limits and --revoke-key require --user USER; no other option uses it"
        )
    limited = bool({"add_key", "set_limits"} & set(asked))
    if (limits and not limited) or ("set_limits" in asked and not limits):
        raise UsageFault(
            "--requests-per-day and --tokens-per-day are for --add-key and --set-limits, which "
            "needs one of them"
        )


def _serve_model(
    site: Site, model: str, overrides: Sequence[str], options: Mapping[str, Any], as_json: bool
) -> None:
    """Submit what serves a model, start its gateway, and print its address."""
    if "=" in model and not model.startswith("models:/"):
        raise UsageFault(f"MODEL comes first, before {model}")
    name, config, replicas = (options[key] for key in ("name", "config", "replicas"))
    replace, share, no_wait = (options[key] for key in ("replace", "share", "no_wait"))
    if replace and (share is not None or no_wait):
        raise UsageFault("--replace waits for the new deployment: leave --share and --no-wait out")
    least, most = _range(replicas or "1")
    asked = Deployment(
        model,
        "",
        config or "default",
        overrides,
        {key: options[key] for key in _RESOURCES if options[key] is not None},
        choose(options["local"]).name,
        least,
        max_replicas=most,
    )
    if replace:
        before = endpoints.find(site, _name(site, asked, name))
        asked = _as_before(before, asked, config, replicas)
    endpoint, runs = _start(site, asked, name, options["port"], replace, share)
    for run in runs:
        note(f"submitted {run.name} as {title(run.job_id)}")
    _wait(site, endpoint, runs, options["port"] or 0, no_wait, as_json)


def _add_key(endpoint: Endpoint, user: str, limits: dict[str, int | None], as_json: bool) -> None:
    key = access.add(endpoint, user, limits)
    click.echo(json.dumps({"user": user, "key": key}) if as_json else key)
    note(f"  the key of {user} is not shown again")


def _set_limits(
    endpoint: Endpoint, user: str, limits: dict[str, int | None], as_json: bool
) -> None:
    access.limit(endpoint, user, limits)
    _list_keys(endpoint, as_json)


def _revoke_key(endpoint: Endpoint, user: str) -> None:
    access.revoke(endpoint, user)
    note(f"the key of {user} is revoked")


def _range(text: str) -> tuple[int, int | None]:
    """Return the least and the most servers of N or MIN-MAX."""
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    if match is None or (match[2] is None and int(match[1]) < 1):
        raise UsageFault(f"--replicas {text}: give a number of 1 or more, or a range such as 0-4")
    least, most = int(match[1]), None if match[2] is None else int(match[2])
    if most is not None and (most < 1 or most < least):
        raise UsageFault(f"--replicas {text}: the second number must be 1 or more, and the larger")
    return least, most


def _name(site: Site, asked: Deployment, name: str | None) -> str:
    return workflow.name_of(models.resolve(site, asked.model), name)


def _as_before(
    endpoint: Endpoint, asked: Deployment, config: str | None, replicas: str | None
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
        max_replicas=asked.max_replicas if replicas else now.max_replicas,
        runs=(),
    )


def _start(
    site: Site,
    asked: Deployment,
    name: str | None,
    port: int | None,
    replace: bool,
    share: float | None,
) -> tuple[Endpoint, Sequence[Run]]:
    chosen = Endpoint(site.root / "endpoints" / _name(site, asked, name))
    if port is not None:
        gateway.check_port(chosen, port)
    if replace:
        with chosen.alone(60):
            return chosen, workflow.replace(site, chosen, asked, note)
    if share is None:
        return workflow.start(site, asked, name, note)
    endpoint = endpoints.find(site, chosen.name)
    version = models.resolve(site, asked.model).name
    before = list(dict.fromkeys(each.version for each in endpoint.deployments))
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
    scaled = any(each.max_replicas is not None for each in endpoint.deployments)
    if scaled or any(map(reachable, endpoint.servers)):
        gateway.start(site, endpoint, port)
        _print_url(site, endpoint, as_json)
        return
    facts = endpoint.servers[0]
    _print_url(site, endpoint, as_json, str(facts["url"]), str(facts["host"]))


def _print_url(
    site: Site, endpoint: Endpoint, as_json: bool, url: str = "", node: str | None = None
) -> None:
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
    host, port = urlsplit(url).hostname, int(url.rpartition(":")[2])
    if node or not listening(host or "127.0.0.1", port, "/v1"):
        note(f"  laptop    {tunnel(port, site.jump_host, node)}")
    if not node:
        note(f'  try it    cookbook query {endpoint.name} "What is Slurm used for?"')


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
                "max_replicas": sum(s.max_replicas or s.replicas for s in each.deployments),
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
    click.echo(workflow.figures(site, endpoint, since, note, as_json), nl=False)
