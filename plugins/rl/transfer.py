"""What the trainer writes for samplers on rollout nodes: a version of the weights.

For transformers' class a file: the whole weights by their names there, an adapter merged. For vLLM
a folder: the adapter as PEFT reads it, or the whole weights as on the Hub, if vLLM would not answer
with that adapter.
"""

import shutil
from pathlib import Path

import torch

from plugins.rl import gathered, names
from plugins.rl.recipe_keys import GrpoConfig
from runspec import adapters
from runspec.files import patient_json
from trainer.checkpoint import adapter, export, weights
from trainer.models.build import Model
from trainer.parallel.world import World
from trainer.sharded import reshard

CPU = torch.device("cpu")
# The settings of LoRA by PEFT that vLLM 0.30 does not apply (lora/peft_helper.py), or only to some
# models' experts.
_NOT_BY_VLLM = ("rank_pattern", "alpha_pattern", "use_dora", "target_parameters", "modules_to_save")


def path_of(folder: Path, config: GrpoConfig, version: str) -> Path:
    """Where a version of the weights is."""
    name = names.WEIGHTS_FOLDER if config.rollout_engine == "vllm" else names.WEIGHTS
    return folder / name.format(version)


def lora_rank(config: GrpoConfig) -> int:
    """The rank of an adapter that vLLM may take; 0 without one.

    vLLM has the base as it is in its folder: over NF4 it would be another policy.
    """
    model = config.model
    if adapters.name_of(model) != "lora" or adapters.is_quantised(model):
        return 0
    return int(model["lora_rank"])


def write(model: Model, config: GrpoConfig, world: World, path: Path) -> int:
    """Write the present weights to `path`, whole or not at all; all ranks call this together.

    Returns:
        How many bytes there are, on rank 0; 0 elsewhere.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    if config.rollout_engine == "vllm":
        _write_folder(model, config, world, temporary)
    else:
        _write_file(model, world, temporary)
    return world.on_main(lambda: _move(temporary, path)) or 0


def make_room(folder: Path, kept: Path) -> None:
    """Remove versions that nobody asks for any more, and what a killed rank was writing.

    A folder that somebody has deleted is made again, here or by plugins/rl/slurm/samplers.py.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    every = names.WEIGHTS_FOLDER.format("*")  # the files, too
    for pattern in (every, f".{every}.tmp"):
        for old in folder.glob(pattern):
            if old == kept:
                continue
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)


def _move(temporary: Path, path: Path) -> int:
    each = [temporary] if temporary.is_file() else [*temporary.glob("*.safetensors")]
    size = sum(file.stat().st_size for file in each)
    temporary.rename(path)
    return size


def _write_file(model: Model, world: World, path: Path) -> None:
    shapes = gathered.shapes(model)
    dtypes = dict.fromkeys(shapes, model.dtype)
    writer = world.on_main(lambda: weights.SafetensorsWriter(path, shapes, dtypes))
    for _, tensor in gathered.tensors(model, world.is_main, CPU):
        if writer is not None:
            writer.add(tensor)
    world.on_main(lambda: None if writer is None else writer.close())


def _write_folder(model: Model, config: GrpoConfig, world: World, folder: Path) -> None:
    reshard(model.module)
    kind = model.module.adapter
    if kind is not None and lora_rank(config):
        export.write_adapter(kind, model, config, folder, world)
        if world.from_main(lambda: _vllm_takes(folder)):
            return
        world.on_main(lambda: shutil.rmtree(folder))
    world.on_main(folder.mkdir)
    export.write_model(model, config, folder, world)


def _vllm_takes(folder: Path) -> bool:
    settings = patient_json(folder / adapter.SETTINGS) or {}
    targets = {str(name).rpartition(".")[2] for name in settings.get("target_modules") or ()}
    tables = targets & {"embed_tokens", "lm_head"}
    return not tables and not any(settings.get(name) for name in _NOT_BY_VLLM)
