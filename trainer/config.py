"""A run's train.yaml: read, checked, and made into one object with an attribute for each key."""

import math
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

from runspec import yamlrules
from runspec.keys.common import COMMON
from runspec.keys.key import REQUIRED, children, faults
from runspec.keys.sft import SFT, recomputed
from trainer import rules
from trainer.components import arguments_of as arguments_of
from trainer.components import component as component
from trainer.components import instantiate as instantiate
from trainer.errors import ConfigError

# What the products of fp8 take as rows: see trainer/layers/fp8.py.
FP8_MULTIPLE = 16
KEYS = SFT | {"output_dir": replace(COMMON["output_dir"], default=REQUIRED, unused="")}
PROFILER_KEYS = {name: key.default for name, key in children(SFT, "profiler").items()}

_USED = {name: key for name, key in children(KEYS).items() if not (key.unused or key.refused)}
_Values = make_dataclass("_Values", [(name, Any) for name in _USED], frozen=True)


@dataclass(frozen=True)
class TrainConfig(_Values):
    """A checked train.yaml: an attribute for each key that is used (see docs/keys.md).

    output_dir is a Path; dataset_val holds what it takes from dataset; activation_checkpointing is
    as runspec.keys.sft.recomputed returns it. notes: about keys that are not used.
    """

    notes: tuple[str, ...]

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder that the weights come from."""
        return Path(self.checkpointer["checkpoint_dir"])

    @property
    def fp8_recipe(self) -> str | None:
        """How the products of the blocks are scaled in fp8; None without it."""
        return self.fp8_recipe_name if self.enable_fp8_training else None

    @property
    def row_multiple(self) -> int:
        """What the length of every row must be divisible by, for tensor parallelism and fp8."""
        return math.lcm(self.tensor_parallel_dim, FP8_MULTIPLE if self.enable_fp8_training else 1)

    @property
    def data_cache(self) -> Path:
        """The folder of tokenised datasets; beside the run directories if none is given."""
        if self.data_cache_dir is None:
            return self.output_dir.parent / ".data_cache"
        return Path(self.data_cache_dir).expanduser().absolute()


def load(path: Path) -> TrainConfig:
    """Read and check `path`.

    Raises:
        ConfigError: the file cannot be read, or values are wrong; names all faults at once.
    """
    return parse(read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The resolved content of a YAML file; raises ConfigError with line and column."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=yamlrules.loader(yaml))
        # The launcher has resolved every interpolation, and OmegaConf takes a while to import.
        if "${" in text:
            content = _interpolated(path, content)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the run's train.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{where}: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys and values, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _interpolated(path: Path, content: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(content), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None


def parse(content: dict[str, Any]) -> TrainConfig:
    """Check a resolved config; raises ConfigError with all faults at once."""
    found = list(faults(content, KEYS))
    wrong = {fault.key.partition(".")[0] for fault in found}
    values = _complete({name: None if name in wrong else content.get(name) for name in _USED})
    texts = [fault.text for fault in found] + list(rules.faults(values))
    if texts:
        raise ConfigError(*texts)
    values["output_dir"] = Path(values["output_dir"]).absolute()
    values["activation_checkpointing"] = recomputed(values)
    return TrainConfig(**values, notes=tuple(rules.notes(content)))


def _complete(given: dict[str, Any]) -> dict[str, Any]:
    """A value for each key: the given one, else its default; None for a required one."""
    values = {
        name: (None if key.default is REQUIRED else key.default)
        if given[name] is None
        else given[name]
        for name, key in _USED.items()
    }
    if (values["fsdp"] or {}).get("cpu_offload"):
        values["fsdp_cpu_offload"] = True
    # Without it each GPU keeps a whole replica's gradients, which is what offloading is to save.
    if values["sync_each_micro_batch"] is None:
        values["sync_each_micro_batch"] = values["fsdp_cpu_offload"]
    if values["batch_size_val"] is None:
        values["batch_size_val"] = values["batch_size"]
    training, validation = values["dataset"], values["dataset_val"]
    # What dataset_val leaves out is dataset's, unless it names a component with other keys.
    component_of = (validation or {}).get("_component_")
    if training and validation and component_of in (None, training["_component_"]):
        values["dataset_val"] = {**training, **validation}
    return values
