"""From a config of another trainer to a recipe: what cookbook start does with a YAML file."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher import yamlfile
from launcher.errors import UsageFault
from launcher.recipes import engines, own
from launcher.recipes import recipe as recipes
from launcher.recipes.peers import data
from launcher.recipes.peers.automodel import AUTOMODEL
from launcher.recipes.peers.axolotl import AXOLOTL
from launcher.recipes.peers.litgpt import LITGPT
from launcher.recipes.peers.llamafactory import LLAMAFACTORY
from launcher.recipes.peers.table import Draft, Line, Peer, Unused, convert, without
from launcher.recipes.peers.trl import TRL

PEERS = {peer.prefix: peer for peer in (AXOLOTL, LLAMAFACTORY, TRL, LITGPT, AUTOMODEL)}
STATES = ("taken", "unused", "refused", "unknown", "left out")
# The order of a recipe's blocks; others follow.
_FIRST = ["entry", "loss", "beta", "resources", "hub", "checkpointer", "tokenizer", "model"]
_FIRST += ["dataset", "dataset_val", "epochs", "max_steps", "batch_size", "optimizer"]


@dataclass(frozen=True)
class Converted:
    """A config as a recipe. file: of the config. text: "" if keys are refused or unknown."""

    file: Path
    peer: Peer
    draft: Draft
    text: str

    @property
    def counts(self) -> dict[str, int]:
        """How many keys of the file are taken, unused, refused, unknown and left out."""
        counts = Counter(line.state for line in self.lines(default=False))
        return {state: counts[state] for state in STATES}

    @property
    def states(self) -> tuple[str, ...]:
        """The states of keys, in the order of the table."""
        return STATES

    def lines(self, default: bool) -> list[Line]:
        """The lines of the file's keys, or of its trainer's defaults."""
        lines = self.draft.lines
        return [line for line in lines if line.default == default and line.key != "--data"]

    @property
    def faults(self) -> list[str]:
        """What keeps the file from being a recipe."""
        wrong = [line for line in self.draft.lines if line.state in ("refused", "unknown")]
        return [f"{line.key}: {line.note}" for line in wrong]

    @property
    def engine_way(self) -> str:
        """How the trainer itself runs the config under this kit's launch."""
        programs, entry = engines.ENGINES[self.peer.prefix].programs, self.draft.entry
        if not programs:
            nodes, gpus = self.draft.nodes or 1, self.draft.gpus_per_node or 8
            command = f"cookbook submit {shlex.quote(str(self.file))}"
            return f"{command} --nodes {nodes} --gpus-per-node {gpus}"
        if entry not in programs:
            lora = self.draft.method != "full"
            entry = "finetune_lora" if lora else "finetune_full"
        return f"a recipe with entry: {self.peer.prefix}{entry} and config: {self.file}"


def recognised(file: Path) -> tuple[Peer, dict[str, Any]]:
    """Return whose config a file is, by its keys, and its content.

    Raises:
        UsageFault: it is empty, a recipe of this kit, or of no trainer or of two that are known.
    """
    if file.is_file() and not file.read_text(encoding="utf-8", errors="replace").strip():
        raise UsageFault(f"{file} is empty: give a config of a trainer, or a data file")
    content = yamlfile.load(file)
    name = shlex.quote(str(file))
    engine_names = engines.all_recognised(content)
    if content.keys() & {"entry", "extends"} or (not engine_names and _is_torchtune(content)):
        kind = "recipe of this kit" if content.keys() & {"entry", "extends"} else "torchtune config"
        raise UsageFault(f"{file} is a {kind}, which is taken as it is: cookbook submit {name}")
    if len(engine_names) > 1:
        names = " and of ".join(PEERS[each].name for each in engine_names)
        raise UsageFault(f"{file} has the keys of {names}: leave out those of one")
    if not engine_names or engine_names[0] not in PEERS:
        known = ", ".join(peer.name for peer in PEERS.values())
        raise UsageFault(
            f"{file} is not known as a config: the keys of {known} that name the model and the "
            "data or the batch are not in it; data files end in .jsonl, .csv or .parquet"
        )
    return PEERS[engine_names[0]], content


def _is_torchtune(content: Mapping[str, Any]) -> bool:
    return any(isinstance(each, dict) and "_component_" in each for each in content.values())


def read(
    file: Path,
    model: str | None = None,
    data: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    entry: str | None = None,
    leave_out: tuple[str, ...] = (),
    command: str = "",
) -> Converted:
    """Return a config as a recipe, which is not written.

    Args:
        model, data: take the place of the config's.
        nodes, gpus_per_node: on which it trains; the steps' batches follow from a global one.
        entry: the method, where a config does not name it (TRL).
        leave_out: keys that are as if the file did not have them.

    Raises:
        UsageFault: the file is no config that is known, or model or data cannot be used.
    """
    peer, content = recognised(file)
    for key in leave_out:
        if (kept := without(content, key)) is None:
            raise UsageFault(f"--leave-out {key}: {file} has no such key")
        content = kept
    draft = Draft(
        content,
        dict(peer.defaults),
        nodes or 0,
        gpus_per_node or 0,
        entry or "",
        data or "",
        model=model or "",
        folder=str(file.parent),
    )
    replaced = {key: Unused("--data takes its place") for key in peer.data if data}
    replaced |= {key: Unused("MODEL takes its place") for key in peer.model if model}
    convert(peer, draft, replaced)
    draft.lines += [Line(key, "left out", "as if the file did not have it") for key in leave_out]
    made = Converted(file, peer, draft, "")
    if made.faults:
        return made
    if not draft.model:
        raise UsageFault(f"{file} names no model: give one, cookbook start {file} MODEL")
    if "dataset" not in draft.values:
        raise UsageFault(f"{file} names no data: give --data FILE")
    _complete(draft)
    text = "\n".join([*_head(made, command), *_body(draft)]) + "\n"
    with TemporaryDirectory() as place:
        # A fault here is one of a value, such as a rank of 0: keys are known.
        trial = Path(place) / "trial.yaml"
        trial.write_text(text, encoding="utf-8")
        recipes.load(str(trial), ())
    return Converted(file, peer, draft, text)


def _complete(draft: Draft) -> None:
    """The model's folder, and what the base of the recipe says of another method."""
    draft.key = ""
    config: dict[str, Any] = {}
    _, faults = own.use(config, (), None, draft.model, draft.method)
    if faults:
        raise UsageFault(faults)
    if config.get("hub"):
        draft.put("hub.model", config["hub"]["model"])
    draft.values.setdefault("hub.dataset", None)
    draft.put("checkpointer.checkpoint_dir", config["checkpointer"]["checkpoint_dir"])
    draft.values.setdefault("entry", draft.entry)
    form = data.form(draft)
    if not form.answers:
        draft.values.setdefault("loss", "dpo" if form.names_loss else None)
    draft.put("resources.nodes", draft.nodes)
    draft.put("resources.gpus_per_node", draft.gpus_per_node)
    draft.put("resources.time", "04:00:00")


def _head(made: Converted, command: str) -> Iterator[str]:
    file, method = made.file.name, {"lora": "LoRA", "qlora": "QLoRA", "full": "Full fine-tuning"}
    model = Path(made.draft.model.partition("@")[0]).name
    title = f"{method[made.draft.method]} of {model} ({made.draft.entry}), from {file}"
    yield f"# {title} of {made.peer.name}. Written by: {command}"
    yield "#"
    yield f"# Behind a key is the one of {file} that it comes from; (default) is"
    yield f"# {made.peer.name}'s. All settings: cookbook recipes FILE. What a key means: --key KEY"
    yield f"extends: hub_{made.draft.method}"
    yield f"description: {json.dumps(title, ensure_ascii=False)}"


def _body(draft: Draft) -> Iterator[str]:
    tree: dict[str, Any] = {}
    for path, value in draft.values.items():
        *above, last = path.split(".")
        block = tree
        for part in above:
            block = block.setdefault(part, {})
        block[last] = value
    rank = {name: number for number, name in enumerate(_FIRST)}
    defaults = {line.key for line in draft.lines if line.default}
    for key in sorted(tree, key=lambda name: rank.get(name, len(rank))):
        yield from _lines(draft, tree[key], key, key, 0, defaults)


def _lines(
    draft: Draft, value: Any, path: str, name: str, depth: int, defaults: set[str]
) -> Iterator[str]:
    key = draft.origin.get(path, "")
    if key and key != name:
        comment = f"   # {key}{' (default)' if key in defaults else ''}"
    else:
        comment = "   # (default)" if key in defaults else ""
    start = "  " * depth
    if not isinstance(value, dict) or not value:
        yield f"{start}{name}: {json.dumps(value, ensure_ascii=False)}{comment}"
        return
    yield f"{start}{name}:{comment}"
    for inner, each in value.items():
        yield from _lines(draft, each, f"{path}.{inner}", str(inner), depth + 1, defaults)


def next_commands(made: Converted, name: str) -> Iterator[str]:
    """Yield what to type next, for a recipe of this name."""
    if "hub.model" in made.draft.values or made.draft.values.get("hub.dataset"):
        yield f"cookbook download {name}"
    yield f"cookbook check {name} --samples 3"
    yield f"cookbook submit {name} --watch"


def default_file(config: Path) -> Path:
    """Return where the recipe goes if nothing else is asked for: beside the config."""
    stem = "".join(c if recipes.NAME.match(f"a{c}") else "_" for c in config.stem).lstrip("._-")
    return config.absolute().with_name(f"{stem or 'mine'}_recipe.yaml")
