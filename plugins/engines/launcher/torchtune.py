"""The entry of torchtune's own programs: torchtune:full_finetune_distributed and its like."""

import shlex
from collections.abc import Iterable
from dataclasses import replace

from launcher import paths
from launcher.errors import RecipeFault, nearest
from launcher.recipe import entries, torchtune
from launcher.recipe.model import Content, Entry, Recipe
from plugins.engines.launcher.engine import FOLLOWER, Engine
from runspec.engines import Records
from runspec.keys.common import COMMON
from runspec.keys.key import REQUIRED
from runspec.keys.sft import SftConfig


def _command(recipe: Recipe, config: Content) -> str:
    name, known = recipe.target, torchtune.recipes()
    if name not in known:
        raise RecipeFault(
            f"torchtune has no recipe {name!r}{nearest(name, known)}; it has "
            f"{', '.join(known) or 'none'} in {paths.venv_root()}"
        )
    if not known[name].distributed and recipe.resources.world_size > 1:
        raise RecipeFault(
            f"torchtune's {name} runs on one GPU, and {recipe.resources.nodes} x "
            f"{recipe.resources.gpus_per_node} are requested: use --nodes 1 --gpus-per-node 1"
        )
    return f'python {shlex.quote(str(known[name].path))} --config "$RUN_DIR/train.yaml"'


def _notes(config: Content) -> Iterable[str]:
    name = str(config.get("entry")).partition(":")[2]
    if own := entries.like_torchtune(name):
        yield (
            f"torchtune's own {name} runs it, and saves at the end of an epoch; the kit's own "
            f"method is entry: {own} (docs/keys.md)"
        )


# It saves at the end of an epoch only, and its log says nothing while it does.
_RECORDS = Records(
    "torchtune",
    metrics="logs/log_*.txt",
    form="log",
    line=r"Step (?P<step>\d+) \|.*?\bloss:(?P<loss>\S+)(?:.*?\blr:(?P<lr>\S+))?"
    r"(?:.*?\btokens_per_second_per_gpu:(?P<tokens_per_second_per_gpu>\S+))?"
    r"(?:.*?\bgrad_norm:(?P<grad_norm>\S+))?",
    beats=True,
)
# What torchtune's own trainers share with the kit's; they check the rest by themselves.
_KEYS = {
    name: replace(key, unused="", refused="")
    for name, key in SftConfig.keys().items()
    if key.default is not REQUIRED and "." not in name and "block" not in key.kind
    if key.kind not in ("component", "any") and not key.choices
}

# torchtune's last release imports what later versions of torchao do not have.
ENGINE = Engine(records=_RECORDS, command="", schema="torchtune", dependencies=("torchao==0.15.0",))
ENTRY = Entry(
    keys={**COMMON, **_KEYS},
    title="torchtune",
    command=_command,
    program=lambda recipe: getattr(torchtune.recipes().get(recipe.target), "path", None),
    records=lambda config: _RECORDS,
    other_keys=True,
    can_profile=True,
    notes=_notes,
    companion=FOLLOWER,
    dependencies=ENGINE.dependencies,
)
