"""From a data file and a model to a recipe: what cookbook start writes.

The settings follow from the data: their form, number and length, counted by the trainer's own code,
and from the memory that the model needs, which is computed.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher.check import Finding, samples
from launcher.do.submit import context, plan
from launcher.errors import CookbookError, UsageFault
from launcher.look.text import duration
from launcher.plugins import hook
from launcher.recipe import entries, own, own_data
from launcher.recipe import load as recipes
from launcher.recipe.model import Recipe
from launcher.recipe.needs import Needs, needs
from launcher.site import Site
from launcher.slurm import render
from launcher.slurm.job import Executor
from runspec import prepared
from runspec.keys.key import NAME, NAME_RULE

MODEL = "Qwen/Qwen3-0.6B"
# Rows are at most so long unless the recipe is changed: longer ones need much more memory.
_LENGTHS = (512, 1024, 2048, 4096)
# Fewer steps than this teach little: then each sample is a row of its own.
_FEW_STEPS = 50
_COMPILED_FROM = 300
_MANY_SAMPLES = 20_000
_VALIDATED_FROM = 200
_GPUS = (1, 2, 4, 8)
_NEW_TOKENS = 256
# Samples that are printed.
_SHOWN = 3
_BASES = ("lora", "qlora")


@dataclass(frozen=True)
class Draft:
    """A recipe that is not written yet, and facts about it."""

    file: Path
    text: str
    # Of the data, in words.
    form: str
    # The model is not here yet.
    downloads: bool
    # The file of the reward function that has to be written; None without one.
    reward: Path | None
    # None if nothing is known of the model before it is downloaded, or no plug-in computes it.
    needs: Needs | None
    # Its ranks.
    gpus: int
    # To train; None if they could not be counted.
    tokens: int | None
    # As the trainer shows their first samples.
    datasets: list[dict[str, Any]]
    # Why those could not be read.
    findings: list[Finding]


@dataclass(frozen=True)
class _Settings:
    """Values of the template that follow from the data."""

    base: str = _BASES[0]
    gpus: int = 1
    length: int = _LENGTHS[-1]
    length_is: str = "longer samples are truncated"
    packed: bool = True
    packed_is: str = "whole samples packed in rows of max_seq_len"
    validates: bool = False
    epochs: int = 1
    batch: int = 1
    warmup: int = 10
    compile: bool = True
    steps_are: str = "passes over the data"


def draft(data: str, model: str, file: Path, site: Site, executor: Executor) -> Draft:
    """Return a recipe for data and model, as `file` will hold it; nothing is written.

    Args:
        data: a file, or prepared:NAME@SPLIT.
        model: a folder, or ORGANISATION/NAME of the hub.

    Raises:
        UsageFault: the data or the model cannot be used.
    """
    if not NAME.match(file.stem):
        raise UsageFault(f"the name {file.stem!r} may contain only {NAME_RULE}: choose another")
    block, form = _data(data)
    if file.exists():
        raise UsageFault(f"{file} exists: choose another name with --output, or remove it")
    name = entries.for_data(block["_component_"])
    method = entries.find(name).method if name else None
    samples_answers = method is not None and method.samples_answers
    config: dict[str, Any] = {}
    _, faults = own.use(config, (), None, model, "lora")
    if faults:
        raise UsageFault(faults)
    folder = str(config["checkpointer"]["checkpoint_dir"])
    downloads = not Path(folder.replace("${models_root}", str(site.root / "models"))).is_dir()
    values = {
        "command": shlex.join(["cookbook", "start", data, model]),
        "file": file.name,
        "hub": (config.get("hub") or {}).get("model"),
        "checkpoint_dir": folder,
        "downloads": downloads,
        "form": form,
        "dataset": block,
        "method": name,
        "goal": f"{method.goal} by " if method else "",
        "samples_answers": samples_answers,
        "reward": str(file.parent / "reward.py"),
        "new_tokens": _NEW_TOKENS,
        "time": "04:00:00",
    }
    with TemporaryDirectory() as place:
        drafts = _Drafts(Path(place) / file.name, values, Path(folder).name, site)
        findings, datasets = drafts.samples(executor)
        answer = _NEW_TOKENS * samples_answers
        settings = drafts.fitting(_by_data(_Settings(), datasets, answer))
        tokens = None
        if datasets and not samples_answers:
            settings = _by_steps(settings, datasets[0])
            tokens = settings.epochs * _tokens(datasets[0])
        found = drafts.needs(settings, tokens)
        text = drafts.text(settings)
    reward = file.parent / "reward.py" if samples_answers else None
    return Draft(
        file, text, form, downloads, reward, found, settings.gpus, tokens, datasets, findings
    )


def _data(data: str) -> tuple[dict[str, Any], str]:
    """Return the dataset block and the form in words."""
    if prepared.reference(data):
        return prepared.expanded(data), f"{data}, made by cookbook prepare"
    return own_data.read(data)


@dataclass(frozen=True)
class _Drafts:
    """Writes drafts to a file of its own, to load them as any recipe."""

    path: Path
    values: dict[str, Any]
    model: str
    site: Site

    def text(self, settings: _Settings) -> str:
        method = {"lora": "LoRA", "qlora": "QLoRA"}[settings.base]
        title = f"{self.values['goal']}{method} of {self.model} on {self.path.stem}"
        return render.template("start.yaml.j2").render(**vars(settings), **self.values, title=title)

    def load(self, settings: _Settings, *overrides: str) -> Recipe:
        self.path.write_text(self.text(settings), encoding="utf-8")
        return recipes.load(str(self.path), overrides)

    def samples(self, executor: Executor) -> tuple[list[Finding], list[dict[str, Any]]]:
        """The first samples, whole: their lengths decide."""
        overrides = ["~tokenizer.max_seq_len"]
        if self.values["samples_answers"]:
            # The user's own is not written yet.
            column = self.values["dataset"]["column_map"]["prompt"]
            overrides.append(f"rewards={{any: {{function: exact_match, column: {column}}}}}")
        recipe = self.load(_Settings(packed=False), *overrides)
        return samples.read(context(plan(recipe, self.site, executor)), _SHOWN)

    def needs(self, settings: _Settings, tokens: int | None = None) -> Needs | None:
        """What a draft needs for this many tokens; None if its model is not known here."""
        recipe, gpu = self.load(settings), self.site.gpu
        resources = recipe.resources
        try:
            config = recipe.resolved(self.site.root, "run")
            return needs(config, resources.nodes, resources.gpus_per_node, gpu, tokens=tokens)
        except CookbookError:
            return None

    def fitting(self, settings: _Settings) -> _Settings:
        """LoRA on the fewest GPUs of a node on which it fits, else QLoRA; else 8 GPUs."""
        for base in _BASES:
            for gpus in _GPUS:
                tried = replace(settings, base=base, gpus=gpus)
                found = self.needs(tried)
                if found is None:
                    return settings
                if found.fits:
                    return tried
        return replace(settings, base=_BASES[-1], gpus=_GPUS[-1])


def _by_data(settings: _Settings, datasets: list[dict[str, Any]], answer: int) -> _Settings:
    """The length of rows, from the longest of the first samples, and room for an answer.

    answer: tokens of an answer that is sampled, of which 8 belong to each prompt; else 0.
    """
    if answer:
        settings = replace(settings, packed=False, batch=8)
    if not datasets:
        return settings
    longest = datasets[0]["longest"]
    length = next((each for each in _LENGTHS if each >= longest + answer), _LENGTHS[-1])
    seen = f"the longest of the first {datasets[0]['read']:,} samples has {longest:,} tokens"
    return replace(settings, length=length, length_is=seen)


def _by_steps(settings: _Settings, dataset: dict[str, Any]) -> _Settings:
    """Epochs, packing and batch, so that there are enough steps to learn from."""
    count = dataset["samples"]
    validates = count >= _VALIDATED_FROM
    trained = count * 19 // 20 if validates else count
    epochs = 1 if count >= _MANY_SAMPLES else 3
    # Rows of the greatest length cost least; with few data they would be too few.
    rows = _tokens(dataset) / _LENGTHS[-1]
    packed = epochs * rows / settings.gpus >= _FEW_STEPS
    if packed:
        per_epoch = ceil(rows / settings.gpus)
        changed = replace(settings, length=_LENGTHS[-1])
    else:
        batch = next(n for n in (8, 4, 2, 1) if n == 1 or epochs * trained / n >= _FEW_STEPS)
        per_epoch = ceil(trained / (batch * settings.gpus))
        reason = "few data: packed, there would be too few steps to learn from"
        changed = replace(settings, packed=False, packed_is=reason, batch=batch)
    steps = epochs * per_epoch
    return replace(
        changed,
        validates=validates,
        epochs=epochs,
        warmup=max(1, steps // 20),
        compile=steps >= _COMPILED_FROM,
        steps_are=f"about {steps:,} steps",
    )


def _tokens(dataset: dict[str, Any]) -> int:
    """About how many tokens an epoch has, from the mean of the first samples."""
    mean: float = dataset["tokens"] / max(dataset["read"], 1)
    return ceil(mean * int(dataset["samples"]))


def next_commands(made: Draft) -> Iterator[str]:
    """Yield what to type next."""
    name = shlex.quote(made.file.name if made.file.parent == Path.cwd() else str(made.file))
    if made.reward is not None and not made.reward.is_file():
        yield f"# write {made.reward}: def score(prompts, completions, **columns): return [SCORE]"
    if made.downloads:
        yield f"cookbook download {name}"
        if not made.datasets:
            yield f"cookbook check {name} --samples 3"
    yield f"cookbook submit {name} --watch"


def needed(made: Draft, site: Site) -> Iterator[str]:
    """Yield what the training needs, computed."""
    found = made.needs
    if found is None:
        why = "not known before the model is downloaded"
        if hook("needs") is None:
            why = "not estimated, as no plug-in for it is installed"
        yield f"memory and time: {why}"
        return
    fits = "fits" if found.fits else "does not fit"
    yield (
        f"memory  {round(found.peak_gib, 2)} of {round(found.gpu.usable_gib, 2)} GiB per GPU on "
        f"{made.gpus} x {found.gpu.name}: {fits}; computed, not measured"
    )
    if made.tokens:
        took, used = duration(max(round(3600 * found.hours), 1)), found.hours * made.gpus
        hours = f"{used:.2g} GPU-hours" if used >= 0.01 else "less than 0.01 GPU-hours"
        price = site.gpu_hour_price
        cost = "" if price is None else f", {used * price:.2f} {site.currency or ''}".rstrip()
        yield (
            f"time    {took} for {made.tokens:,} tokens, {hours}{cost}; computed, without start-up"
        )


def default_file(data: str) -> Path:
    """Return where the recipe goes if nothing else is asked for: here, by the data's name."""
    reference = prepared.reference(data)
    stem = reference[0] if reference else Path(data).stem
    cleaned = "".join(c if NAME.match(f"a{c}") else "_" for c in stem).lstrip("._-")
    return Path.cwd() / f"{cleaned or 'mine'}.yaml"
