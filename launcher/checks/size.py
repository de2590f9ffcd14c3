"""Whether a run fits: its step into the GPU's memory, its checkpoints onto the disk."""

from __future__ import annotations

import re
import shutil

from launcher import estimate
from launcher.checks import Context, Skipped
from launcher.errors import RecipeFault, SlurmFault
from launcher.memory import GIB, Estimate, Plan
from launcher.runs import runs_root


def memory(context: Context) -> list[str] | str:
    plan = _plan(context)
    kind, why = _gpu(context)
    device = estimate.gpu(kind)
    found = Estimate(plan)
    peak = found.peak / GIB
    shown = (
        f"{peak:.1f} GiB of {device.usable_gib:.1f} GiB usable on {kind} ({why}; computed, not "
        "measured)"
    )
    if peak <= device.usable_gib:
        return shown
    builder = str(context.config["model"]["_component_"])
    tried = estimate.remedies(plan, device, context.resources.gpus_per_node, builder)
    changes = " ".join(each.overrides for each in tried if each.helps)
    fits = any(each.fits for each in tried)
    remedy = f"it would fit with {changes}" if fits else "use more or larger GPUs"
    return [f"a step needs {shown}: {remedy}; cookbook estimate {context.recipe.typed} --compare"]


def _plan(context: Context) -> Plan:
    if context.recipe.entry != "sft":
        raise Skipped("only the kit's own trainer can be computed")
    resources = context.resources
    try:
        return estimate.plan_of(context.config, resources.nodes, resources.gpus_per_node)
    except RecipeFault as fault:
        raise Skipped(f"it cannot be computed: {fault.faults[0]}") from fault


def _gpu(context: Context) -> tuple[str, str]:
    """The kind of GPU as configs/gpus.yaml calls it, and who said so."""
    if context.cluster.gpu:
        return context.cluster.gpu, "the site's file"
    named, source = context.resources.gpu_type, "resources.gpu_type"
    if not named and not context.local:
        try:
            known = context.partitions
        except SlurmFault as fault:
            raise Skipped(f"nobody says which GPUs there are: {fault.faults[0]}") from fault
        wanted = (context.resources.partition or "").split(",")
        chosen = [
            p for name, p in known.items() if name in wanted or (p.default and wanted == [""])
        ]
        types = {kind for part in chosen for nodes in part.kinds for kind in nodes.gpus if kind}
        named, source = (types.pop() if len(types) == 1 else None), "sinfo"
    if named:
        for name, device in estimate.gpus().items():
            if named.lower() == name or re.search(device.match, named, re.IGNORECASE):
                return name, f"{source}: {named}"
    raise Skipped(
        "nobody says which GPUs there are: write gpu: with a name of configs/gpus.yaml into the "
        "site's file"
    )


def disk(context: Context) -> list[str] | str:
    plan, config = _plan(context), context.config
    folder = runs_root(context.cluster.root)
    while not folder.exists():
        folder = folder.parent
    # One more than is kept stands there while it is written, and the best one beside those.
    kept = int(config.get("keep_last_n_checkpoints") or 2) + 1 + bool(config.get("dataset_val"))
    checkpoint, export = estimate.checkpoint_bytes(plan), estimate.export_bytes(plan)
    needed, free = kept * checkpoint + export, shutil.disk_usage(folder).free
    shown = (
        f"{needed / GIB:.1f} GiB for {kept} checkpoints of {checkpoint / GIB:.1f} and the export, "
        f"{free / GIB:.1f} GiB free in {folder}"
    )
    if needed <= free:
        return shown
    return [f"{shown}: make room, or set COOKBOOK_ROOT to a larger filesystem"]
