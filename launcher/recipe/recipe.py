"""A recipe: a torchtune config and what Slurm has to give it; found by its name, and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, UsageFault, nearest
from launcher.recipe import entries, extend, functions, override, own, stock, validate
from plugins.engines.launcher import engines
from runspec import adapters, prepared
from runspec.keys.common import COMMON
from runspec.keys.key import NAME as NAME
from runspec.keys.key import NAME_RULE as NAME_RULE
from runspec.keys.key import Fault, unused
from runspec.keys.model import TRANSFORMERS
from runspec.keys.train import TrainConfig, with_train_on_input

if TYPE_CHECKING:
    from launcher.recipe.environment import Environment
    from launcher.recipe.launch import Engine
    from runspec.engines import Records

# The folder of secrets that a recipe names without a path.
SECRETS = Path("~/.config/slurm-cookbook/secrets")


@dataclass(frozen=True)
class Resources:
    """What one run asks of Slurm; None leaves the choice to the cluster."""

    nodes: int = 1
    spare_nodes: int = 0
    rollout_nodes: int = 0
    gpus_per_node: int = 1
    gpu_type: str | None = None
    cpus_per_gpu: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    switches: str | None = None
    exclude: str | None = None
    exclusive: bool = False

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> Resources:
        """Return the resources that a checked block gives."""
        given: dict[str, Any] = {key: value for key, value in block.items() if value is not None}
        rollout = given.pop("rollout", "same")
        given["rollout_nodes"] = 0 if rollout == "same" else rollout
        given |= {key: str(given[key]) for key in ("mem", "time", "switches") if key in given}
        return cls(**given)

    @property
    def world_size(self) -> int:
        """Number of ranks: one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def allocated_nodes(self) -> int:
        """Number of nodes that the job asks Slurm for, those that generate or wait included."""
        return self.nodes + self.rollout_nodes + self.spare_nodes

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds, None if the partition decides."""
        return None if self.time is None else time_limit_s(self.time)


@dataclass(frozen=True)
class Notify:
    """Who is notified of a run's events. webhook: the file with its address."""

    events: tuple[str, ...] = ("start", "end", "failure")
    mail: str | None = None
    webhook: Path | None = None

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> Notify:
        """Return what a checked block says."""
        given: dict[str, Any] = {key: value for key, value in block.items() if value is not None}
        if "webhook" in given:
            path = Path(str(given["webhook"])).expanduser()
            named = len(path.parts) == 1 and not path.is_absolute()
            given["webhook"] = SECRETS.expanduser() / path if named else path
        if "events" in given:
            given["events"] = tuple(given["events"])
        return cls(**given)

    @property
    def mail_types(self) -> list[str]:
        """The events by Slurm's names."""
        names = {"start": "BEGIN", "end": "END", "failure": "FAIL"}
        return [names[event] for event in self.events]


@dataclass(frozen=True)
class Recipe:
    """A recipe with its overrides applied and checked; its references are not replaced yet."""

    name: str
    path: Path
    config: dict[str, Any]
    resources: Resources
    overrides: tuple[str, ...] = field(default=())
    inputs: own.Inputs = field(default_factory=own.Inputs)

    @property
    def description(self) -> str:
        return str(self.config.get("description") or "")

    @property
    def given_name(self) -> str:
        """What a command line calls it: its name if it is the kit's own, else its file's path."""
        name = self.name if self.path.parent == paths.RECIPES else str(self.path)
        return " ".join([name, *self.inputs.options])

    @property
    def entry(self) -> entries.Entry:
        """What it starts, and what the kit can do with that."""
        return entries.find(self.entry_name)

    @property
    def entry_name(self) -> str:
        return str(self.config.get("entry") or COMMON["entry"].default)

    @property
    def target(self) -> str:
        """What the entry's name says after its colon: the path of a script, torchtune's name."""
        return self.entry_name.partition(":")[2]

    @property
    def script(self) -> Path | None:
        """The user's own training script; None for another entry."""
        return self.entry.program(self) if self.entry.own_code else None

    @property
    def records(self) -> Records | None:
        """Where another trainer keeps its progress; None if it writes the kit's own files."""
        launch = self.entry.launch
        return launch.recorded(self.config) if launch and not launch.keeps_ours else None

    @property
    def stop_signal(self) -> str:
        """The signal that asks its ranks to save and stop; "" if the stop file does."""
        return self.records.stop if self.records else str(self.config.get("stop_signal") or "")

    @property
    def tracking_address(self) -> str:
        """The address of the MLflow server that its job may write to, "" for none."""
        given = (self.config.get("env") or {}).get("MLFLOW_TRACKING_URI")
        address = str(given or self.config.get("tracking") or "")
        return address if "://" in address else ""

    @property
    def work_dir(self) -> Path | None:
        """The folder in which another trainer runs without code of the user's."""
        if not self.entry.engine or self.code_root:
            return None
        return self.path.parent / Path(str(self.config.get("work_dir") or "")).expanduser()

    @property
    def code_root(self) -> Path | None:
        """The folder that is copied into the run of a script or command of the user's own."""
        given = self.config.get("code_root")
        if not given:
            folder = self.script.parent if self.script else self.path.parent
            return folder if self.entry.own_code else None
        return (self.path.parent / Path(str(given)).expanduser()).resolve()

    @property
    def secrets(self) -> dict[str, Path]:
        """Names of variables that a job reads from files, and the files."""
        given = self.config.get("secrets") or {}
        named = given if isinstance(given, dict) else dict.fromkeys(given)
        return {
            name: Path(str(path)).expanduser() if path else SECRETS.expanduser() / name
            for name, path in named.items()
        }

    @property
    def notify(self) -> Notify:
        """Who is notified when the run starts, ends or fails."""
        return Notify.of(self.config.get("notify") or {})

    @property
    def environment(self) -> Environment | None:
        """What the ranks run in; None for the kit's virtual environment as it is."""
        if not (given := self.config.get("environment")):
            return None
        from launcher.recipe.environment import Environment, record  # most runs have none

        return Environment.of(record(given))

    @property
    def starts_backend(self) -> bool:
        """Whether its program runs on the host, and starts a backend in the environment."""
        return bool(self.entry.backend(self.config))

    @property
    def umask(self) -> str:
        """The umask of the run: what others may not do with its files."""
        return "027" if self.config.get("share") == "group" else "077"

    @property
    def timeout_s(self) -> int | None:
        """How long one attempt may take, None for as long as Slurm allows."""
        given = self.config.get("timeout")
        return None if given is None else time_limit_s(str(given))

    @property
    def hang_timeout_s(self) -> int:
        """How long training may make no step before the attempt is restarted; 0: no limit."""
        given = self.config.get("hang_timeout_s")
        return int(COMMON["hang_timeout_s"].default if given is None else given)

    @property
    def node_check(self) -> bool:
        """Whether nodes are checked before ranks start on them."""
        return self.config.get("node_check") is not False

    @property
    def redact_output(self) -> bool:
        """Whether secrets are kept out of the logs of a script."""
        return self.config.get("redact_output") is True

    @property
    def max_gpu_hours(self) -> float | None:
        """What all attempts of a run may use together, None without a limit."""
        given = self.config.get("max_gpu_hours")
        return None if given is None else float(given)

    @property
    def max_retries(self) -> int:
        """How many failed attempts in a row, with nothing new saved between them, are retried."""
        given = self.config.get("max_retries")
        return self.entry.max_retries if given is None else int(given)

    @property
    def method(self) -> str:
        """As `method_of` the model block; script for the user's own."""
        if self.entry.own_code or self.entry.engine:
            return self.entry_name.partition(":")[0]
        return method_of(self.config.get("model") or {})

    @property
    def notes(self) -> list[str]:
        """A line about the keys that are accepted and not used, and one for each used in part."""
        given = [f"{key.name} ({key.unused})" for key in unused(self.config, self.entry.keys)]
        not_used = [f"keys that are not used: {'; '.join(given)}"] if given else []
        return [*self.inputs.notes, *not_used, *self.entry.notes(self.config)]

    def profiled(self) -> Recipe:
        """Return the recipe with its profiler turned on; UsageFault if its entry has none."""
        if not self.entry.can_profile:
            raise UsageFault(
                f"--profile: {self.entry_name} does not support the kit's profiler: leave "
                "--profile out"
            )
        profiler = {**(self.config.get("profiler") or {}), "enabled": True}
        return replace(self, config={**self.config, "profiler": profiler})

    def resolved(self, root: Path, run_dir: str) -> dict[str, Any]:
        """Return the whole recipe with every ${...} replaced for a run in run_dir."""
        config, faults = self.resolve(root, run_dir)
        if faults:
            raise RecipeFault([f"{fault.text} in {self.path}" for fault in faults])
        return config

    def resolve(self, root: Path, run_dir: str) -> tuple[dict[str, Any], list[Fault]]:
        """Return the same, and the faults of references that lead nowhere."""
        folders = {"repo_root": str(paths.REPO_ROOT)}
        folders |= {f"{name}_root": str(root / name) for name in ("models", "datasets")}
        return extend.resolve({**self.config, "output_dir": run_dir}, folders)

    def train_config(self, root: Path, run_dir: str) -> dict[str, Any]:
        """Return what the trainer reads: the resolved recipe without the launcher's keys."""
        config = self.resolved(root, run_dir)
        if self.entry.engine:
            return self.entry.engine.config(config, run_dir)
        return {k: value for k, value in config.items() if k == "output_dir" or k not in COMMON}

    def parameters(self, root: Path, run_dir: str) -> dict[str, Any]:
        """Return what the user's own script reads from its YAML file."""
        return dict(self.resolved(root, run_dir).get("parameters") or {})


def method_of(model: Mapping[str, Any]) -> str:
    """Return full, or the kind of adapter that a `model` block names, with a q over an NF4 base."""
    name = adapters.name_of(model)
    if name is None:
        return "full"
    return f"{'q' if adapters.is_quantised(model) else ''}{name.rpartition('.')[2]}"


def time_limit_s(text: str) -> int:
    """Return a Slurm time limit (minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds."""
    days, dash, clock = text.rpartition("-")
    fields = [int(part) for part in clock.split(":")]
    if not dash and len(fields) < 3:
        fields = [0, *fields]  # no hours
    hours, minutes, seconds = (*fields, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def names() -> list[str]:
    """Return the names of the recipes that the kit ships, sorted."""
    return yamlfile.names(paths.RECIPES)


def find(name: str) -> Path:
    """Return the file of a recipe, given its name, torchtune's of a config, or a file's path."""
    is_kits = NAME.match(name) and (paths.RECIPES / f"{name}.yaml").is_file()
    if not is_kits and not name.endswith((".yaml", ".yml")):
        of_torchtune = stock.configs()
        if name in of_torchtune:
            return of_torchtune[name]
        from launcher.recipe import absent  # most recipes are found

        if other := absent.file(name):
            raise RecipeFault(other)
        if hint := nearest(name, of_torchtune) if "/" in name else "":
            raise RecipeFault(f"torchtune has no config {name!r}{hint}: list them with: tune ls")
    return yamlfile.find("recipe", name, paths.RECIPES, "list them with: cookbook recipes")


def _split(name: str) -> tuple[str, str]:
    """Return the entry and the file of trl:FILE, another trainer's config; "" for no entry."""
    prefix, colon, file = name.partition(":")
    if not colon or f"{prefix}:" not in entries.ENTRIES:
        if colon and Path(file).is_file():
            entries.find(f"{prefix}:{file}")
        return "", name
    engine = entries.ENTRIES[f"{prefix}:"].engine
    if engine and engine.overrides == "file" and file.endswith((".yaml", ".yml")):
        return f"{prefix}:", file
    raise RecipeFault(f"{name} is an entry, and no file: write entry: {name} in a recipe")


def load(
    name: str,
    overrides: Iterable[str] = (),
    resources: Mapping[str, Any] | None = None,
    data: str | None = None,
    model: str | None = None,
) -> Recipe:
    """Return the recipe with its overrides; RecipeFault lists every fault found in it.

    overrides are 'key.path=value' (the key must exist or be known), '+key.path=value' (adds a
    key) or '~key.path' (removes one). resources are those given by options such as --nodes. data
    and model take the place of the recipe's own: see `launcher.recipe.own`.
    """
    prefix, file = _split(name)
    path = find(file)
    config, files = extend.read(path)
    if prefix or not {"entry", "checkpointer"} & config.keys():
        from launcher.recipe import others  # hardly any file is another tool's

        config = others.as_recipe(config, path, prefix)
    for key in prepared.BLOCKS:
        if key in config:
            config[key] = prepared.expanded(config[key], config.get("dataset"))
    overrides = tuple(overrides)
    early = [text for text in overrides if override.key_of(text) in ("entry", "config")]
    texts = override.apply(config, early)
    _read_engine(config, path)
    inputs, more = _own_inputs(config, path, overrides, data, model)
    texts += [*more, *override.apply(config, overrides)]
    own.use_whole_paths(config, overrides, files)
    options = {key: value for key, value in (resources or {}).items() if value is not None}
    _complete(config, path, options)
    recipe = Recipe(path.stem, path, config, Resources(), overrides, inputs)
    resolved, faults = recipe.resolve(paths.REPO_ROOT, "unset")
    try:
        faults += [*validate.faults(resolved, recipe.entry), *own.mixes(resolved)]
    except UsageFault as fault:
        faults += [Fault("entry", text) for text in fault.faults]
    texts += [
        f"{fault.text}, in {_place(fault.key, files, overrides, options)}" for fault in faults
    ]
    if texts:
        raise RecipeFault(list(dict.fromkeys(texts)))
    return replace(recipe, resources=Resources.of(resolved["resources"]))


def _complete(config: dict[str, Any], path: Path, options: Mapping[str, Any]) -> None:
    """Put into config what options ask for, and what follows from its entry and its place."""
    asked = config.get("resources")
    if asked is None or isinstance(asked, dict):
        given = {key: value for key, value in options.items() if key != "environment"}
        config["resources"] = (asked or {}) | given
    if named := options.get("environment"):
        config["environment"] = named
    if (engine := _engine(config)) is not None:
        engines.default_environment(config, engine)
    if not config.get("entry"):
        config["entry"] = stock.entry_of(path, config) or COMMON["entry"].default
    functions.use_whole_paths(config, _method(config), path.parent)
    if stock.config_name(path):
        # It means what torchtune says, wherever the kit's own default is another.
        for key in ("dataset", "dataset_val"):
            if key in config:
                config[key] = with_train_on_input(config[key], True)
    model = config.get("model")
    builder = model.get("_component_") if isinstance(model, dict) else None
    if _method(config) and builder in (None, "", TRANSFORMERS):
        # A model folder has its tokenizer.
        config.setdefault("tokenizer", dict(own.FOLDERS_TOKENIZER))


def _own_inputs(
    config: dict[str, Any],
    path: Path,
    overrides: tuple[str, ...],
    data: str | None,
    model: str | None,
) -> tuple[own.Inputs, list[str]]:
    """Put the user's data and model into config; return what was found, and the faults."""
    entry = config.get("entry") or stock.entry_of(path, config) or COMMON["entry"].default
    if not _method({"entry": entry}):
        named = [option for option, name in (("--data", data), ("--model", model)) if name]
        message = f"{path.name} starts {entry}, which has keys of its own: leave it out"
        return own.Inputs(), [f"{each}: {message}" for each in named]
    return own.use(config, overrides, data, model, method_of(config.get("model") or {}))


def _method(config: Mapping[str, Any]) -> type[TrainConfig] | None:
    """Return the method of the kit's trainer that reads it; `validate` reports a wrong entry."""
    try:
        return entries.of(config).method
    except RecipeFault:
        return None


def _read_engine(config: dict[str, Any], path: Path) -> None:
    """Read the config file of another trainer into the recipe; a wrong entry is `validate`'s."""
    prefix, _, target = str(config.get("entry") or "").partition(":")
    if (engine := _engine(config)) is not None and target:
        engines.read(config, path, engine, f"{prefix}:", target)


def _engine(config: Mapping[str, Any]) -> Engine | None:
    """Return the other trainer that a recipe starts, None for the kit's and the user's own."""
    prefix, colon, _ = str(config.get("entry") or "").partition(":")
    row = entries.ENTRIES.get(prefix + colon)
    return row.engine if row else None


def _place(
    key: str, files: list[Path], overrides: tuple[str, ...], options: Mapping[str, Any]
) -> str:
    """Say where the value of a key was given: an option, an override, or a line of a file."""
    if key.startswith("resources.") and key.removeprefix("resources.") in options:
        return f"the option --{key.removeprefix('resources.').replace('_', '-')}"
    for text in reversed(overrides):
        if f"{key}.".startswith(f"{override.key_of(text)}."):
            return f"the override {text!r}"
    while key:
        for file in files:
            if line := yamlfile.line_of(file, key):
                return f"{file}, line {line}"
        key = key.rpartition(".")[0]  # a key that is missing: the block that lacks it
    return str(files[0])
