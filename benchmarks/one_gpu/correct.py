"""Loss curves of all kernels against the CPU's, resumed runs, exports, and the launcher."""

import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.one_gpu import cases
from benchmarks.one_gpu.cases import CASES, Case
from benchmarks.one_gpu.parts import CPU, Call
from benchmarks.peers import ours
from benchmarks.peers.engine import Job

STEPS, TINY_STEPS = 20, 4
# Limits of a run, and what one takes at least.
RUN_S, SHORTEST_S = 120.0, 12.0
# Runs that are killed and resumed.
RESUMED: dict[str, dict[str, Any]] = {
    "lora": cases.LORA,
    "lora deterministic": cases.LORA | {"cudnn_deterministic_mode": 1},
    "full compiled": cases.COMPILED,
}
SUBMIT = ("submit", "demo", "--local", "--watch", "--nodes", "1", "epochs=4")


def run(call: Call) -> None:
    """All parts, side by side; each is written down as it ends."""
    # Of the process that forks.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder, log = call.work / "models", call.work / "models.log"
    made = call.start("benchmarks.one_gpu.models", [str(folder)], RUN_S, log, CPU)
    call.record("models", ok=made["status"] == 0, **made | {"said": ""})
    wanted = [
        (case, dtype, _compared(case, dtype))
        for case in CASES
        if call.starts(f"case {case.name}", 0)
        for dtype in case.dtypes
    ]
    named = {case.name: case for case in CASES}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) * 3 // 4)) as pool:
        others = [
            pool.submit(call.guarded, f"resume {name}", resume, call, name) for name in RESUMED
        ]
        others.append(pool.submit(call.guarded, "cookbook submit", submit, call))
        keys = dict.fromkeys(key for *_, pair in wanted for key in pair)
        runs = {key: pool.submit(train, call, named[key[0]], *key[1:]) for key in keys}
        for case, dtype, pair in wanted:
            compare(call, case, dtype, *(runs[key].result() for key in pair))
        for other in others:
            other.result()


def _compared(case: Case, dtype: str) -> tuple[tuple[str, str, str], ...]:
    """Two runs, each by its case, its side and its dtype."""
    other = (case.name, "cpu") if case.against == CPU else (case.against, "own")
    return (case.name, "own", dtype), (*other, dtype)


def train(call: Call, case: Case, side: str, dtype: str) -> dict[str, Any]:
    """One run of a case: `own` on the call's device, or on the CPU."""
    if call.left_s < SHORTEST_S:
        return {"dropped": "no time"}
    device = call.options.device if side == "own" else CPU
    folder = write(call, f"{case.name}_{side}_{dtype}", case, device, dtype)
    result = start(call, folder, case.method, device)
    return result | {"losses": [loss for loss, _ in curve(folder)]}


def write(call: Call, name: str, case: Case, device: str, dtype: str) -> Path:
    """Write train.yaml into the folder of a run, which is returned."""
    folder, models = call.work / "runs" / name, call.work / "models"
    folder.mkdir(parents=True)
    settings = cases.settings(case, models, TINY_STEPS if call.options.tiny else STEPS)
    job = Job(
        folder=str(models / case.model),
        out=str(folder),
        workload=case.name,
        method=case.method,
        model={},
        device=device,
        dtype=dtype,
        sequence=256,
        batch_size=2 if settings["dataset.packed"] else 8,
        ranks=1,
        warmup_steps=0,
        steps=1,
        seed=3,
        lr=1e-3,
        lora_rank=8,
        lora_alpha=16,
        documents="packed",
        settings=settings,
    )
    config = ours.train_config(job, folder)
    (folder / "train.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def start(call: Call, folder: Path, method: str, device: str, **options: Any) -> dict[str, Any]:
    """Start the trainer, as a job does, on the run in this folder."""
    arguments = [cases.METHODS[method][0], str(folder / "train.yaml")]
    return call.start("trainer.train", arguments, RUN_S, folder / "log", device, **options)


def curve(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(line["loss"], line["grad_norm"]) for line in ours.logged(folder)]


def differences(own: list[float], other: list[float]) -> tuple[float, float] | None:
    """Largest relative differences, of all steps and of the first; None without two curves."""
    if not own or len(own) != len(other) or None in (*own, *other):
        return None
    gaps = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(own, other, strict=True)]
    return max(gaps), max(gaps[: cases.FIRST_STEPS])


def compare(call: Call, case: Case, dtype: str, own: dict[str, Any], other: dict[str, Any]) -> None:
    """Write down a case's curve beside the expected one."""
    name = f"case {case.name} {dtype}"
    if "dropped" in own | other:
        call.record(name, dropped="no time")
        return
    found = differences(own["losses"], other["losses"])
    call.record(
        name,
        ok=found is not None
        and all(a <= b for a, b in zip(found, cases.LIMITS[dtype], strict=True)),
        shows=case.shows,
        against=case.against,
        differences=found,
        same_bits=own["losses"] == other["losses"],
        runs=[own, other],
    )


def resume(call: Call, name: str) -> None:
    """Train twice, and once killed and started again: the same bits? Then what reads the export."""
    part = f"resume {name}"
    if not call.starts(part, 3 * SHORTEST_S):
        return
    every, kill_after = (1, 3) if call.options.tiny else (5, 11)
    saved = f"checkpoints/step_{kill_after // every * every}"
    saving = {"save_every_n_steps": every, "enable_async_checkpointing": True}
    case, device = Case(part, "", RESUMED[name] | saving), call.options.device
    first, second, killed = (
        write(call, f"{part} {which}".replace(" ", "_"), case, device, "bf16")
        for which in ("first", "second", "killed")
    )

    def far_enough() -> bool:
        return len(curve(killed)) >= kill_after and (killed / saved).is_dir()

    results = [start(call, folder, "sft", device) for folder in (first, second)]
    results.append(start(call, killed, "sft", device, until=far_enough))
    at = len(curve(killed))
    results.append(start(call, killed, "sft", device, COOKBOOK_ATTEMPT="1"))
    resumed = "resuming from" in (killed / "log").read_text(encoding="utf-8", errors="replace")
    losses = [[loss for loss, _ in curve(folder)] for folder in (killed, first)]
    call.record(
        part,
        # On a fast device it may have ended before it could be killed.
        ok=results[-1]["status"] == 0 and resumed == (results[2]["status"] is None),
        killed_after=at,
        same_bits_uninterrupted=curve(first) == curve(second),
        same_bits_resumed=curve(first) == curve(killed),
        same_bits_exported=_exported(first) == _exported(killed),
        differences=differences(*losses),
        runs=[result for result in results if result["status"] is not None],
    )
    if name == "lora":
        asked = [str(killed / "export"), "What is Slurm used for?", "--max-new-tokens", "24"]
        found = call.start("trainer.generate", asked, RUN_S, killed / "generated", device)
        call.record("generate", ok=found["status"] == 0, **found)
        command = [sys.executable, "-m", "benchmarks.one_gpu.exports", str(killed), device]
        found = call.run(command, RUN_S, killed / "read")
        call.record("export by transformers and PEFT", ok=found["status"] == 0, **found)


def submit(call: Call) -> None:
    """The launcher, without Slurm."""
    if call.starts("cookbook submit", SHORTEST_S):
        command = [sys.executable, "-m", "launcher", *SUBMIT]
        found = call.run(command, RUN_S, call.work / "submit.log")
        call.record("cookbook submit", ok=found["status"] == 0, **found)


def _exported(folder: Path) -> dict[str, str]:
    files = sorted((folder / "export").rglob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
