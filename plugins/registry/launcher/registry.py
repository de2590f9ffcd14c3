"""Registered models: versions by reference or by copy, aliases, and the history of both."""

import getpass
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from launcher.errors import StoreFault, UsageFault, nearest
from plugins.registry.launcher import importer
from plugins.registry.launcher import store as stores
from plugins.registry.launcher.store import Store
from runspec import files, weights

ALIASES = ("candidate", "staging", "champion")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_TAG = 4900
# Of models on a server that come from no run.
_EXPERIMENT = "registered models"


@dataclass(frozen=True)
class Version:
    """A registered version of a model."""

    name: str
    number: int
    # Of its weights.
    folder: Path
    aliases: tuple[str, ...] = ()
    # Seconds since 1970.
    created: float = 0.0
    tags: Mapping[str, str] = field(default_factory=dict)


def write(store: Store, name: str, folder: Path, copy: bool) -> Path:
    """Write the files of a new version of a name; return their folder, which is not registered yet.

    It needs no lock, and a copy of weights may take minutes.

    Args:
        copy: keep a copy of the weights; else the version refers to the folder, which must stay.

    Raises:
        UsageFault: the name is not one.
        StoreFault: the files cannot be written, or MLflow is not installed.
    """
    _check_name(name)
    stores.imported()
    made = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
    place = store.models / name / made
    try:
        _write_model(place, folder, copy, store.embedded)
    except BaseException as error:
        shutil.rmtree(place, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise StoreFault(f"cannot write {place}: {reason}: check the disk") from error
    return place


def add(
    client: Any,
    store: Store,
    name: str,
    place: Path,
    folder: Path,
    copy: bool,
    tags: Mapping[str, Any],
) -> Version:
    """Register a model folder as the next version of a name, with the alias candidate.

    A server takes no local path: it gets the model's files, without weights for a reference, as
    those of a run of its own.

    Args:
        place: the version's files, as `write` returns them; removed if they are not registered.
        tags: facts about it; `run` is the run directory that it comes from.
    """
    try:
        if not any(e.name == name for e in client.search_registered_models(f"name = '{name}'")):
            client.create_registered_model(name)
        last = max((int(each.version) for each in _versions(client, name)), default=0)
        weights = place / "model" if copy else folder.resolve()
        known = {**tags, "cookbook.folder": weights, "cookbook.by": "copy" if copy else "reference"}
        texts = {key: str(value)[:_TAG] for key, value in known.items() if value is not None}
        run_id, source = None, place.as_uri()
        if not store.embedded:
            run_id, source = _uploaded(client, place, name, str(tags.get("run") or ""))
        made = client.create_model_version(name, source=source, run_id=run_id, tags=texts)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    if not (store.embedded or copy):
        shutil.rmtree(place, ignore_errors=True)
    number = int(made.version)
    _record(store, name, "register", version=number, before=last or None, why=None)
    set_alias(client, store, name, "candidate", number, why="registered")
    return version(client, name, str(number))


def _uploaded(client: Any, place: Path, name: str, run: str) -> tuple[str, str]:
    """Give a server the files of a version; return its run's id and their address there."""
    tracked = importer.find(client, run) if run else None
    if tracked is None:
        known = client.get_experiment_by_name(_EXPERIMENT)
        experiment = known.experiment_id if known else client.create_experiment(_EXPERIMENT)
        tracked = client.create_run(experiment, tags={"mlflow.runName": name})
        client.set_terminated(tracked.info.run_id)
    inside = f"models/{name}/{place.name}"
    client.log_artifacts(tracked.info.run_id, str(place), inside)
    return tracked.info.run_id, f"{tracked.info.artifact_uri}/{inside}"


def version(client: Any, name: str, wanted: str) -> Version:
    """Return a version by its number or an alias; UsageFault if there is none."""
    _check_name(name)
    from mlflow.exceptions import MlflowException

    try:
        if wanted.isdigit():
            entry = client.get_model_version(name, wanted)
        else:
            entry = client.get_model_version_by_alias(name, wanted)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise UsageFault(_absent(client, name, wanted)) from error
    return _of(client, entry)


def _absent(client: Any, name: str, wanted: str) -> str:
    registered = names(client)
    if name not in registered:
        listed = f"there are {', '.join(registered)}"
        known = listed if registered else "register one with: cookbook register"
        return f"no model is registered as {name!r}{nearest(name, registered)}: {known}"
    aliases = aliases_of(client, name)
    what = (
        f"version {wanted}" if wanted.isdigit() else f"alias {wanted!r}{nearest(wanted, aliases)}"
    )
    listed = ", ".join(f"{alias} (v{number})" for alias, number in aliases.items()) or "no alias"
    return f"{name} has no {what}; it has {listed}: see cookbook registry {name}"


def aliases_of(client: Any, name: str) -> dict[str, int]:
    """Return the aliases of a registered model and the versions that they name."""
    aliases = client.get_registered_model(name).aliases
    return {alias: int(number) for alias, number in sorted(aliases.items())}


def versions(client: Any, name: str) -> list[Version]:
    """Return the versions of a registered model, newest first."""
    known = [_of(client, each) for each in _versions(client, name)]
    return sorted(known, key=lambda each: each.number, reverse=True)


def names(client: Any) -> list[str]:
    """Return the names of all registered models."""
    # As many as MLflow returns at once.
    return sorted(each.name for each in client.search_registered_models(max_results=1000))


def tag(client: Any, name: str, number: int, tags: Mapping[str, str]) -> None:
    """Set tags of a version."""
    for key, value in tags.items():
        client.set_model_version_tag(name, str(number), key, value)


def set_alias(
    client: Any,
    store: Store,
    name: str,
    alias: str,
    number: int,
    why: str | None,
    **judged: Any,
) -> None:
    """Let an alias name a version, and record who did it, when, why, and what it named before.

    Args:
        judged: how it passed its gates: `gates`, the file's path; `evaluations`, the runs whose
            figures let it through; `weights_sha256`, the hash of the weights.
    """
    if alias not in ALIASES:
        raise UsageFault(f"the alias {alias!r} is not one of {', '.join(ALIASES)}")
    before = aliases_of(client, name).get(alias)
    client.set_registered_model_alias(name, alias, str(number))
    _record(store, name, alias, version=number, before=before, why=why, **judged)


def set_gates(store: Store, name: str, origin: str, text: str) -> None:
    """Let a name have the gates of a file from now on, as they are now."""
    _record(store, name, "gates", gates=origin, text=text)


def gates_of(store: Store, name: str) -> tuple[str, str] | None:
    """Return the path of the file of a name's gates, and its text then; None if it has none."""
    lines = [each for each in history(store, name) if each.get("change") == "gates"]
    return (str(lines[-1]["gates"]), str(lines[-1]["text"])) if lines else None


def previous(store: Store, name: str, alias: str, now: int | None) -> int | None:
    """Return the version that an alias named before the one it names now, None if none did."""
    moves = [each for each in history(store, name) if each.get("change") == alias]
    for each in reversed(moves):
        if each.get("version") == now and each.get("before") not in (None, now):
            return int(each["before"])
    return None


def judged_weights(store: Store, name: str, number: int) -> str | None:
    """Return the hash of a version's weights when it last passed gates, None if it is not known."""
    hashes = [
        each["weights_sha256"]
        for each in history(store, name)
        if each.get("version") == number and each.get("weights_sha256")
    ]
    return str(hashes[-1]) if hashes else None


def history(store: Store, name: str) -> list[dict[str, Any]]:
    """Return the changes of a registered model, oldest first."""
    return [each for each in files.read_json_lines(store.history) if each.get("model") == name]


def _record(store: Store, name: str, change: str, **facts: Any) -> None:
    """Append a line to the history; `version`, `before` and `why` may be null, no other fact is."""
    line = {"time": time.time(), "user": getpass.getuser(), "model": name, "change": change}
    always = ("version", "before", "why")
    line |= {key: value for key, value in facts.items() if value or key in always}
    store.folder.mkdir(parents=True, exist_ok=True)
    files.append_json_line(store.history, line)


def _check_name(name: str) -> None:
    if not NAME.match(name):
        raise UsageFault(
            f"the model name {name!r} may hold only letters, digits, '.', '_' and '-', beginning "
            "with a letter or digit, 64 at most"
        )


def _versions(client: Any, name: str) -> list[Any]:
    return list(client.search_model_versions(f"name = '{name}'"))


def _of(client: Any, entry: Any) -> Version:
    tags = dict(entry.tags)
    place = Path(unquote(urlparse(str(entry.source)).path))
    aliases = tuple(
        alias
        for alias, number in aliases_of(client, entry.name).items()
        if number == int(entry.version)
    )
    folder = Path(tags.get("cookbook.folder") or place / "model")
    created = float(entry.creation_timestamp or 0) / 1000
    return Version(entry.name, int(entry.version), folder, aliases, created, tags)


def _write_model(place: Path, folder: Path, copy: bool, linked: bool) -> None:
    """Write an MLflow model whose weights are a folder, or a copy of it.

    mlflow.transformers.load_model reads it, and so does every tool that takes models:/NAME@ALIAS.
    An adapter has no flavour of MLflow's that needs no base: only its files are kept.

    Args:
        linked: links lead to the folder; else, for a server, its path stands in MLmodel.
    """
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    text = Schema([ColSpec(DataType.string, "prompt")])
    answer = Schema([ColSpec(DataType.string, "answer")])
    model = Model(signature=ModelSignature(inputs=text, outputs=answer))
    place.mkdir(parents=True)
    if copy:
        shutil.copytree(folder, place / "model")
    elif linked:
        (place / "model").symlink_to(folder.resolve())
    settings = files.read_object(folder / "config.json")
    if settings is not None:
        _write_tokenizer(place / "components" / "tokenizer", folder, linked)
        weights_at = {"model_binary": "model"}
        if not (linked or copy):
            weights_at = {"local_base_model_path": str(folder.resolve())}
        dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
        model.add_flavor(
            "transformers",
            code=None,
            components=["tokenizer"],
            framework="pt",
            instance_type="TextGenerationPipeline",
            pipeline_model_type=(settings.get("architectures") or ["AutoModelForCausalLM"])[0],
            source_model_name=folder.name,
            task="text-generation",
            tokenizer_type="PreTrainedTokenizerFast",
            torch_dtype=f"torch.{dtype}",
            **weights_at,
        )
        model.add_flavor("python_function", loader_module="mlflow.transformers", python_version="3")
    files.write_json(place / "input_example.json", {"prompt": "What is Slurm used for?"})
    model.saved_input_example_info = {"artifact_path": "input_example.json", "type": "json_object"}
    model.save(str(place / "MLmodel"))


def _write_tokenizer(place: Path, folder: Path, linked: bool) -> None:
    """Write MLflow's component of a tokenizer: the model's own files."""
    if linked:
        place.parent.mkdir()
        place.symlink_to(Path("..") / "model")
        return
    for path in weights.tokenizer_files(folder):
        copied = place / path.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
