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
from launcher.workflows import endpoint as endpoints

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("name")
@click.argument("prompt", required=False)
@click.option("--input", "source", type=_FILE, help="JSON lines: messages, prompt or question.")
@click.option("--output", "target", type=_FILE, help="Gets one JSON line per question, in order.")
@click.option("--in-flight", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: always the likeliest.")
@click.option("--seed", type=click.IntRange(min=0), help="Of sampling.")
@flag("--stream", help="Print the answer as it comes.")
@json_option
@cluster_option
def query(
    name: str,
    prompt: str | None,
    source: Path | None,
    target: Path | None,
    as_json: bool,
    stream: bool,
    cluster: str | None,
    **settings: Any,
) -> None:
    """Ask the endpoint NAME: one PROMPT, or a file of them.

    A file that was answered in part is continued. What fails is tried again.
    """
    if (prompt is None) == (source is None) or (source is None) != (target is None):
        raise UsageFault("give PROMPT, or both --input FILE and --output FILE")
    if source is not None and (stream or as_json):
        raise UsageFault("--stream and --json belong to one PROMPT: leave them out")
    site = sites.load(cluster)
    endpoint = endpoints.find(site, name)
    endpoint.url  # noqa: B018  # an endpoint that nothing serves is told at once
    given = {"input": source, "output": target, "prompt": prompt, **settings}
    argv = [str(venv.python()), "-m", "serving.client", str(endpoint.folder.absolute())]
    for key, value in given.items():
        if value is not None:
            text = str(value.absolute()) if isinstance(value, Path) else str(value)
            argv.append(f"--{key.replace('_', '-')}={text}")
    argv += ["--stream"] if stream else []
    argv += ["--json"] if as_json else []
    done = subprocess.run(argv, cwd=paths.REPO_ROOT, env=venv.environment())
    sys.exit(done.returncode)
