"""Speed and memory beside other engines and beside the estimate, and the kernels of a step."""

import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import train
from benchmarks.one_gpu.parts import Call
from benchmarks.peers import ours
from benchmarks.peers.engine import Job
from launcher.gpus import DEFAULT, by_label, by_name

STEPS, TINY_STEPS, WARMUP_STEPS = 8, 3, 4
# Less than an engine starts in.
SHORTEST_S = 45.0
# The third step: what it costs is over before the first measured one.
PROFILED = (
    "ours:profiler.enabled=true:profiler.wait_steps=1:profiler.warmup_steps=1"
    ":profiler.active_steps=1:profiler.num_cycles=1"
)
EIGHT_BIT = "ours:optimizer._component_=torchao.optim.AdamW8bit"
OTHERS = ("transformers:attention=sdpa", "torchtune")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TOP, LONGEST_GAPS = 25, 5


@dataclass(frozen=True)
class Part:
    """Engines one after another on the same weights and rows, within so many seconds."""

    name: str
    method: str
    engines: tuple[str, ...]
    seconds: float
    documents: str = "whole"
    batch_size: int | None = None
    model: str = "llama8b"


# Most wanted first.
PARTS = (
    Part("lora", "lora", ("ours", *OTHERS), 190),
    Part("full", "full", (EIGHT_BIT,), 75, batch_size=1),
    Part("qlora", "qlora", ("ours",), 65),
    Part("lora profiled", "lora", (PROFILED,), 65, documents="packed"),
    Part("lora eager", "lora", ("ours:compile=false",), 45),
    Part("experts", "lora", ("ours", OTHERS[0]), 80, model="qwen3_4blocks"),
    Part("full fp8", "full", (f"{EIGHT_BIT}:enable_fp8_training=true",), 60, batch_size=1),
    Part("lora batch 4", "lora", ("ours",), 60, batch_size=4),
)
TINY = {"llama8b": "tiny", "qwen3_4blocks": "tinymoe"}


class Comparison(train.Comparison):
    """The engines of one part, written into the results of the call."""

    def __init__(self, call: Call, part: Part, machine: dict[str, Any] | None) -> None:
        super().__init__(_options(call, part), call.work, machine)
        self.call, self.part = call, f"speed {part.name}"

    def write(self) -> None:
        """Write down the engines measured so far."""
        for workload in self.report["workloads"]:
            self.call.record(self.part, **workload)

    def explain(self) -> None:
        """Add the estimate of each run of ours, and the trace of a profiled one."""
        (workload,) = self.report["workloads"]
        for row in workload["rows"]:
            if row["peer"] == "ours" and row["status"] == "ok":
                kept = "activation_checkpointing"
                settings = train.parsed(row["engine"])[1] | {kept: row["settings"][kept]}
                job = replace(self.job(workload["workload"]), settings=settings)
                row["estimate"] = estimate(self.call, job, self.report["machine"]["gpu"])
                if "profiler" in row["engine"]:
                    workload["trace"], row["engine"] = trace(self.call.work), "ours"
        self.write()


def run(call: Call) -> None:
    """All parts, in their order."""
    command = [sys.executable, "-m", "benchmarks.machine", call.options.device]
    log = call.work / "machine.json"
    call.run(command, SHORTEST_S, log)
    lines = log.read_text(encoding="utf-8").splitlines()
    machine = next((json.loads(line) for line in lines if line.startswith("{")), None)
    call.note("speed", machine=machine)
    for part in PARTS:
        if call.starts(f"speed {part.name}", SHORTEST_S):
            call.guarded(f"speed {part.name}", measure, call, part, machine)


def measure(call: Call, part: Part, machine: dict[str, Any] | None) -> None:
    """The engines of a part, one after another."""
    comparison = Comparison(call, part, machine)
    comparison.run()
    comparison.explain()


def _options(call: Call, part: Part) -> Any:
    model = TINY[part.model] if call.options.tiny else part.model
    seconds = min(call.longest_s(part.seconds), call.left_s)
    batch = ["--batch-size", str(part.batch_size)] if part.batch_size else []
    return train.argument_parser().parse_args(
        [
            *("--workload", f"{model}_{part.method}"),
            *("--peers", *part.engines),
            *("--device", call.options.device),
            *("--documents", part.documents),
            *("--steps", str(TINY_STEPS if call.options.tiny else STEPS)),
            *("--warmup-steps", str(WARMUP_STEPS)),
            *("--budget-s", str(seconds)),
            *batch,
        ]
    )


def estimate(call: Call, job: Job, card: str | None) -> dict[str, Any]:
    """What `cookbook estimate` says of this very run: GiB and tokens/s of a GPU."""
    known = by_label(card or DEFAULT) or by_name(DEFAULT)
    recipe = ours.train_config(job, call.work / "estimated")
    recipe |= {"entry": "sft", "resources": {"nodes": 1, "gpus_per_node": 1}}
    path = call.work / "estimated.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    log = call.work / "estimate.json"
    log.unlink(missing_ok=True)
    asked = [sys.executable, "-m", "launcher", "estimate", str(path), "--gpu", known.name, "--json"]
    done = call.run(asked, SHORTEST_S, log)
    if done["status"] != 0:
        return done
    found = json.loads(log.read_text(encoding="utf-8"))
    keys = ("peak_gib", "tokens_per_second_per_gpu", "tokens_per_second_per_gpu_range")
    return {"gpu": found["gpu"]["name"]} | {key: found[key] for key in keys}


def trace(folder: Path) -> dict[str, Any]:
    """The kernels of the profiled step, longest first, and the gaps between them.

    On a CPU they are the operators, each with those that it calls.
    """
    files = sorted(folder.rglob("*.pt.trace.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        return {"missing": "the run has written no trace"}
    content = json.loads(files[-1].read_text(encoding="utf-8"))
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ON_GPU]
    shown = kernels or [event for event in events if event.get("cat") == "cpu_op"]
    shown.sort(key=lambda event: event["ts"])
    times: dict[str, list[float]] = defaultdict(list)
    busy, end, gaps = 0.0, shown[0]["ts"], []
    for event in shown:
        times[re.sub(r"0x[0-9a-f]+|\d{4,}", "#", event["name"])[:90]].append(event["dur"])
        if event["ts"] > end:
            gaps.append(((event["ts"] - end) / 1e3, event["name"][:60]))
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    span = max(end - shown[0]["ts"], 1e-3)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "kernels": len(kernels),
        "span_ms": span / 1e3,
        "busy": busy / span,
        "host_waits": sum(event["name"] in WAITS for event in events),
        "longest_gaps_ms": sorted(gaps, reverse=True)[:LONGEST_GAPS],
        "top": [
            {"name": name, "calls": len(each), "ms": sum(each) / 1e3, "share": sum(each) / span}
            for name, each in longest
        ],
    }
