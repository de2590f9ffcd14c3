"""What the recipe itself says: its layout, its secrets, its script, and its components."""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import paths, venv
from launcher.check import Context, Finding, Skipped, failed, ok, unreadable
from launcher.recipe import batch_script
from launcher.run import snapshot
from launcher.run.directory import runs_root
from runspec import versions
from runspec.adapters import is_quantised
from runspec.files import DATA_CACHE
from runspec.layout import Layout, LayoutError

_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")

# What the samples depend on.
_OF_SAMPLES = ("dataset", "dataset_val", "tokenizer", "checkpointer", "rewards")
# The options of python -m trainer.check.
Options = tuple[str, ...]


def layout(context: Context) -> Iterable[Finding]:
    """Check if the recipe's parallel dimensions fit its number of GPUs."""
    config, resources = context.config, context.resources
    shape = f"{resources.nodes} x {resources.gpus_per_node} = {resources.world_size} ranks"
    entry = context.recipe.entry
    if fault := entry.layout_fault(context.recipe.config, resources.world_size):
        return [failed("layout", fault, "change it, --nodes or --gpus-per-node")]
    if entry.method is None:
        return [ok("layout", shape)]
    try:
        split = Layout.of(config, resources.world_size, resources.gpus_per_node)
    except LayoutError as error:
        return [failed("layout", fault) for fault in error.faults]
    together = int(config.get("rollout_gpus") or 1)
    if resources.gpus_per_node % together:
        message = f"rollout_gpus={together} does not divide {resources.gpus_per_node} GPUs per node"
        return [failed("layout", message, "change it or --gpus-per-node")]
    sharded = split.shard > 1 or config.get("fsdp_cpu_offload") or config.get("master_weights")
    quantized = is_quantised(config.get("model") or {}) or config.get("teacher_quantize_base")
    fault = versions.sharding_fault(venv.torch_build().version or "")
    if sharded and quantized and fault is not None:
        return [failed("layout", fault, "bash setup.sh --torch 2.13.0")]
    batch, accumulation = config.get("batch_size", 1), config.get("gradient_accumulation_steps", 1)
    if split.tensor_parallel > 1:
        shape += f", tensor parallel {split.tensor_parallel}"
    groups = split.data_parallel
    shape += f"; {batch * accumulation * groups} samples per step (batch {batch} x {accumulation}"
    return [ok("layout", f"{shape} micro-steps x {groups} data-parallel groups)")]


def secrets(context: Context) -> Iterable[Finding]:
    """Check if the recipe's secrets are out of its files, and readable by nobody else."""
    files = context.recipe.secrets
    findings = [*_tokens(context.config, ""), *_secret_files(files)]
    read = f"; {', '.join(files)} read from files" if files else ""
    return findings or [ok("secrets", f"no token in the recipe{read}")]


def _tokens(value: Any, where: str) -> Iterator[Finding]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _tokens(inner, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _tokens(inner, where)
    elif isinstance(value, str) and _HUB_TOKEN.search(value):
        message = f"{where} contains a Hugging Face token, and a run's files are readable"
        yield failed("secrets", message, "remove it; use HF_TOKEN_PATH")


def _secret_files(files: dict[str, Path]) -> Iterator[Finding]:
    """Check that a secret's file exists and is private; its value is never read."""
    for name, path in files.items():
        if why := unreadable(path):
            write = f"(umask 077; mkdir -p {path.parent}; cat > {path})"
            message = f"secrets.{name}: {path} {why}"
            yield failed("secrets", message, f"write the value there with: {write}")
        elif path.stat().st_mode & 0o077:
            message = f"secrets.{name}: others may read {path}"
            yield failed("secrets", message, f"chmod 600 {path}")


def script(context: Context) -> Iterable[Finding]:
    """Check if the script is there and is copied."""
    recipe = context.recipe
    script, folder = recipe.entry.program(recipe), recipe.code_root
    name = recipe.entry.title
    if script is None and folder is not None:
        why = snapshot.fault(folder) if folder.is_dir() else f"code_root {folder} is no folder"
        lines = str(recipe.target or recipe.config.get("command") or "")
        faults = (
            [why]
            if why
            else [
                f"{file}: {fault}"
                for file, text in batch_script.run_by(lines, folder)
                for fault in batch_script.faults(text)
            ]
        )
        return [failed("script", text) for text in faults] or [ok("script", f"{name} in {folder}")]
    if script is None:
        return [ok("script", name)]
    if folder is None:
        return [ok("script", str(script))]
    if not folder.is_dir():
        message, remedy = f"code_root {folder} is no folder", "give the one with your code"
    elif not script.is_file():
        message, remedy = f"entry: there is no script {script}", "its path counts from the recipe"
    elif not script.is_relative_to(folder):
        message = f"entry: {script} is not in code_root {folder}"
        remedy = "only that folder is copied: move the script, or change code_root"
    elif script.relative_to(folder) not in snapshot.files(folder):
        message = f"entry: git ignores {script}, so it would not be copied"
        remedy = f"git add -f {script.relative_to(folder)}"
    elif batch_script.is_one(script):
        message = f"entry: {script.name} is a shell script, and {recipe.entry_name} starts Python"
        own = [f"; {fault}" for fault in batch_script.faults(batch_script.text_of(script))]
        remedy = f"write entry: command:bash {recipe.target}{''.join(own)}"
    else:
        why = snapshot.fault(folder)
        return [failed("script", why) if why else ok("script", str(script))]
    return [failed("script", message, remedy)]


def components(context: Context) -> Iterable[Finding]:
    """Ask the trainer, in the jobs' environment, if the recipe's components exist and fit."""
    if context.recipe.entry.method is None:
        raise Skipped("it is no recipe of the kit's trainer")
    if not context.prepared:
        raise Skipped("the model is made at submission")
    config, options = _question(context)
    key = _key(config, options)
    if key not in context.answers:
        (context.answers[key],) = ask_trainer([config], *options)
    answer = context.answers[key]
    # The trainer does not know by which name the recipe was given.
    again = f"--recipe {context.recipe.given_name}"
    faults = [
        failed("components", fault.replace("--recipe RECIPE", again)) for fault in answer["faults"]
    ]
    return faults or [ok("components", str(answer["found"]))]


def ask_ahead(contexts: Iterable[Context], answers: dict[str, dict[str, Any]]) -> None:
    """Let one process of the trainer answer for all recipes: its start takes most of the time.

    answers: of each context; it gets them.
    """
    questions: dict[Options, dict[str, dict[str, Any]]] = {}
    for context in contexts:
        if context.recipe.entry.method and context.prepared:
            config, options = _question(context)
            questions.setdefault(options, {})[_key(config, options)] = config
    for options, asked in questions.items():
        # The recipe's own check reports why it cannot answer.
        with contextlib.suppress(Skipped):
            answers |= zip(asked, ask_trainer(list(asked.values()), *options), strict=True)


def ask_for_samples(
    context: Context, count: int, variables: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the trainer for the first samples as it trains them, and for their faults.

    The answer on the components comes with it.
    """
    config, options = _question(context)
    # Recipes that differ in other settings have the same samples.
    of_data = {key: config.get(key) for key in _OF_SAMPLES}
    key = _key(of_data, (*options, "--samples"))
    if count or key not in context.answers:
        (answer,) = ask_trainer([config], *options, f"--samples={count}", variables=variables)
        context.answers[key] = context.answers[_key(config, options)] = answer
    answer = context.answers[key]
    return answer.get("samples", []), answer.get("sample_faults", [])


def _question(context: Context) -> tuple[dict[str, Any], Options]:
    """Return the config that the trainer is asked about, and the options that say for what."""
    recipe, method = context.recipe, context.recipe.entry.method
    config = recipe.train_config(context.cluster.root, "run")
    # As in a run's directory: what a run needs may have to be there already.
    cache = config.get("data_cache_dir") or str(runs_root(context.cluster.root) / DATA_CACHE)
    config = {**config, "data_cache_dir": cache}
    # The check of the layout tells its faults.
    with contextlib.suppress(LayoutError):
        layout = Layout.of(config, context.resources.world_size)
        config = {**config, "data_parallel_shard_dim": layout.shard}
    return config, ("--objective", method.objective if method else "")


def _key(config: dict[str, Any], options: Options) -> str:
    return json.dumps([config, options])


def ask_trainer(
    configs: Sequence[dict[str, Any]],
    *options: str,
    variables: Mapping[str, str] | None = None,
    module: str = "trainer.check",
) -> list[dict[str, Any]]:
    """Return what a module answers about configs, a JSON object each; Skipped if it cannot."""
    limit_s = 300 + 30 * (len(configs) - 1)
    try:
        done = venv.ask_trainer(module, configs, *options, timeout_s=limit_s, variables=variables)
        lines = done.stdout.splitlines()[-len(configs) :]
        if len(lines) != len(configs):
            raise ValueError("an answer is missing")
        return [dict(json.loads(line)) for line in lines]
    except OSError as error:
        message = f"{venv.python()} cannot be started ({error.strerror}): make the virtual"
        raise Skipped(f"{message} environment with: bash setup.sh") from error
    except subprocess.TimeoutExpired as error:
        raise Skipped(f"the trainer did not answer within {limit_s // 60} minutes") from error
    except (ValueError, IndexError) as error:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Skipped(f"the trainer in {paths.venv_root()} does not answer: {message}") from error
