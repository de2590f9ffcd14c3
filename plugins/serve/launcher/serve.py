"""Serving a model: its jobs, a successor without a gap, and the end of them."""

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace as changed
from math import isclose
from pathlib import Path
from typing import Any

from launcher import paths, venv, yamlfile
from launcher import site as sites
from launcher.do import models
from launcher.do import submit as submission
from launcher.do.cancel import cancel
from launcher.errors import CookbookError, EndpointFault, UsageFault
from launcher.recipe import load as recipe_file
from launcher.recipe.model import Recipe
from launcher.run import directory
from launcher.run.directory import Run
from launcher.run.states import state_of
from launcher.site import Site
from launcher.slurm import executors
from plugins.serve import endpoint as endpoints
from plugins.serve import journal, stats
from plugins.serve.launcher.endpoint import Deployment, Endpoint
from plugins.serve.recipe_keys import package_of
from runspec import adapters, files
from runspec.keys.key import NAME, NAME_RULE
from runspec.weights import gives_scores

Say = Callable[[str], None]
CONFIGS = paths.REPO_ROOT / "configs" / "serve"
_POLL_S = 1.0
# A gateway reads the servers' files twice a second.
_SEEN_S = 3.0


def name_of(model: models.Model, wanted: str | None) -> str:
    """Return an endpoint's name: the one wanted, else the registered one, else the run's."""
    if wanted is None:
        wanted = model.registered_as or model.name
    if not NAME.match(wanted):
        raise UsageFault(
            f"the endpoint name {wanted!r} may contain only {NAME_RULE}: give --name NAME"
        )
    return wanted


def start(site: Site, asked: Deployment, name: str | None, say: Say) -> tuple[Endpoint, list[Run]]:
    """Submit the jobs that serve a model; return the endpoint and the runs.

    Args:
        asked: the model and how it is served; its version and runs are not known yet.

    Raises:
        UsageFault: the endpoint is served already, or what was given is wrong.
    """
    model = models.resolve(site, asked.model)
    endpoint = Endpoint(site.root / "endpoints" / name_of(model, name))
    if busy := endpoint.living(site.root):
        raise UsageFault(
            f"{endpoint.name} is already served by {busy[-1].name}: replace it without "
            "interruption with --replace, choose another --name, or stop it with: "
            f"cookbook serve --stop {endpoint.name}"
        )
    new, runs, settings = launch(site, endpoint, asked, asked.replicas, say)
    endpoint.write([new], settings)
    return endpoint, runs


def launch(
    site: Site, endpoint: Endpoint, asked: Deployment, count: int, say: Say
) -> tuple[Deployment, list[Run], dict[str, Any]]:
    """Submit this many jobs, each with a copy of a model; return them, and the fronts' settings.

    Each server is a job: the loss of a node ends one of them, and Slurm starts that one again.
    """
    model = models.resolve(site, asked.model)
    file = yamlfile.find("serving configuration", asked.config, CONFIGS)
    given = {
        "endpoint": endpoint.name,
        "endpoint_dir": endpoint.folder,
        "model": model.folder,
        "key_file": endpoint.key_file,
    }
    texts = [f"{key}={value}" for key, value in given.items()]
    recipe = recipe_file.load(str(file), [*asked.overrides, *texts], asked.resources)
    recipe.config["version"] = model.name
    if recipe.entry.purpose != "serve":
        raise UsageFault(
            f"{file} is not a serving configuration: its entry is {recipe.entry_name}, not serve"
        )
    executor = executors.named(asked.executor)
    recipe = sites.complete(recipe, site, executor)
    _check(recipe)
    runs: list[Run] = []
    is_new = not endpoint.folder.exists()
    try:
        _make(endpoint)
        for _ in range(count):
            planned = submission.plan(recipe, site, executor, f"serve-{endpoint.name}"[:64])
            runs.append(submission.submit(planned, say))
    except BaseException:
        # All of them, or none.
        for run in runs:
            with suppress(CookbookError):
                cancel(run)
        if is_new:
            shutil.rmtree(endpoint.folder, ignore_errors=True)
        raise
    place = runs[0].path if runs else endpoint.folder
    settings = dict(recipe.train_config(site.root, str(place)))
    names = [run.name for run in runs]
    # A later launch must not mean another model: `last`, or a part of a name. An alias may move.
    folder = model.run is None or "/" in asked.model or Path(asked.model).is_dir()
    own = str(model.folder) if folder else model.name
    meant = asked.model if model.registered_as else own
    return changed(asked, model=meant, version=model.name, runs=names), runs, settings


def _check(recipe: Recipe) -> None:
    """Raise UsageFault if the model cannot be served, or the backend is not there."""
    faults = []
    folder = Path(str(recipe.config["model"]))
    if gives_scores(folder):
        faults.append(f"{folder} is a reward model, which gives no text: use it in cookbook eval")
    backend, package = str(recipe.config["engine"]), package_of(recipe.config)
    if recipe.environment is None and package not in venv.packages():
        kit = backend == "transformers"
        remedy = "bash setup.sh --with serve" if kit else f"--environment {backend}"
        missing = f"needs the package {package}, which is not there: {remedy}"
        faults.append(f"the backend {backend} {missing}")
    arguments = [str(each) for each in recipe.config.get("engine_args") or []]
    if backend == "transformers" and "--continuous-batching" in arguments:
        faults.append(
            "engine_args: transformers' continuous batching samples alike for all requests: set "
            "engine=vllm"
        )
    faults += adapter_faults(backend, folder)
    if faults:
        raise UsageFault(faults)


# model_type of models that PEFT 0.18 cannot put a prefix before.
WITHOUT_PREFIX = ("gemma2", "gemma3_text")


def adapter_faults(backend: str, folder: Path) -> list[str]:
    """Return why a backend would answer with another model than this adapter over its base.

    vLLM (lora/peft_helper.py) scales all layers alike.
    """
    if (adapter := files.read_object(folder / "adapter_config.json")) is None:
        return []
    kind = adapter.get("peft_type") or adapters.LORA.peft_type
    if backend == "transformers":
        base = Path(str(adapter.get("base_model_name_or_path")))
        family = (files.read_object(base / "config.json") or {}).get("model_type")
        if kind == adapters.PREFIX.peft_type and family in WITHOUT_PREFIX:
            return [
                f"{folder}: PEFT 0.18 cannot put a prefix before Gemma 2 and 3: train "
                "model.adapter=lora, ia3 or prompt"
            ]
        return []
    if kind != adapters.LORA.peft_type:
        merged = ", or serve the merged model (of a run: its export folder)"
        return [
            f"{folder}: engine={backend} serves no {kind} adapters; set engine=transformers"
            f"{merged if kind == adapters.IA3.peft_type else ''}"
        ]
    ranks, alphas = (adapter.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    rank, alpha = float(adapter.get("r") or 8), float(adapter.get("lora_alpha") or 8)
    power = 0.5 if adapter.get("use_rslora") else 1.0
    factors = (
        float(alphas.get(name, alpha)) / float(ranks.get(name, rank)) ** power
        for name in {*ranks, *alphas}
    )
    if all(isclose(factor, alpha / rank**power) for factor in factors):
        return []
    ignored = "alpha_pattern" if alphas else "rank_pattern"
    return [
        f"{folder}: engine={backend} ignores the adapter's {ignored}, so its answers would be "
        "wrong: set engine=transformers, or serve the merged model (of a run: its export folder)"
    ]


def _make(endpoint: Endpoint) -> None:
    """Make an endpoint's folder and key, once."""
    endpoint.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (endpoint.folder / endpoints.BACKENDS).mkdir(mode=0o700, exist_ok=True)
    if not endpoint.key_file.exists():
        files.write_text(endpoint.key_file, secrets.token_urlsafe(32) + "\n", mode=0o600)


def await_ready(endpoint: Endpoint, runs: Sequence[Run], say: Say) -> None:
    """Wait until each run has a ready server; EndpointFault if one ends before.

    A job may wait in the queue for days; a backend that does not start ends its own job
    (start_timeout_s).
    """
    asked, last_text = 0.0, ""
    while True:
        ready = {each.get("run") for each in endpoint.servers if each["state"] == "ready"}
        left = [run for run in runs if run.name not in ready]
        if not left:
            return
        if time.monotonic() - asked > 5:
            asked, state = time.monotonic(), state_of(left[0])
            if state.ended:
                detail = f" ({state.detail})" if state.detail else ""
                raise EndpointFault(
                    f"{left[0].name} is {state.word}{detail}: cookbook logs --first-error "
                    f"{left[0].name}"
                )
            text = f"{left[0].name}: {state.word} {state.detail}".rstrip()
            if state.word != "RUNNING" and text != last_text:
                say(text)
                last_text = text
        time.sleep(_POLL_S)


def replace(site: Site, endpoint: Endpoint, asked: Deployment, say: Say) -> list[Run]:
    """Let one version take the place of all that an endpoint serves, without a gap."""
    before, going = endpoint.deployments, endpoint.living(site.root)
    new, runs, settings = launch(site, endpoint, asked, asked.replicas, say)
    endpoint.write([*before, new], settings)
    _take_over(endpoint, runs, going, say)
    endpoint.write([new])
    return runs


def renew(
    site: Site, endpoint: Endpoint, old: Deployment, going: Sequence[Run], count: int, say: Say
) -> None:
    """Let this many new jobs with the settings of a version take the place of some of its runs."""
    new, runs, settings = launch(site, endpoint, changed(old, runs=()), count, say)
    others = [each for each in endpoint.deployments if each != old]
    endpoint.write([*others, changed(old, runs=[*old.runs, *new.runs])], settings)
    _take_over(endpoint, runs, going, say)
    ended = {run.name for run in going}
    kept = [name for name in old.runs if name not in ended]
    endpoint.write([*others, changed(old, runs=[*kept, *new.runs])])


def _take_over(endpoint: Endpoint, runs: Sequence[Run], going: Sequence[Run], say: Say) -> None:
    """Wait for new runs, and end those whose place they take."""
    new, old = (", ".join(run.name for run in each) for each in (runs, going))
    say(f"{new} will replace {old}" if old else f"{new} will serve")
    await_ready(endpoint, runs, say)
    drain(endpoint, going, say)


def drain(endpoint: Endpoint, runs: Sequence[Run], say: Say) -> None:
    """Let runs end what they answer now, and end them; other servers get what comes."""
    names = {run.name for run in runs}
    for each in endpoint.servers:
        if each.get("run") in names:
            endpoints.drain_mark(endpoint.folder, each["name"]).touch()
    timeout = float(endpoint.settings.get("request_timeout_s") or 600)
    began = time.monotonic()
    while names and time.monotonic() - began < timeout + _SEEN_S:
        left = [each for each in endpoint.servers if each.get("run") in names]
        quiet = all(e["state"] == "draining" and not e.get("in_flight") for e in left)
        if quiet and time.monotonic() - began > _SEEN_S:
            break
        time.sleep(0.5)
    for run in runs:
        with suppress(CookbookError):
            say(cancel(run, resumed=False))


def stop(site: Site, endpoint: Endpoint, say: Say) -> None:
    """End an endpoint's jobs and its gateway; its log and its key stay."""
    gateway = endpoint.gateway
    here = gateway is not None and gateway["host"] == socket.gethostname()
    if gateway is not None and here:
        with suppress(ProcessLookupError):
            os.kill(int(gateway["pid"]), 15)
        say(f"the gateway {gateway['url']} has stopped")
    with ExitStack() as stack:
        # What replaces a job may be about to submit one; it names it first.
        with suppress(EndpointFault):
            stack.enter_context(endpoint.alone(10))
        for run in endpoint.living(site.root):
            say(cancel(run, resumed=False))
    if gateway is not None and not here:
        say(f"the gateway runs on {gateway['host']}: repeat the command there to stop it")


def failed_start(site: Site, endpoint: Endpoint) -> str:
    """Say which of an endpoint's newest runs ended before it was ready, "" if none did."""
    for each in endpoint.deployments:
        if not each.runs:
            continue
        run = Run(directory.runs_root(site.root) / each.runs[-1])
        state = state_of(run)
        if state.word == "FAILED" and not (run.path / files.SERVED).exists():
            return f"{run.name} ended before it was ready ({state.detail})"
    return ""


def figures(endpoint: Endpoint, since: float | None) -> dict[str, Any]:
    """Return an endpoint's figures since a time; EndpointFault if it has no requests."""
    found = stats.summary(journal.read(endpoint.folder / endpoints.REQUESTS, since or 0.0))
    if not found["requests"]:
        raise EndpointFault(f"no request of {endpoint.name} is logged in that time")
    return found
