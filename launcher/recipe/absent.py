"""What users of other tools ask for and this version does not have, and what to use instead."""

import shlex
from pathlib import Path

# Entries by the names that other tools give to their methods.
ENTRIES = {
    "ppo": "PPO, which trains a critic: use entry: grpo, or a script of TRL (trl:FILE)",
    "rloo": "RLOO: use entry: trl:rloo, or entry: grpo",
    "orpo": "entry of its own for ORPO: use entry: dpo with loss: orpo",
    "simpo": "entry of its own for SimPO: use entry: dpo with loss: simpo",
    "ipo": "entry of its own for IPO: use entry: dpo with loss: ipo",
    "kd": "entry of that name: use entry: distill",
    "gkd": "entry of that name: use entry: distill_on_policy",
}
_CONTAINERS = "use environment: with kind and image (docs/environments.md)"
_PACKAGES = "use environment: with dependencies (docs/environments.md)"
# Top-level keys of a recipe.
KEYS = {
    "container": _CONTAINERS,
    "image": _CONTAINERS,
    "docker": _CONTAINERS,
    "apptainer": _CONTAINERS,
    "dependencies": _PACKAGES,
    "pip": _PACKAGES,
    "conda": _PACKAGES,
    "deepspeed": "the trainer uses FSDP, not DeepSpeed: leave it out, or start a script with "
    "entry: deepspeed:SCRIPT (docs/engines.md)",
    "notify": "Slurm's mail is resources.mail_user and resources.mail_type",
    "on_policy_share": "only entry: distill_on_policy has it (docs/methods.md)",
    "train_router": 'routers of experts are frozen by freeze: ["*.mlp.gate.*"]',
    "expert_imbalance": "estimates assume 1.5: leave it out",
    "reference": "leave it out: a new adapter is compared with its base, all else with a second "
    "model",
    "context_parallel_dim": "sequences are not split over GPUs: use tensor_parallel_dim",
    "pipeline_parallel_dim": "layers are not split over GPUs: use tensor_parallel_dim and FSDP",
}


def file(name: str) -> str:
    """Return how a file is started that is no recipe, "" if its name does not say what it is."""
    from launcher.recipe import batch_script, own_data  # hardly any name is such a file's

    path = Path(name).expanduser()
    if path.suffix in own_data.SUFFIXES:
        return f"{name} is data: cookbook start {shlex.quote(name)} MODEL writes a recipe for it"
    if path.suffix == ".py":
        recipe = f"echo 'entry: script:{name}' > my_{path.stem}.yaml"
        start = f"cookbook submit my_{path.stem}.yaml --nodes 1 --gpus-per-node 8"
        return f"{name} is started by a recipe: {recipe}; {start} (docs/engines.md)"
    if batch_script.is_one(path):
        return f"{name} is a batch script: write a recipe in its place ({batch_script.PAGE})"
    return ""
