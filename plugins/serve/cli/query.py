"""cookbook query"""

import json
import time
from typing import Any

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, json_option
from launcher.errors import EndpointFault
from plugins.serve import client
from plugins.serve.endpoint import address
from plugins.serve.launcher import endpoint as endpoints
from plugins.serve.launcher.endpoint import Endpoint
from runspec.files import parse_json

CHAT = "/v1/chat/completions"
# How long a backend may take to restart, and to answer.
_PATIENCE_S, _TIMEOUT_S = 120.0, 600.0


@click.command()
@click.argument("name")
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Maximum answer length.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: greedy decoding.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the sampling.")
@json_option
@cluster_option
def query(
    name: str,
    prompt: str,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    as_json: bool,
    cluster: str | None,
) -> None:
    """Send one PROMPT to the endpoint NAME, and print the answer."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": prompt}]}
    body |= {key: value for key, value in given.items() if value is not None}
    answer = ask(endpoints.find(sites.load(cluster), name), body)
    click.echo(json.dumps({"answer": answer}) if as_json else answer)


def ask(endpoint: Endpoint, body: dict[str, Any]) -> str:
    """Return the text of an answer; the endpoint's address is read again before every try.

    Raises:
        EndpointFault: nothing serves it, or it refuses the request.
    """
    key = endpoint.key_file.read_text(encoding="utf-8").strip()
    headers, deadline = {"Authorization": f"Bearer {key}"}, time.monotonic() + _PATIENCE_S
    url = endpoint.url
    while True:
        try:
            answer = client.send(f"{url}{CHAT}", body, headers, timeout_s=_TIMEOUT_S)
            if answer.status == 200:
                text = parse_json(answer.body)["choices"][0]["message"]["content"]
                return str(text or "")
            reason = f"it answered {answer.status}: {_message(answer.body)}"
            if answer.status < 500 and answer.status != 429:
                break
        except OSError as error:
            reason = f"it does not answer ({type(error).__name__})"
        if time.monotonic() > deadline:
            break
        time.sleep(1.0)
        url = address(endpoint.folder) or url
    raise EndpointFault(f"{endpoint.name}: {reason}")


def _message(body: bytes) -> str:
    try:
        return str(parse_json(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
