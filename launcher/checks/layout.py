"""Whether the recipe's parallel dimensions fit its number of GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.checks import Context
from launcher.checks.finding import Finding, failed, ok
from runspec.layout import Layout, LayoutError


def layout(context: Context) -> Iterable[Finding]:
    config, resources = context.config, context.resources
    shape = f"{resources.nodes} x {resources.gpus_per_node} = {resources.world_size} ranks"
    if context.recipe.entry.checked != "complete":
        return [ok("layout", shape)]
    try:
        found = Layout.of(config, resources.world_size, resources.gpus_per_node)
    except LayoutError as error:
        return [failed("layout", fault) for fault in error.faults]
    batch, accumulation = config.get("batch_size", 1), config.get("gradient_accumulation_steps", 1)
    if found.tensor_parallel > 1:
        shape += f", tensor parallel {found.tensor_parallel}"
    groups = found.data_parallel
    shape += f"; {batch * accumulation * groups} samples per step (batch {batch} x {accumulation}"
    return [ok("layout", f"{shape} micro-steps x {groups} data-parallel groups)")]
