"""Whether a run fits: its step into the GPU's memory, its checkpoints onto the disk."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.check import Context, Finding, Skipped, existing_parent, failed, ok
from launcher.check.environment import kind_of_gpu
from launcher.errors import RecipeFault
from launcher.run.directory import runs_root
from plugins.estimate.launcher.memory import checkpoint_bytes, export_bytes
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.search import Predictor, remedies
from plugins.estimate.launcher.step_config import GIB, StepConfig
from runspec.weights import parameter_count, ranks_for


def memory(context: Context) -> Iterable[Finding]:
    if context.recipe.entry.purpose != "train":
        return [*_weights(context)]
    step = _step(context)
    gpu, why = kind_of_gpu(context)
    predictor = Predictor(step, gpu)
    prediction = predictor.of(step)
    shown = f"{prediction.peak_gib:.1f} GiB of {gpu.usable_gib:.1f} GiB usable on {gpu.name}"
    shown += f" ({why}; computed, not measured)"
    if prediction.fits:
        return [ok("GPU memory", shown)]
    tried = [*remedies(predictor)]
    changes = " ".join(each.overrides for each in tried if each.helps)
    fits = any(each.fits for each in tried)
    remedy = f"it would fit with {changes}" if fits else "use more or larger GPUs"
    remedy += f"; cookbook estimate {context.recipe.given_name}"
    return [failed("GPU memory", f"a step needs {shown}", remedy)]


# Bytes of a number by the key dtype of eval and serve; auto is what the folder has, bf16 as a rule.
_NUMBER_BYTES = {"fp32": 4, "float32": 4}


def _weights(context: Context) -> Iterator[Finding]:
    """Whether the GPUs of a node hold the weights of each model that answers."""
    config, resources = context.config, context.resources
    gpu, why = kind_of_gpu(context)
    size = _NUMBER_BYTES.get(str(config.get("dtype") or "fp32"), 2)
    here = resources.gpus_per_node
    for key in ("candidate", "against", "model"):
        folder = Path(str(config.get(key) or "")).expanduser()
        if not config.get(key) or not folder.is_dir():
            continue
        try:
            count = parameter_count(folder)
        except (OSError, ValueError, KeyError) as fault:
            raise Skipped(f"the weights in {folder} cannot be read: {fault}") from fault
        needed = ranks_for(count, size, gpu.memory_gib * GIB)
        shown = f"{key} {folder.name}: {count * size / GIB:.1f} GiB of weights need {needed} GPU"
        shown += f"{'s' if needed > 1 else ''} of {gpu.name} ({why}), {here} per model"
        if needed <= here:
            yield ok("GPU memory", shown)
        else:
            wider = ", or dtype=bf16" if size > 2 else ""
            yield failed("GPU memory", shown, f"use --gpus-per-node {needed}, larger GPUs{wider}")


def _step(context: Context) -> StepConfig:
    if context.recipe.entry.method is None:
        raise Skipped("only the kit's own training methods can be computed")
    resources = context.resources
    try:
        return step_of(context.config, resources.nodes, resources.gpus_per_node)
    except RecipeFault as fault:
        raise Skipped(f"it cannot be computed: {fault.faults[0]}") from fault


def disk(context: Context) -> Iterable[Finding]:
    step, config = _step(context), context.config
    folder = existing_parent(runs_root(context.cluster.root))
    # One more than is kept is there while it is written, and the best one beside those.
    kept = int(config.get("keep_last_n_checkpoints") or 2) + 1 + bool(config.get("dataset_val"))
    checkpoint, export = checkpoint_bytes(step), export_bytes(step)
    # A version of the weights for the rollout nodes stays until the next one is there.
    sent = 2 * step.element_bytes * step.shape.parameters * step.apart
    needed, free = kept * checkpoint + export + sent, shutil.disk_usage(folder).free
    shown = f"{needed / GIB:.1f} GiB for {kept} checkpoints of {checkpoint / GIB:.1f}"
    shown += ", weights for the rollout nodes" if sent else ""
    shown += f" and the export, {free / GIB:.1f} GiB free in {folder}"
    if needed <= free:
        return [ok("disk space", shown)]
    remedy = "make room, or set COOKBOOK_ROOT to a larger filesystem"
    return [failed("disk space", shown, remedy)]
