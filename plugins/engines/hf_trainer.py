"""Starts a program that trains with transformers' Trainer, so that it resumes, stops and reports.

    python -P rank.py hf_trainer.py PROGRAM [ARGUMENT ...]

PROGRAM is a module (trl.scripts.sft, axolotl.cli.train) or a file. TRL's scripts and others call
Trainer.train() without a checkpoint; here each call continues from the newest complete one in
RUN_DIR/checkpoints. A checkpoint is complete once all ranks have written their part: then rank 0
puts the file COMPLETE into its folder. When the run's stop file appears, or on SIGTERM, all ranks
save after the same step and the program ends with status 0; progress.json says "stopped", and the
model is not saved as if it were finished. heartbeat.json says that the steps go on; a line for each
logged step takes the place of progress bars. It runs in the engine's environment: it needs
transformers and torch, and of the kit runspec only. Needs RUN_DIR and COOKBOOK_ATTEMPT.
"""

import json
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

# Not for longer: the kit's other packages would hide those of these names.
sys.path.insert(0, str(Path(__file__).parents[2]))
from runspec import files, progress

sys.path.pop(0)

RUN_DIR = Path(os.environ["RUN_DIR"])
ATTEMPT = int(os.environ.get("COOKBOOK_ATTEMPT", "0"))
# Read by libraries at their import: progress bars fill a log file, and the curves are the run's.
for _name, _value in (
    ("TQDM_DISABLE", "1"),
    ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
    ("TENSORBOARD_LOGGING_DIR", str(RUN_DIR / "tensorboard")),
):
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)

CHECKPOINTS, EXPORT = RUN_DIR / files.CHECKPOINTS, RUN_DIR / files.EXPORT
METRICS, STOP = RUN_DIR / files.METRICS, RUN_DIR / files.STOP
COMPLETE = files.CHECKPOINT_COMPLETE
# What the kit's own trainer calls them; others keep their names.
NAMES = {"learning_rate": "lr", "eval_loss": "val_loss", "num_tokens": "tokens"}
# Of the end of a whole training, not of a step.
TOTALS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}
GIB = 2**30


def newest_checkpoint() -> Path | None:
    """Return the folder of the newest complete checkpoint before the last step, None for none.

    From that of the last step Trainer would make one step too many.
    """
    by_step = {}
    for marker in CHECKPOINTS.glob(f"checkpoint-*/{COMPLETE}"):
        if match := re.fullmatch(r"checkpoint-(\d+)", marker.parent.name):
            state = json.loads((marker.parent / "trainer_state.json").read_text(encoding="utf-8"))
            if state["global_step"] < state["max_steps"]:
                by_step[int(match[1])] = marker.parent
    return by_step[max(by_step)] if by_step else None


class Reporter(TrainerCallback):
    """Writes progress.json and metrics.jsonl (rank 0), and stops all ranks at the same step."""

    def __init__(self, resumed_step: int) -> None:
        is_main = int(os.environ.get("RANK", "0")) == 0
        logs = RUN_DIR / files.LOGS / str(ATTEMPT)
        self.heartbeat = progress.Heartbeat(logs if is_main else None)
        self.figures: dict[str, Any] = {}
        self.stopped = False
        self.losses: list[float] = []
        self._asked = False
        self._looked = 0.0
        self._last: tuple[int, float, float] = (resumed_step, 0.0, time.perf_counter())
        self._began: tuple[float, float] | None = None
        self._checkpoint = resumed_step
        signal.signal(signal.SIGTERM, self._ask)
        if is_main and METRICS.exists():
            # Steps after the checkpoint are trained again.
            lines = METRICS.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= resumed_step]
            files.write_text(METRICS, "".join(f"{line}\n" for line in kept))

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress(state, "running")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.leave()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.step(state.global_step)
        now = time.monotonic()
        if state.is_world_process_zero and now - self._looked > 0.5:
            # One rank looks: a shared filesystem may show a file to others later.
            self._looked, self._asked = now, self._asked or STOP.exists()
        asked = self._asked
        if dist.is_initialized():
            flag = torch.tensor(float(asked), device=args.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            asked = bool(flag.item())
        if asked and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = control.should_training_stop = True
        self._leave_steps(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._leave_steps(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("exporting")

    def _leave_steps(self, control: Any) -> None:
        """Trainer evaluates, then saves, what its other callbacks have asked for by now."""
        if control.should_save or control.should_evaluate:
            self.heartbeat.enter("saving" if control.should_save else "validating")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        figures = {NAMES.get(k, k): v for k, v in (logs or {}).items() if k not in TOTALS}
        if not state.is_world_process_zero or not {"loss", "val_loss"} & figures.keys():
            return
        row = {"step": state.global_step, "time": time.time()}
        row |= {k: float(v) for k, v in figures.items() if isinstance(v, int | float | str)}
        step, tokens, since = self._last
        if "loss" in row and state.global_step > step:
            spent = time.perf_counter() - since
            row["step_time_s"] = spent / (state.global_step - step)
            row["left_s"] = row["step_time_s"] * (state.max_steps - state.global_step)
            if tokens and "tokens" in row:
                row["tokens_per_second_per_gpu"] = (
                    (row["tokens"] - tokens) / spent / args.world_size
                )
            if torch.cuda.is_available():
                row["peak_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GIB
            self._last = (state.global_step, row.get("tokens", 0), time.perf_counter())
            self.losses.append(row["loss"])
        with METRICS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row, state.max_steps), flush=True)
        if "peak_memory_reserved_gb" in row:
            self.figures["peak_memory_reserved_gb"] = row["peak_memory_reserved_gb"]
        if "tokens" in row:
            # The mean of this start, from its first logged step on, which compiles.
            tokens, since = self._began = self._began or (row["tokens"], time.perf_counter())
            if row["tokens"] > tokens:
                spent = (time.perf_counter() - since) * args.world_size
                self.figures["tokens_per_second_per_gpu"] = (row["tokens"] - tokens) / spent
        self.progress(state, "running")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.is_initialized():
            dist.barrier()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            (folder / COMPLETE).touch()
            self._checkpoint = state.global_step
            self.progress(state, "running")

    def progress(self, state: Any, word: str) -> None:
        """Replace progress.json (rank 0)."""
        if not state.is_world_process_zero:
            return
        record = {
            "state": word,
            "attempt": ATTEMPT,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "step": state.global_step,
            "total_steps": state.max_steps,
            "checkpoint_step": self._checkpoint,
            "loss_first": self.losses[0] if self.losses else None,
            "loss_last": self.losses[-1] if self.losses else None,
            **self.figures,
        }
        progress.write(RUN_DIR, record)


def line_of(row: dict[str, Any], total: int) -> str:
    """Return a logged step as the kit's own trainer prints it, without what is not known."""
    parts = [f"step {row['step']:>{len(str(total))}}/{total}"]
    for name, text in (
        ("epoch", "epoch {:.2f}"),
        ("loss", "loss {:8.4f}"),
        ("val_loss", "val loss {:8.4f}"),
        ("lr", "lr {:.2e}"),
        ("grad_norm", "grad norm {:8.3f}"),
        ("tokens_per_second_per_gpu", "{:>8,.0f} tok/s/GPU"),
        ("peak_memory_reserved_gb", "mem {:5.1f} GiB"),
        ("left_s", "left {:,.0f} s"),
    ):
        if name in row:
            parts.append(text.format(row[name]))
    return "  ".join(parts)


finished: list[tuple[Reporter, Any]] = []
plain_train = Trainer.train


def train(self: Trainer, *_: Any, **options: Any) -> Any:
    """Trainer.train from the newest complete checkpoint; ends the program if it was stopped."""
    last = newest_checkpoint()
    options["resume_from_checkpoint"] = str(last) if last else None
    reporter = Reporter(int(last.name.rpartition("-")[2]) if last else 0)
    for bars in (ProgressCallback, PrinterCallback):
        self.remove_callback(bars)
    self.add_callback(reporter)
    output = plain_train(self, **options)
    early = any(isinstance(each, EarlyStoppingCallback) for each in self.callback_handler.callbacks)
    if reporter.stopped or (self.state.global_step < self.state.max_steps and not early):
        reporter.progress(self.state, "stopped")
        if self.is_world_process_zero():
            print(f"stopped after step {self.state.global_step} of {self.state.max_steps}")
        raise SystemExit(0)
    # What follows saves the model.
    EXPORT.mkdir(exist_ok=True)
    self.args.output_dir = str(EXPORT)
    finished.append((reporter, self.state))
    return output


def main() -> None:
    program = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    Trainer.train = train
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if finished:
        reporter, state = finished[-1]
        reporter.progress(state, "finished")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
