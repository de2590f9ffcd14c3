"""A recipe, as data: what it starts, what Slurm has to give it, and its whole content.

launcher/recipe/load.py reads one from its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher import paths
from launcher.errors import RecipeFault, UsageFault
from launcher.recipe import extend
from launcher.recipe.environment import Environment, record
from runspec import adapters
from runspec.engines import Records
from runspec.keys.common import COMMON, ResourceKeys
from runspec.keys.key import Fault, Keys, unused
from runspec.keys.train import TrainConfig

Content = Mapping[str, Any]
# The folder of secrets that a recipe names without a path.
SECRETS = Path("~/.config/slurm-cookbook/secrets")


@dataclass(frozen=True)
class Entry:
    """A thing that ranks can run: a row of the table in entries.py, or of a plug-in's."""

    # All keys of its recipes.
    keys: Keys
    # The keys of each block inside an open block, by its key: those of a task, under tasks.NAME.
    inner: Mapping[str, Keys] = field(default_factory=dict)
    # Its name in messages.
    title: str = "the kit's trainer"
    # The Python module that its ranks run, and its first arguments.
    module: str = ""
    # What torchrun starts as each rank, as shell text, from the recipe and its resolved content.
    command: Callable[[Recipe, Content], str] = lambda recipe, config: (
        f'python -P -m {recipe.entry.module} "$RUN_DIR/train.yaml"'
    )
    # The file that is started, None for a module.
    program: Callable[[Recipe], Path | None] = lambda recipe: None
    # It runs on the host with the kit's interpreter, and starts its backend in the environment.
    on_host: bool = False
    # The package that the environment needs, as what runs on the host starts it there, or "".
    backend: Callable[[Content], str] = lambda config: ""
    # The user's own program: its folder is copied, and it gets parameters, not a train.yaml.
    own_code: bool = False
    # It is started once per node, without torchrun.
    per_node: bool = False
    # Its recipes may hold keys that are not in keys.
    other_keys: bool = False
    # The config of a training method of the kit's trainer, which trainer.check looks at.
    method: type[TrainConfig] | None = None
    # MODULE:CLASS of what the supervisor calls beside its ranks (slurm/companion.py), or "".
    companion: str = ""
    # It has the kit's profiler.
    can_profile: bool = False
    # It continues from its last checkpoint after a restart.
    resumes: bool = False
    # train, evaluate or serve.
    purpose: str = "train"
    # What its table of keys does not see of a recipe.
    faults: Callable[[Content], Iterable[Fault]] = lambda config: ()
    # What the user should know of keys that are accepted.
    notes: Callable[[Content], Iterable[str]] = lambda config: ()

    # Of a trainer that is not the kit's:
    # Where its progress is, and how it is stopped; None if it writes the kit's own files.
    records: Callable[[Content], Records | None] = lambda config: None
    # The package of an engine, which reads a config of its own; "" for all that is no engine.
    engine: str = ""
    # Its config, from the resolved recipe and the run's directory; None: the recipe is its config.
    config: Callable[[Content, str], dict[str, Any]] | None = None
    # Puts the config file that a recipe in a file names into it, once; RecipeFault if it cannot.
    read: Callable[[dict[str, Any], Path], None] | None = None
    # Whether the content of a file without `entry` is its config; None: it reads no such files.
    recognises: Callable[[Content], bool] | None = None
    # Its packages, built for a recipe whose environment lacks them; none: the kit has them.
    dependencies: tuple[str, ...] = ()
    # They are built with the kit's versions of all others.
    pins: bool = True
    # Why it would refuse this many ranks.
    layout_fault: Callable[[Content, int], str | None] = lambda config, ranks: None

    @property
    def max_retries(self) -> int:
        """How often a failed attempt is retried if the recipe does not say it."""
        return 3 if self.resumes else 0


# Resources that the job script asks for in its own way; the others are options of sbatch and srun.
_OWN_WAY = {"nodes", "gpus_per_node", "gpu_type", "cpus_per_gpu", "exclusive", "rollout"}


@dataclass(frozen=True)
class Resources(ResourceKeys):
    """What one run asks of Slurm."""

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> Resources:
        """Return the resources that a checked block gives."""
        given: dict[str, Any] = {key: value for key, value in block.items() if value is not None}
        given |= {key: str(given[key]) for key in ("mem", "time") if key in given}
        return cls(**given)

    def options(self, without: Iterable[str] = ()) -> dict[str, str]:
        """Return the options of sbatch and srun that are given, by name."""
        left_out = (*_OWN_WAY, *without)
        given = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in left_out
        }
        return {name.replace("_", "-"): value for name, value in given.items() if value is not None}

    @property
    def world_size(self) -> int:
        """Number of ranks: one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def allocated_nodes(self) -> int:
        """Number of nodes that the job asks Slurm for, those that generate included."""
        return self.nodes + self.rollout

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds, None if the partition decides."""
        return None if self.time is None else time_limit_s(self.time)


class Inputs(NamedTuple):
    """What the user named beside the recipe: the options, and a line on what was found in each."""

    options: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A recipe with its overrides applied and checked; its references are not replaced yet."""

    name: str
    path: Path
    config: dict[str, Any]
    # What it starts, and what the kit can do with that.
    entry: Entry
    resources: Resources
    overrides: tuple[str, ...] = ()
    inputs: Inputs = field(default_factory=Inputs)

    @property
    def description(self) -> str:
        return str(self.config.get("description") or "")

    @property
    def given_name(self) -> str:
        """What a command line calls it: its name if it is the kit's own, else its file's path."""
        name = self.name if self.path.parent == paths.RECIPES else str(self.path)
        return " ".join([name, *self.inputs.options])

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
        return self.entry.records(self.config)

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
    def environment(self) -> Environment | None:
        """What the ranks run in; None for the kit's virtual environment as it is."""
        given = self.config.get("environment")
        return Environment.of(record(given)) if given else None

    @property
    def starts_backend(self) -> bool:
        """Whether its program runs on the host, and starts a backend in the environment."""
        return bool(self.entry.backend(self.config))

    @property
    def umask(self) -> str:
        """The umask of the run: what others may not do with its files."""
        return "027" if self.config.get("share") == "group" else "077"

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
        config, faults = extend.resolve(
            {**self.config, "output_dir": run_dir}, extend.folders(root)
        )
        if faults:
            raise RecipeFault([f"{fault.text} in {self.path}" for fault in faults])
        return config

    def train_config(self, root: Path, run_dir: str) -> dict[str, Any]:
        """Return what the trainer reads: the resolved recipe without the launcher's keys."""
        config = self.resolved(root, run_dir)
        if self.entry.config:
            return self.entry.config(config, run_dir)
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
