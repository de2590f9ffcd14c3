"""cookbook query"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from launcher import paths, venv
from launcher import site as sites
from launcher.cli.common import cluster_option, flag, json_option
from launcher.errors import UsageFault
from plugins.serve.launcher import endpoint as endpoints

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("name")
@click.argument("prompt", required=False)
@click.option("--input", "source", type=_FILE, help="JSON lines with messages, prompt or question.")
@click.option(
    "--output", "target", type=_FILE, help="File for one JSON line per question, in order."
)
@click.option("--in-flight", type=click.IntRange(min=1), help="Concurrent requests. [default: 16]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Maximum answer length.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: greedy decoding.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the sampling.")
@flag("--stream", help="Print the answer while it is generated.")
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
    as_json: bool,
    cluster: str | None,
) -> None:
    """Send one PROMPT, or a file of prompts, to the endpoint NAME.

    A partly answered file is continued. Failed requests are retried. Without a server a job answers
    a file: cookbook eval MODEL --suite batch tasks.answers.data=FILE tasks.answers.output=FILE
    """
    if (prompt is None) == (source is None) or (source is None) != (target is None):
        raise UsageFault("give PROMPT, or both --input FILE and --output FILE")
    site = sites.load(cluster)
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
    argv = [str(venv.python()), "-m", "plugins.serve.client", str(endpoint.folder.absolute())]
    for key, value in given.items():
        if value is not None:
            text = str(value.absolute()) if isinstance(value, Path) else str(value)
            argv.append(f"--{key}={text}")
    argv += ["--stream"] if stream else []
    argv += ["--json"] if as_json else []
    done = subprocess.run(argv, cwd=paths.REPO_ROOT, env=venv.environment())
    sys.exit(done.returncode)
