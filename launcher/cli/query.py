"""cookbook query"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from launcher import executors, paths, venv
from launcher import site as sites
from launcher.cli import common
from launcher.cli.common import cluster_option, flag, json_option, note
from launcher.cli.number import FloatRange, IntRange
from launcher.cli.runs import interruption_told
from launcher.cli.status import watch_to_the_end
from launcher.errors import UsageFault
from launcher.runs.directory import Run
from launcher.workflows import endpoint as endpoints
from launcher.workflows import evaluate
from launcher.workflows import submit as submission

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("name")
@click.argument("prompt", required=False)
@click.option("--input", "source", type=_FILE, help="JSON lines with messages, prompt or question.")
@click.option(
    "--output", "target", type=_FILE, help="File for one JSON line per question, in order."
)
@click.option("--in-flight", type=IntRange(min=1), help="Concurrent requests. [default: 16]")
@click.option("--max-tokens", type=IntRange(min=1), help="Maximum answer length.")
@click.option("--temperature", type=FloatRange(min=0), help="0: greedy decoding.")
@click.option("--seed", type=IntRange(min=0), help="Seed of the sampling.")
@flag("--stream", help="Print the answer while it is generated.")
@flag("--offline", help="NAME is a MODEL: answer the file in a job, without a server.")
@common.resource_options
@flag("--watch", help="With --offline: follow the job to its end.")
@flag("--local", help="With --offline: run on this host, without Slurm.")
@json_option
@cluster_option
def query(
    name: str,
    prompt: str | None,
    source: Path | None,
    target: Path | None,
    in_flight: int | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stream: bool,
    offline: bool,
    watch: bool,
    local: bool,
    as_json: bool,
    cluster: str | None,
    **resources: Any,
) -> None:
    """Send one PROMPT, or a file of prompts, to the endpoint NAME.

    A partly answered file is continued. Failed requests are retried.
    """
    if (prompt is None) == (source is None) or (source is None) != (target is None):
        raise UsageFault("give PROMPT, or both --input FILE and --output FILE")
    site = sites.load(cluster)
    if offline:
        if source is None or target is None:
            raise UsageFault("--offline answers a file: give --input FILE and --output FILE")
        if stream or in_flight is not None:
            raise UsageFault("--stream and --in-flight need a server: leave them out")
        settings = {"max_new_tokens": max_tokens, "temperature": temperature, "seed": seed}
        _offline(site, name, source, target, settings, resources, watch, local, as_json)
        return
    if watch or local or any(value is not None for value in resources.values()):
        raise UsageFault("job options, --watch and --local require --offline: leave them out")
    if source is not None and (stream or as_json):
        raise UsageFault("--stream and --json require one PROMPT: leave them out")
    endpoint = endpoints.find(site, name)
    endpoint.url  # noqa: B018  # reports an endpoint that nothing serves at once
    given: dict[str, Any] = {
        "input": source,
        "output": target,
        "prompt": prompt,
        "in-flight": in_flight,
    }
    given |= {"max-tokens": max_tokens, "temperature": temperature, "seed": seed}
    argv = [str(venv.python()), "-m", "serving.client", str(endpoint.folder.absolute())]
    for key, value in given.items():
        if value is not None:
            text = str(value.absolute()) if isinstance(value, Path) else str(value)
            argv.append(f"--{key}={text}")
    argv += ["--stream"] if stream else []
    argv += ["--json"] if as_json else []
    done = subprocess.run(argv, cwd=paths.REPO_ROOT, env=venv.environment())
    sys.exit(done.returncode)


def _offline(
    site: sites.Site,
    model: str,
    source: Path,
    target: Path,
    settings: dict[str, Any],
    resources: dict[str, Any],
    watch: bool,
    local: bool,
    as_json: bool,
) -> None:
    recipe = evaluate.batch(site, model, source, target, settings, resources)
    executor = executors.choose(local)
    planned = submission.plan(sites.complete(recipe, site, executor), site)
    checked = submission.context(planned, executor)
    with interruption_told(Run(planned.path)):
        run = submission.submit(planned, checked, note)
    common.tell_submitted(run, as_json, output=str(target))
    if not as_json:
        click.echo(f"  answers    {target}, when the job has ended")
    if watch:
        sys.exit(watch_to_the_end(run))
