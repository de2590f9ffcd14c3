"""metrics.jsonl, TensorBoard scalars and the line that people read while a run goes on."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.files import write_text

GIB = 2**30


def memory(device: torch.device) -> dict[str, float | None]:
    """Peak GPU memory since the last call, and this process's resident memory, in GiB.

    The GPU figures are None on a CPU.
    """
    allocated = reserved = None
    if device.type == "cuda":
        allocated = round(torch.cuda.max_memory_allocated(device) / GIB, 3)
        reserved = round(torch.cuda.max_memory_reserved(device) / GIB, 3)
        torch.cuda.reset_peak_memory_stats(device)
    return {
        "peak_memory_allocated_gb": allocated,
        "peak_memory_reserved_gb": reserved,
        "memory_rss_gb": round(_resident_bytes() / GIB, 3),
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Metrics:
    """Writes a run's metrics from rank 0.

    Lines and scalars after `resumed_step` belong to work that was lost, and are dropped, so that
    both read as one uninterrupted run.
    """

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = run_dir / "metrics.jsonl"
        _drop_after(path, resumed_step)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._board = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=resumed_step + 1, flush_secs=10
        )

    def write(self, record: dict[str, Any]) -> None:
        """Append one logged step; `record["step"]` counts from 1."""
        self._file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if name not in ("step", "time") and value is not None:
                self._board.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        """Bring everything written so far to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()
        self._board.close()


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            # The last line of a killed process may be cut short; it belongs to lost work.
            continue
    write_text(path, "".join(kept))


class Clock:
    """Time and tokens of steps, without the time in which checkpoints were written.

    Args:
        step: the last step that was done before the clock starts.
    """

    def __init__(self, step: int) -> None:
        self._first = self._step = step
        self._began = self._lap_began = time.perf_counter()
        self._paused_s = self._tokens = 0.0

    def add(self, tokens: float) -> None:
        """Count the tokens that one step trained on, over all ranks."""
        self._tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not the time of a step."""
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def lap(self, step: int) -> tuple[float, float]:
        """(seconds a step, tokens a second over all ranks) since the last lap."""
        now = time.perf_counter()
        seconds = max(now - self._lap_began - self._paused_s, 1e-9)
        result = seconds / max(step - self._step, 1), self._tokens / seconds
        self._lap_began, self._step, self._paused_s, self._tokens = now, step, 0.0, 0.0
        return result

    def left(self, step: int, last: int) -> float:
        """Seconds to the last step at the mean pace so far, checkpoints included."""
        return (last - step) * (time.perf_counter() - self._began) / max(step - self._first, 1)


def progress_line(record: dict[str, Any], total_steps: int, epochs: int, left_s: float) -> str:
    """One aligned line of plain text for a log file."""
    width = len(str(total_steps))
    gpu = record["peak_memory_reserved_gb"]
    memory_gb = record["memory_rss_gb"] if gpu is None else gpu
    validation = f"val loss {record['val_loss']:8.4f}  " if "val_loss" in record else ""
    return (
        f"step {record['step']:>{width}}/{total_steps}  "
        f"epoch {record['epoch']:>{len(str(epochs))}}/{epochs}  "
        f"loss {record['loss']:8.4f}  {validation}lr {record['lr']:.2e}  "
        f"grad norm {record['grad_norm']:8.3f}  "
        f"{record['tokens_per_second_per_gpu']:>8,.0f} tok/s/GPU  "
        f"mem {memory_gb:5.1f} GiB  left {duration(left_s)}"
    )


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 02:03."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def say(is_main: bool) -> Callable[[str], None]:
    """A print that speaks on rank 0 only, at once."""

    def speak(text: str) -> None:
        if is_main:
            print(text, flush=True)

    return speak
