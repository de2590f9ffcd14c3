"""What the parts of a rehearsal come to: what was measured, what was predicted, what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.check import Finding, failed, ok, skipped, warning
from launcher.gpus import Gpu
from plugins.estimate.launcher.estimate import Estimate
from runspec import files

# Above this share of the predicted memory a finding is a warning.
_MORE_MEMORY = 1.05
# Exit statuses of a part: by timeout, and by rehearse.sh if no time was left.
_LATE, _NO_TIME = (124, 137), 125

# By words in a failed part's error, and for any other error of a part.
_REMEDIES = (
    (
        ("out of memory", "OutOfMemory"),
        "batch_size=1 activation_checkpointing=full, or what cookbook estimate --tune finds",
    ),
    (
        ("inductor", "dynamo", "BackendCompilerFailed", "triton", "Python.h", "C compiler"),
        "compile=false trains meanwhile; gcc and Python's headers on the nodes, or another torch",
    ),
    (
        ("NCCL", "ProcessGroup", "gloo", "connect"),
        "NCCL_DEBUG=INFO under environment: of the site file tells more; then network_interface, "
        "or NCCL_P2P_DISABLE=1 to see if the links are the cause",
    ),
    (("ConfigError", "does not exist", "is missing"), "fix that; cookbook check {recipe}"),
    (("No space left", "Disk quota"), "make room, or set COOKBOOK_ROOT to a larger filesystem"),
)


@dataclass(frozen=True)
class Part:
    """One start of the trainer: what it should train, its exit status and its files."""

    name: str
    # Resolved.
    config: Mapping[str, Any]
    blocks: int
    folder: Path
    log: Path
    status: int | None = None
    seconds: int = 0

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The steps that its folder has a record of."""
        path = self.folder / files.METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; the first one compiles and allocates."""
        times = [row["step_time_s"] for row in self.rows[1:3] if row.get("step_time_s")]
        return min(times, default=None)

    @property
    def peak_gib(self) -> float | None:
        """Memory of the GPUs at its peak."""
        peaks = [row.get("peak_memory_allocated_gb") for row in self.rows]
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    @property
    def message(self) -> str:
        """Its error, as the rank that failed first reported it, or from its log."""
        for path in sorted(self.folder.glob("logs/0/error_*.json")):
            record = files.peek(path)
            if message := str(record.get("message") or "").strip():
                kind, line = str(record.get("type", "error")), message.splitlines()[0]
                return line if line.startswith(kind) else f"{kind}: {line}"
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        named = [line for line in lines if "error" in line.lower()]
        return (named or lines or ["no output"])[-1][:300]


@dataclass(frozen=True)
class Scene:
    """Where a rehearsal was, and of what."""

    recipe: str
    # The whole recipe, resolved.
    config: Mapping[str, Any]
    ranks: int
    blocks: int
    # None for CPUs.
    gpu: Gpu | None
    network_gbits: float | None = None

    def needs(self, config: Mapping[str, Any]) -> Estimate | None:
        """What is predicted of a recipe on this node; None on CPUs."""
        if self.gpu is None:
            return None
        return Estimate(config, 1, self.ranks, self.gpu.name, None, self.network_gbits)


def findings(scene: Scene, parts: Sequence[Part]) -> Iterator[Finding]:
    """Yield what was measured, each with its remedy."""
    for part in parts:
        yield from _part(scene, part)
    yield from _whole(scene, {part.name: part for part in parts})


def _part(scene: Scene, part: Part) -> Iterator[Finding]:
    title = "resume and export" if part.name == "resumed" else part.name
    if part.status is None or part.status == _NO_TIME:
        yield skipped(title, "no time was left for it", "again, with fewer first_blocks")
        return
    if part.status:
        late = part.status in _LATE
        message = f"did not end in {part.seconds} s" if late else part.message
        yield failed(title, f"{message} (log: {part.log})", _remedy(scene, message))
        return
    if part.name == "resumed":
        yield _resumed(part)
        return
    if part.step_s is None:
        yield failed(title, f"it logged no three steps (log: {part.log})", _remedy(scene, ""))
        return
    blocks, memory = part.blocks, part.peak_gib
    message = f"{blocks} block{'s' * (blocks > 1)}: {part.step_s:.3g} s per step"
    predicted = scene.needs(part.config)
    if predicted is None:
        yield ok(title, f"{message} in {part.seconds} s in all; no prediction")
        return
    message += f", predicted {predicted.step_s:.3g} s"
    if memory is not None:
        message += f"; {memory:.2f} GiB, predicted {predicted.peak_gib:.2f} GiB"
        if memory > _MORE_MEMORY * predicted.peak_gib and memory - predicted.peak_gib > 0.5:
            remedy = "the whole recipe may need more, too: leave the difference free"
            yield warning(title, message, remedy)
            return
    yield ok(title, message)


def _resumed(part: Part) -> Finding:
    steps = [int(row["step"]) for row in part.rows]
    exported = (part.folder / files.EXPORT).is_dir()
    message = f"steps {steps[0]} to {steps[-1]} without a gap" if steps else "no steps"
    whole = bool(steps) and steps == list(range(1, steps[-1] + 1))
    if not whole or "resuming from" not in part.text:
        remedy = "the checkpoint of the compiled part was not used: see its log"
        return failed("resume and export", f"steps {steps} (log: {part.log})", remedy)
    if not exported:
        remedy = "see its log; the checkpoint is complete, so that a run can be resumed"
        return failed("resume and export", f"{message}, and no export (log: {part.log})", remedy)
    return ok("resume and export", f"{message}; exported, {part.seconds} s in all")


def _whole(scene: Scene, parts: Mapping[str, Part]) -> Iterator[Finding]:
    """What the measured speed comes to at the recipe's whole depth."""
    plain, compiled = (parts.get(name) for name in ("uncompiled", "compiled"))
    before, after = (part and not part.status and part.step_s for part in (plain, compiled))
    if before and after and after > before:
        message = f"compiled steps take {after / before:.2f} times as long as uncompiled ones"
        yield warning("compile", message, "compile=false, if it stays so at full depth")
    part = compiled if after else plain if before else None
    if part is None or part.step_s is None:
        return
    predicted = scene.needs(part.config)
    whole = scene.needs({**scene.config, "compile": part.config.get("compile")})
    if predicted is None or whole is None:
        return
    ratio = part.step_s / predicted.step_s
    rate = whole.rate / ratio
    message = f"{scene.blocks} blocks at this speed: {rate:,.0f} tokens/s/GPU, "
    message += f"predicted {whole.rate:,.0f}"
    if whole.lowest_rate <= rate:
        yield ok("whole recipe", message)
        return
    remedy = (
        f"plan with {ratio:.1f} times the hours of cookbook estimate {scene.recipe}; cookbook "
        "profile of a run shows where the time goes"
    )
    yield warning("whole recipe", message, remedy)


def _remedy(scene: Scene, message: str) -> str:
    lower = message.lower()
    for names, remedy in _REMEDIES:
        if any(name.lower() in lower for name in names):
            return remedy.format(recipe=scene.recipe)
    return "see the last lines of its log"
