"""A recipe: a torchtune config plus what Slurm has to give it, read, overridden and validated."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import paths, stock, yamlfile
from launcher.errors import RecipeFault, UsageFault, nearest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
NAME_RULE = "letters, digits, '.', '_' and '-', beginning with a letter or digit, 64 at most"

_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]{0,255}\Z")
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]{0,255}\Z")
_CONSTRAINT = re.compile(r"[A-Za-z0-9(\[][A-Za-z0-9._,&|*()\[\]-]{0,255}\Z")
_MEMORY = re.compile(r"\d+[KMGT]?\Z")
_TIME = re.compile(r"(?:\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d+(?::[0-5]?\d){0,2})\Z")

# A kind is a pattern that text must match, or one of the words that _fault_of_kind reads.
Kind = str | re.Pattern[str]

RESOURCES: dict[str, Kind] = {
    "nodes": "positive",
    "gpus_per_node": "positive",
    "gpu_type": NAME,
    "cpus_per_gpu": "positive",
    "mem": _MEMORY,
    "time": _TIME,
    "partition": _NAMES,
    "account": NAME,
    "qos": NAME,
    "constraint": _CONSTRAINT,
    "reservation": NAME,
    "exclude": _NODES,
    "exclusive": "bool",
}

_EXAMPLES = {
    "mem": "a size such as 900G, or 0 for all of a node's memory",
    "timeout": "a limit such as 04:00:00, 90 (minutes) or 2-00:00:00",
    "time": "a limit such as 04:00:00, 90 (minutes) or 2-00:00:00",
    "constraint": "node features such as h100 or h100&ib",
    "model": "a repository of the hub such as org/name or org/name@revision",
    "dataset": "a repository of the hub such as org/name or org/name@revision",
    "exclude": "node names such as gpu-07 or gpu-[07-09]",
    "partition": "a partition's name, or several with commas",
}

# A repository of the hub, and a branch, tag or commit after an @.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[A-Za-z0-9][\w./-]*)?\Z")

# What cookbook download fetches: the model to checkpointer.checkpoint_dir, the dataset for jobs.
HUB: dict[str, Kind] = {"model": _REPOSITORY, "dataset": _REPOSITORY}

# The kit's own keys: the trainer never sees them.
LAUNCHER_KEYS: dict[str, Kind] = {
    "description": "text",
    "entry": "text",
    "resources": "mapping",
    "prepare": "mapping",
    "hub": "mapping",
    "max_retries": "count",
    "timeout": _TIME,
    "env": "mapping",
    "secrets": "any",
}

# What an entry of the user's own, script:, takes beside those.
SCRIPT_KEYS: dict[str, Kind] = {
    "code_root": "text",
    "args": "list",
    "parameters": "mapping",
    "output_dir": "text",
}

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# A job script is a file that others may read and Slurm keeps: no secret goes into it.
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
# Where a secret lies that a recipe names without saying where.
SECRETS = Path("~/.config/slurm-cookbook/secrets")

# What trainer.sft reads: torchtune's keys where torchtune has one. A test holds this list and the
# trainer's own together.
TRAINER_KEYS: dict[str, Kind] = {
    "output_dir": "text",
    "seed": "count",
    "shuffle": "bool",
    "device": "text",
    "dtype": "text",
    "model": "mapping",
    "tokenizer": "mapping",
    "checkpointer": "mapping",
    "dataset": "any",
    "dataset_val": "mapping",
    "data_cache_dir": "text",
    "num_workers": "count",
    "collate_fn": "text",
    "batch_size": "positive",
    "batch_size_val": "positive",
    "epochs": "positive",
    "max_steps": "positive",
    "max_steps_per_epoch": "positive",
    "gradient_accumulation_steps": "positive",
    "sync_each_micro_batch": "bool",
    "clip_grad_norm": "number",
    "max_non_finite_steps": "positive",
    "optimizer": "mapping",
    "optimizer_in_bwd": "bool",
    "lr_scheduler": "mapping",
    "loss": "mapping",
    "compile": "bool",
    "enable_fp8_training": "bool",
    "fp8_recipe_name": "text",
    "master_weights": "text",
    "enable_activation_checkpointing": "bool",
    "enable_activation_offloading": "bool",
    "ac_mode": "text",
    "ac_option": "any",
    "custom_sharded_layers": "list",
    "fsdp": "mapping",
    "fsdp_cpu_offload": "bool",
    "fsdp_reshard_after_forward": "bool",
    "fsdp_prefetch": "count",
    "fsdp_reduce_dtype": "text",
    "memory_efficient_fsdp_wrap": "bool",
    "low_cpu_ram": "bool",
    "tensor_parallel_dim": "positive",
    "tensor_parallel_plan": "mapping",
    "data_parallel_replicate_dim": "positive",
    "data_parallel_shard_dim": "any",
    "metric_logger": "mapping",
    "log_every_n_steps": "positive",
    "log_peak_memory_stats": "bool",
    "profiler": "mapping",
    "run_val_every_n_steps": "positive",
    "save_every_n_steps": "count",
    "save_every_minutes": "number",
    "keep_last_n_checkpoints": "positive",
    "export_checkpoint": "text",
    "enable_async_checkpointing": "bool",
    "resume_from_checkpoint": "bool",
    "save_adapter_weights_only": "bool",
    "cudnn_deterministic_mode": "count",
    "generate": "mapping",
}


@dataclass(frozen=True)
class Resources:
    """What one run asks of Slurm; None leaves the choice to the cluster."""

    nodes: int = 1
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
    exclude: str | None = None
    exclusive: bool = False

    @property
    def world_size(self) -> int:
        """Ranks in all: one a GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds, None where the partition decides."""
        return None if self.time is None else time_limit_s(self.time)


@dataclass(frozen=True)
class Recipe:
    """A recipe with its overrides applied and checked; interpolations still stand in it."""

    name: str
    path: Path
    config: dict[str, Any]
    resources: Resources
    overrides: tuple[str, ...] = field(default=())

    @property
    def description(self) -> str:
        return str(self.config.get("description", ""))

    @property
    def typed(self) -> str:
        """What a command line calls it: the name of one of the kit's own, else its file's path."""
        return self.name if self.path.parent == paths.RECIPES else str(self.path)

    @property
    def entry(self) -> str:
        return str(self.config.get("entry", "sft"))

    @property
    def script(self) -> Path | None:
        """The user's own training script; None for another entry."""
        if not self.entry.startswith("script:"):
            return None
        script = Path(self.entry.removeprefix("script:")).expanduser()
        return (self.path.parent / script).resolve()

    @property
    def code_root(self) -> Path | None:
        """The folder that a run of the user's own script takes a copy of."""
        if self.script is None:
            return None
        given = self.config.get("code_root")
        if not given:
            return self.script.parent
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
    def timeout_s(self) -> int | None:
        """How long one attempt may take, None for as long as Slurm lets it."""
        given = self.config.get("timeout")
        return None if given is None else time_limit_s(str(given))

    @property
    def max_retries(self) -> int:
        """How many failed attempts in a row, none of them with a newer checkpoint, are retried.

        Scripts that are not the kit's, which may not resume, are retried only where asked for.
        """
        given = self.config.get("max_retries")
        return int(given) if given is not None else 3 if self.entry == "sft" else 0

    @property
    def method(self) -> str:
        """full, lora, dora, qlora or qdora, as the model block says; script for the user's own."""
        if self.script:
            return "script"
        return method_of(self.config.get("model", {}))

    def resolved(self, root: Path, run_dir: str) -> dict[str, Any]:
        """Return the whole recipe with every ${...} filled in for a run in run_dir."""
        config = {**self.config, "output_dir": run_dir}
        return resolve(config, places(root), str(self.path))

    def train_config(self, root: Path, run_dir: str) -> dict[str, Any]:
        """Return what the trainer reads: the resolved recipe less the kit's own keys."""
        config = self.resolved(root, run_dir)
        return {key: value for key, value in config.items() if key not in LAUNCHER_KEYS}

    def parameters(self, root: Path, run_dir: str) -> dict[str, Any]:
        """Return what the user's own script is handed over as a YAML file."""
        return dict(self.resolved(root, run_dir).get("parameters") or {})


def method_of(model: Mapping[str, Any]) -> str:
    """Return full, lora, dora, qlora or qdora, as a `model` block says."""
    builder = str(model.get("_component_") or "").rpartition(".")[2]
    if not builder.startswith(("lora_", "qlora_")):
        return "full"
    quantised = model.get("quantize_base", builder.startswith("qlora_"))
    return f"{'q' if quantised else ''}{'dora' if model.get('use_dora') else 'lora'}"


def places(root: Path) -> dict[str, str]:
    """Return the names that a recipe may use beside its own keys, as in ${models_root}/llama."""
    return {
        "repo_root": str(paths.REPO_ROOT),
        "models_root": str(root / "models"),
        "datasets_root": str(root / "datasets"),
    }


def time_limit_s(text: str) -> int:
    """Return a Slurm time limit (minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds."""
    days, dash, rest = text.rpartition("-")
    fields = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*fields, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(fields) == 1:
        return fields[0] * 60
    if len(fields) == 2:
        return fields[0] * 60 + fields[1]
    return (fields[0] * 60 + fields[1]) * 60 + fields[2]


def names() -> list[str]:
    """Return the names of the recipes that the kit ships, sorted."""
    return sorted(path.stem for path in paths.RECIPES.glob("*.yaml"))


def find(name: str) -> Path:
    """Return the file of a recipe, given its name or the path of a YAML file."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise RecipeFault(
                f"there is no recipe file {name}: list the kit's own with: cookbook recipes"
            )
        if not NAME.match(path.stem):
            raise RecipeFault(
                f"the recipe file name {path.name!r} may hold only {NAME_RULE}: rename it"
            )
        return path
    if not NAME.match(name):
        raise RecipeFault(
            f"the recipe name {name!r} may hold only {NAME_RULE}; give a file of your own as a "
            "path "
            "that ends in .yaml"
        )
    path = paths.RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise RecipeFault(
            f"there is no recipe {name!r}{nearest(name, names())}: list them with: cookbook recipes"
        )
    return path


def load(
    name: str, overrides: Iterable[str] = (), resources: Mapping[str, Any] | None = None
) -> Recipe:
    """Return the recipe with its overrides; RecipeFault lists every fault found in it.

    overrides are 'key.path=value' (the key must exist or be known), '+key.path=value' (adds a
    key) or '~key.path' (removes one). resources are those given by options such as --nodes.
    """
    path = find(name)
    config = _whole(path, ())
    overrides = tuple(overrides)
    faults = _override(config, overrides)
    for key, value in (resources or {}).items():
        if value is not None:
            _mapping(config, "resources")[key] = value
    if not config.get("entry"):
        model = config.get("model")
        builder = str(model.get("_component_")) if isinstance(model, dict) else ""
        config["entry"] = stock.entry_of(path, builder) or "sft"
    faults += _faults(config, str(path))
    if faults:
        raise RecipeFault(faults)
    given = config.get("resources") or {}
    values = {key: given[key] for key in RESOURCES if given.get(key) is not None}
    for key in ("mem", "time"):
        if key in values:
            values[key] = str(values[key])
    recipe = Recipe(path.stem, path, config, Resources(**values), overrides)
    # An interpolation that leads nowhere, or to what its key does not take, is a fault now.
    resolved = recipe.resolved(paths.REPO_ROOT, "unset")
    filled = {key: resolved[key] for key, value in config.items() if _is_reference(value)}
    faults = faults_in(filled, _known(recipe.entry), "", str(path), recipe.entry)
    if faults:
        raise RecipeFault(faults)
    return recipe


def _mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.setdefault(key, {})
    if not isinstance(value, dict):
        value = config[key] = {}
    return value


# What recipes share --------------------------------------------------------------------------


def _whole(path: Path, trail: tuple[Path, ...]) -> dict[str, Any]:
    """Return a file's keys over those of the files that its `extends` names, the last one first."""
    config = yamlfile.load(path)
    bases = config.pop("extends", None) or []
    whole: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        file = _base(base, path)
        if file in (*trail, path):
            raise RecipeFault(f"extends: {base} in {path} leads back to itself: leave it out")
        whole = _laid_over(whole, _whole(file, (*trail, path)))
    return _laid_over(whole, config)


def _base(name: Any, path: Path) -> Path:
    """Return the file that an `extends` names: a path beside the recipe, a base or a recipe."""
    if isinstance(name, str) and name.endswith((".yaml", ".yml")):
        choices = [path.parent / Path(name).expanduser()]
    elif isinstance(name, str) and all(NAME.match(part) for part in name.split("/")):
        choices = [folder / f"{name}.yaml" for folder in (paths.BASES, paths.RECIPES)]
    else:
        choices = []
    found = next((choice for choice in choices if choice.is_file()), None)
    if found is None:
        bases = [str(each.relative_to(paths.BASES))[:-5] for each in paths.BASES.rglob("*.yaml")]
        raise RecipeFault(
            f"extends: there is no {name!r}{nearest(str(name), [*bases, *names()])} for {path}: "
            "name a file of configs/base, a recipe, or the path of a file that ends in .yaml"
        )
    return found.resolve()


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return blocks merged key by key; a block for another component replaces the whole block."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            components = {old.get("_component_"), value.get("_component_")} - {None}
            merged[key] = value if len(components) == 2 else _laid_over(old, value)
        else:
            merged[key] = value
    return merged


# Overrides ----------------------------------------------------------------------------------


def _override(config: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Apply overrides to config in place and return their faults."""
    faults = []
    for text in overrides:
        try:
            _override_one(config, text)
        except UsageFault as fault:
            faults += fault.faults
    return faults


def _override_one(config: dict[str, Any], text: str) -> None:
    removes, adds = text.startswith("~"), text.startswith("+")
    key, equals, value_text = text.lstrip("~+").partition("=")
    parts = key.split(".")
    if not text.isprintable():
        raise UsageFault(
            f"the override {text!r} is more than one line of text: write key.path=value"
        )
    if removes == bool(equals) or not all(
        re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", p) for p in parts
    ):
        raise UsageFault(
            f"cannot read the override {text!r}: write key.path=value, +key.path=value for a new "
            "key, "
            "or ~key.path to remove one"
        )
    parent = config
    for depth, part in enumerate(parts[:-1]):
        inner = parent.get(part)
        if inner is None and (adds or _known_key(config, parts[: depth + 1])):
            inner = parent[part] = {}
        if not isinstance(inner, dict):
            _unknown(".".join(parts[: depth + 1]), parent, parts[:depth], text)
        parent = inner  # type: ignore[assignment]
    leaf = parts[-1]
    if removes:
        if leaf not in parent:
            hint = nearest(leaf, parent)
            raise UsageFault(f"the recipe has no key {key!r}{hint} to remove: leave out {text!r}")
        del parent[leaf]
        return
    if leaf not in parent and not adds and not _known_key(config, parts):
        _unknown(key, parent, parts[:-1], text)
    value = yamlfile.parse(value_text, f"the override {text!r}")
    fault = _changed_type(parent.get(leaf), value)
    if fault:
        raise UsageFault(
            f"{key} must be {fault}, as in the recipe ({parent[leaf]!r}); got {value_text!r}"
        )
    parent[leaf] = value


def _known_key(config: dict[str, Any], parts: list[str]) -> bool:
    """Whether the kit knows the key although this recipe does not hold it."""
    dataset = config.get("dataset")
    if parts[0] == "dataset_val" and len(parts) == 2 and isinstance(dataset, dict):
        return parts[1] in dataset
    if len(parts) == 1:
        return parts[0] in TRAINER_KEYS or parts[0] in LAUNCHER_KEYS or parts[0] in SCRIPT_KEYS
    inner = {"resources": RESOURCES, "hub": HUB}.get(parts[0], {})
    return len(parts) == 2 and parts[1] in inner


def _unknown(key: str, parent: Mapping[str, Any], parents: list[str], text: str) -> None:
    known: list[str] = list(parent)
    if not parents:
        known += [*TRAINER_KEYS, *LAUNCHER_KEYS]
    elif parents == ["resources"]:
        known += RESOURCES
    elif parents == ["hub"]:
        known += HUB
    hint = nearest(key.rpartition(".")[2], known)
    raise UsageFault(
        f"unknown key {key!r}{hint} in the override {text!r}: write +{key}=... to add it all the "
        "same"
    )


def _changed_type(old: Any, new: Any) -> str | None:
    """Say what an override's value should have been, None where it fits the value it replaces."""
    if old is None or new is None:
        return None
    if isinstance(old, bool):
        return None if isinstance(new, bool) else "true or false"
    if isinstance(old, (int, float)):
        is_number = isinstance(new, (int, float)) and not isinstance(new, bool)
        return None if is_number else "a number"
    if isinstance(old, dict):
        return None if isinstance(new, dict) else "a mapping (override one of its keys)"
    return None


# Validation ---------------------------------------------------------------------------------


def _faults(config: dict[str, Any], origin: str) -> list[str]:
    entry = entry_of(config)
    is_script = entry.startswith("script:")
    # What stands for another key's value is checked once it has it.
    given = {key: value for key, value in config.items() if not _is_reference(value)}
    faults = faults_in(given, _known(entry), "", origin, entry)
    faults += environment_faults(config.get("env"), "env", origin)
    faults += _secrets_faults(config.get("secrets"), origin)
    resources = config.get("resources")
    if isinstance(resources, dict):
        faults += faults_in(resources, RESOURCES, "resources.", origin, "sft")
    hub = config.get("hub")
    if isinstance(hub, dict):
        faults += faults_in(hub, HUB, "hub.", origin, "sft")
    if entry == "sft":
        missing = [
            key
            for key in ("model", "tokenizer", "checkpointer", "dataset", "optimizer", "loss")
            if not config.get(key)
        ]
        if missing:
            faults.append(
                f"{origin} lacks {', '.join(missing)}: copy the block from "
                "configs/recipes/llama1b_lora.yaml"
            )
    elif is_script:
        arguments = config.get("args")
        for argument in arguments if isinstance(arguments, list) else []:
            if isinstance(argument, (dict, list)) or not str(argument).isprintable():
                faults.append(f"args holds {argument!r}, which is no line of text, in {origin}")
    elif not re.fullmatch(r"torchtune:[a-z0-9_/]+", entry):
        faults.append(
            f"entry {entry!r} in {origin} is not known: write sft, torchtune: with a name that "
            "'tune ls' prints, or script: with the path of a script of your own"
        )
    prepare = config.get("prepare")
    if isinstance(prepare, dict):
        for key in prepare:
            if key not in ("module", "args", "creates"):
                faults.append(
                    f"unknown key 'prepare.{key}' in {origin}: it takes module, args and creates"
                )
    return faults


def _known(entry: str) -> dict[str, Kind]:
    return {**(SCRIPT_KEYS if entry.startswith("script:") else TRAINER_KEYS), **LAUNCHER_KEYS}


def environment_faults(environment: Any, key: str, origin: str) -> list[str]:
    """Return the faults of a block of variables that go into a job script."""
    faults = []
    for name, value in environment.items() if isinstance(environment, dict) else ():
        if not _VARIABLE.match(str(name)):
            faults.append(f"{key} holds {name!r}, which is no variable's name, in {origin}")
        elif _SECRET.search(str(name)):
            faults.append(
                f"{key} sets {name} in {origin}: a job script is readable, keep secrets out of it; "
                "name it under secrets: in a recipe; the hub's token is read from HF_TOKEN_PATH or "
                "its own login"
            )
        elif isinstance(value, (dict, list)) or not str(value).isprintable():
            faults.append(f"{key}.{name} must be one line of text, in {origin}")
    return faults


def _secrets_faults(secrets: Any, origin: str) -> list[str]:
    if secrets is None:
        return []
    named = dict.fromkeys(map(str, secrets)) if isinstance(secrets, list) else secrets
    if not isinstance(named, dict):
        return [f"secrets must be a list of names, or names with the paths of files, in {origin}"]
    return [
        f"secrets holds {name!r}: {path!r}, which is no variable's name with the path of a file, "
        f"in {origin}"
        for name, path in named.items()
        if not _VARIABLE.match(str(name))
        or not (path is None or (isinstance(path, str) and path.isprintable()))
    ]


def entry_of(config: Mapping[str, Any]) -> str:
    """Return what torchrun starts for this recipe: sft where it does not say."""
    return str(config.get("entry") or "sft")


def faults_in(
    values: dict[str, Any], known: dict[str, Kind], prefix: str, origin: str, entry: str
) -> list[str]:
    """Return the faults of a block: unknown keys, and values that are not of their kind."""
    faults = []
    for key, value in values.items():
        if key not in known:
            # A stock torchtune recipe reads keys of its own; it checks them itself.
            if not entry.startswith("torchtune:"):
                faults.append(f"unknown key '{prefix}{key}'{nearest(str(key), known)} in {origin}")
            continue
        expected = None if value is None else _expected(known[key], value, key)
        if expected:
            faults.append(f"{prefix}{key} must be {expected}, got {value!r}, in {origin}")
    return faults


_WORDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "positive": ("a whole number, 1 or more", lambda v: type(v) is int and v >= 1),
    "count": ("a whole number, 0 or more", lambda v: type(v) is int and v >= 0),
    "number": ("a number", lambda v: type(v) in (int, float)),
    "text": ("one line of text", lambda v: isinstance(v, str) and v.isprintable()),
    "list": ("a list", lambda v: isinstance(v, list)),
    "mapping": ("a block of 'key: value' lines", lambda v: isinstance(v, dict)),
    "any": ("", lambda v: True),
}


def _expected(kind: Kind, value: Any, key: str) -> str | None:
    """Say what value should have been, None where it is of its kind."""
    if isinstance(kind, str):
        words, fits = _WORDS[kind]
        return None if fits(value) else words
    as_text = str(value) if type(value) in (str, int) else ""
    return None if kind.match(as_text) else _EXAMPLES.get(key, NAME_RULE)


# Interpolation ------------------------------------------------------------------------------

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def resolve(config: dict[str, Any], extra: Mapping[str, str], origin: str) -> dict[str, Any]:
    """Return config with ${a.b} replaced by the value at a.b, as OmegaConf does."""
    root = {**extra, **config}
    faults: list[str] = []

    def look_up(reference: str, trail: tuple[str, ...]) -> Any:
        if reference in trail:
            faults.append(f"${{{reference}}} in {origin} refers to itself")
            return ""
        value: Any = root
        for part in reference.strip().split("."):
            if not isinstance(value, dict) or part not in value:
                known = value if isinstance(value, dict) else ()
                faults.append(f"${{{reference}}} in {origin} leads nowhere{nearest(part, known)}")
                return ""
            value = value[part]
        return walk(value, (*trail, reference))

    def walk(value: Any, trail: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner, trail) for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner, trail) for inner in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return copy.deepcopy(look_up(whole.group(1), trail))
        return _REFERENCE.sub(lambda match: str(look_up(match.group(1), trail)), value)

    resolved = walk(config)
    if faults:
        raise RecipeFault(sorted(set(faults)))
    return dict(resolved)
