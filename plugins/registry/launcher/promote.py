"""Registering a model, moving an alias through its gates, and moving it back."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.do.models import Model, of_folder
from launcher.errors import GateFault, UsageFault
from launcher.look.outcome import outcome
from launcher.run.states import state_of
from launcher.site import Site
from plugins.evaluate.launcher import evaluate, evaluation
from plugins.registry.launcher import facts, gates, importer, registry, verdicts
from plugins.registry.launcher import store as stores
from plugins.registry.launcher.registry import Version
from plugins.serve.launcher import endpoint as endpoints


def register(site: Site, model: Model, name: str, copy: bool) -> Version:
    """Register a model as the next version of a name; it gets the alias candidate."""
    store = stores.at(site.root, site.tracking)
    tags = _tags(site, model)
    place = registry.write(store, name, model.folder, copy)
    with ExitStack() as unregistered:
        unregistered.callback(shutil.rmtree, place, ignore_errors=True)
        with stores.client(store) as client:
            if model.run is not None:
                for _ in importer.import_runs(client, store, [model.run]):
                    pass
            # From here on the registry keeps or removes it.
            unregistered.pop_all()
            return registry.add(client, store, name, place, model.folder, copy, tags)


def _tags(site: Site, model: Model) -> dict[str, Any]:
    tags: dict[str, Any] = {"cookbook.evaluated_as": model.folder.resolve()}
    tags |= _figures(evaluate.results(site, model))
    run = model.run
    if run is None:
        return tags
    kit = run.provenance.get("kit") or {}
    known = outcome(run, state_of(run))
    return tags | {
        "run": run.name,
        "recipe": run.submission.get("recipe"),
        "job_id": run.job_id,
        "gpu_hours": known["gpu_hours"],
        "val_loss": known["val_loss"],
        "loss_last_tenth": known["loss_last_tenth"],
        "commit": kit.get("commit"),
        "uncommitted_changes": bool(kit.get("diff")),
        "config_sha256": run.provenance.get("config_sha256"),
        "data_sha256": facts.data_hash(run),
    }


def _figures(results: list[dict[str, Any]]) -> dict[str, str]:
    """Return the newest evaluation's figures as tags."""
    newest = evaluation.figures(results[0]) if results else {}
    return {f"eval.{key}": f"{value:.6g}" for key, value in newest.items()}


def promote(
    site: Site,
    name: str,
    alias: str,
    number: int | None,
    gates_file: Path | None,
    why: str | None,
    say: Callable[[str], None],
    without: bool = False,
) -> Version:
    """Let an alias name a version that passes the alias's gates.

    Args:
        number: the version; None for the candidate.
        gates_file: the name's gates from now on; None for those that it has, else the default.
        without: this once, no gate is asked.

    Raises:
        GateFault: gates that it does not pass, with figures; nothing is changed.
    """
    given = gates.load(gates_file) if gates_file else None
    store = stores.at(site.root, site.tracking)
    with stores.client(store) as client:
        chosen = registry.version(client, name, str(number) if number else "candidate")
        present = registry.aliases_of(client, name)
        if present.get(alias) == chosen.number:
            raise UsageFault(f"{name} v{chosen.number} is already the {alias}")
        rules = _rules(store, name, given, without, say)
        judged: dict[str, Any] = {"gates": rules.origin if rules else "none"}
        if rules is not None and alias in rules.aliases:
            judged |= _passed(site, client, store, rules, chosen, alias, say)
        # It may have been evaluated after it was registered.
        registry.tag(client, name, chosen.number, _figures(_results(site, chosen)))
        registry.set_alias(client, store, name, alias, chosen.number, why, **judged)
        promoted = registry.version(client, name, alias)
    for line in still_served(site, name, alias, present.get(alias)):
        say(line)
    return promoted


def _passed(
    site: Site,
    client: Any,
    store: stores.Store,
    rules: gates.Gates,
    chosen: Version,
    alias: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return by which evaluations a version passes its gates, and the hash of its weights."""
    name, present = chosen.name, registry.aliases_of(client, chosen.name)
    version = verdicts.JudgedVersion(
        name,
        chosen.number,
        chosen.folder,
        _results(site, chosen),
        {each: _evaluated(registry.version(client, name, each)) for each in present},
        {
            each: sha256
            for each, number in present.items()
            if (sha256 := registry.judged_weights(store, name, number))
        },
    )
    judged = list(verdicts.judge(rules, version))
    # What failed is in the error.
    for text in dict.fromkeys(each.text for each in judged if each.passed):
        say(f"passed  {text}")
    if failed := dict.fromkeys(each.text for each in judged if not each.passed):
        head = f"{name} v{chosen.number} is not promoted to {alias}: gate"
        raise GateFault([f"{head} {text}" for text in failed])
    evaluations = list(dict.fromkeys(each.evaluation for each in judged if each.evaluation))
    if not evaluations:
        say(
            "note: no gate has judged the answers of this version; write gates for your "
            "own suite: cookbook eval MODEL --results --as-gates (docs/lifecycle.md)"
        )
    return {"evaluations": evaluations, "weights_sha256": version.weights_sha256}


def _rules(
    store: stores.Store,
    name: str,
    given: gates.Gates | None,
    without: bool,
    say: Callable[[str], None],
) -> gates.Gates | None:
    """Return the gates of a name, which are those that it was given last; None without."""
    own = registry.gates_of(store, name)
    if without:
        say(f"note: no gate is asked this once; those of {name}: {own[0] if own else 'default'}")
        return None
    if given is None:
        if own is None:
            return gates.load(yamlfile.find("gates file", "default", paths.GATES))
        say(f"gates of {name}: {own[0]}")
        return gates.of_text(own[1], own[0])
    if own is None or own[1] != given.text:
        # Before they judge: a version that fails them does not get past them by the default.
        registry.set_gates(store, name, given.origin, given.text)
        say(
            f"the gates of {name} are from now on {given.origin}{f', were {own[0]}' if own else ''}"
        )
    return given


def still_served(site: Site, name: str, alias: str, number: int | None) -> Iterator[str]:
    """Yield for each endpoint that serves the version that an alias named before how to swap it."""
    for endpoint in endpoints.every(site):
        for deployment in endpoint.deployments:
            if deployment.version != f"{name} v{number}" or not endpoint.living(
                site.root, deployment
            ):
                continue
            swap = f"cookbook serve models:/{name}@{alias} --name {endpoint.name} --replace"
            if deployment.model == f"models:/{name}@{alias}":
                swap = f"cookbook serve --keep {endpoint.name} --once"
            still = f"endpoint {endpoint.name} still serves {deployment.version}"
            yield f"{still}; swap it with: {swap}"


def _evaluated(version: Version) -> Path:
    """Return the folder under which a version was evaluated."""
    return Path(version.tags.get("cookbook.evaluated_as") or version.folder)


def _results(site: Site, version: Version) -> list[dict[str, Any]]:
    """Return the evaluations of a version, under each folder that it is known by."""
    results = []
    for folder in dict.fromkeys((version.folder, _evaluated(version))):
        if folder.is_dir():
            results += evaluate.results(site, of_folder(folder))
    return sorted(results, key=lambda each: float(each.get("created") or 0), reverse=True)


def rollback(site: Site, name: str, alias: str, why: str | None) -> tuple[int, Version]:
    """Let an alias name the version that it named before; return what it named, and the version."""
    store = stores.at(site.root, site.tracking)
    with stores.client(store) as client:
        now = registry.version(client, name, alias).number
        before = registry.previous(store, name, alias, now)
        if before is None:
            raise UsageFault(
                f"{alias} of {name} had no version before v{now}: see cookbook registry {name}"
            )
        registry.version(client, name, str(before))
        registry.set_alias(
            client, store, name, alias, before, f"rollback: {why or 'no reason given'}"
        )
        return now, registry.version(client, name, alias)
