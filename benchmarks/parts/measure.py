"""Times variants of one thing in turns and holds their results against a reference."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Variants are run in turns so many times, fewer where the time is short, but not fewer than three.
ROUNDS, FEWEST_ROUNDS = 11, 3
# A timed stretch is at least so long that neither the clock nor one interruption decides.
STRETCH_S = 0.03

Tensors = dict[str, torch.Tensor]


class Unavailable(Exception):
    """A variant that cannot run here; the message says why."""


@dataclass(frozen=True)
class Size:
    """The shapes of one measurement, in the terms of a Llama model.

    batch x sequence tokens are one micro-batch; layers counts those that an optimizer is measured
    on, state_mib the model and optimizer that a checkpoint holds.
    """

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    layers: int
    rank: int
    state_mib: int

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.sequence


SIZES = {
    # For tests: what is checked does not depend on the size.
    "tiny": Size(2, 64, 2, 1, 64, 256, 512, 1, 4, 1),
    # For a CPU: an eighth of Llama 3.1 8B in each width.
    "small": Size(2, 512, 8, 2, 64, 1792, 16032, 2, 8, 64),
    # Llama 3.1 8B.
    "8b": Size(2, 4096, 32, 8, 128, 14336, 128256, 4, 16, 1024),
}


@dataclass(frozen=True)
class Setting:
    """Where and how everything is measured.

    compiled: whether what compiles is measured too. rounds: how often each variant is timed, for
    stretch_s seconds each. deadline: time.monotonic() after which nothing new begins.
    """

    device: torch.device
    dtype: torch.dtype
    size: Size
    compiled: bool = True
    rounds: int = ROUNDS
    stretch_s: float = STRETCH_S
    deadline: float = math.inf

    @property
    def exact(self) -> torch.dtype:
        """What references are computed in: fp64 where it is quick enough, on the CPU."""
        return torch.float64 if self.device.type == "cpu" else torch.float32

    @property
    def tolerance(self) -> float:
        """How far a correct result in `dtype` may be from the reference, see `deviation`."""
        return 1e-4 if self.dtype == torch.float32 else 3e-2

    def random(self, *shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
        """Normal numbers in `dtype`, made where they are used: a CPU would take minutes."""
        return normal(shape, self.device, seed).mul_(scale).to(self.dtype)


@dataclass
class Ready:
    """A variant that is set up.

    run: one call; returns the output that gradients flow back from.
    leaves: name -> tensor of which a backward pass gives the gradient; none for no backward pass.
    results: what is held against the reference, where that is not output and gradients.
    reference: of its own, for a variant that by design computes with other numbers.
    tolerance: by result, where it is not the case's.
    around: what must hold while it runs. after: what follows each timed call, untimed.
    figures: what else there is to tell once all has run.
    """

    run: Callable[[], Any]
    leaves: Tensors = field(default_factory=dict)
    results: Callable[[], Tensors] | None = None
    reference: Callable[[], Tensors] | None = None
    tolerance: dict[str, float] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    after: Callable[[], None] = lambda: None
    figures: Callable[[], dict[str, Any]] = dict


@dataclass
class Variant:
    """One way to do a case's work; `prepare` may raise ImportError or Unavailable."""

    name: str
    prepare: Callable[[], Ready]


@dataclass
class Case:
    """Work that several variants do; the first of them is what the others are compared with.

    what: shapes and data in words.
    reference: name -> the right results; "output" and the leaves' names.
    upstream: the gradient of the output; None where there is no backward pass.
    rate: (unit, amount of work of one call, forward and backward) for a rate beside the time.
    blocking: time how long a call holds the caller up, not how long the device works on it.
    """

    name: str
    what: str
    variants: list[Variant]
    reference: Callable[[], Tensors]
    tolerance: float
    upstream: torch.Tensor | None = None
    rate: tuple[str, float] | None = None
    blocking: bool = False


def normal(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Normal numbers, fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, of which a gradient is wanted."""
    return tensor.detach().requires_grad_()


def compiled(setting: Setting, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile of `function`, for a variant; Unavailable where the setting has it off."""
    if not setting.compiled:
        raise Unavailable("compiling is switched off")
    return torch.compile(function, **options)


def deviation(value: torch.Tensor, exact: torch.Tensor) -> float:
    """How far a result is from the reference: its worst row (last dimension), relative.

    A row's error is ||value - exact|| over its norm, or over the root mean square of all rows'
    norms where that is larger, so that an error in few rows is seen and a row of almost zeros
    does not decide. Infinite where something is not finite or the shapes differ.
    """
    if value.shape != exact.shape:
        return math.inf
    rows = exact.detach().reshape(-1, exact.shape[-1]) if exact.ndim else exact.reshape(1, 1)
    difference = value.detach().to(rows.device, rows.dtype).reshape(rows.shape) - rows
    errors = torch.linalg.vector_norm(difference, dim=1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    typical = norms.square().mean().sqrt()
    worst = float((errors / torch.maximum(norms, typical).clamp_min(1e-30)).max())
    return worst if math.isfinite(worst) else math.inf


def run_case(case: Case, setting: Setting) -> dict[str, Any]:
    """Check, measure and time all variants of a case; the record that goes into the results."""
    reference = case.reference()
    records: list[dict[str, Any]] = []
    alive: list[tuple[Ready, dict[str, Any]]] = []
    for variant in case.variants:
        record: dict[str, Any] = {"name": variant.name}
        records.append(record)
        try:
            if time.monotonic() > setting.deadline:
                raise Unavailable("no time was left for it")
            ready = variant.prepare()
            with ready.around():
                record |= _checked(case, ready, reference, setting)
            alive.append((ready, record))
        except (ImportError, Unavailable) as error:
            record["skipped"] = _reason(error)
        except torch.OutOfMemoryError:
            record["skipped"] = "out of memory"
            _emptied()
        except Exception as error:
            record["failed"] = _reason(error)
    del reference
    _emptied()
    _time(case, alive, setting)
    for ready, record in alive:
        record["figures"] = ready.figures()
    return {
        "case": case.name,
        "what": case.what,
        "tolerance": case.tolerance,
        "rate_unit": None if case.rate is None else case.rate[0],
        "variants": records,
    }


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    if isinstance(error, ImportError | Unavailable):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"


def _emptied() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _call(case: Case, ready: Ready) -> Tensors:
    """One whole call: the output, and the gradients of the leaves."""
    output = ready.run()
    if not ready.leaves:
        return {"output": output} if isinstance(output, torch.Tensor) else {}
    gradients = torch.autograd.grad(output, list(ready.leaves.values()), case.upstream)
    return {"output": output.detach(), **dict(zip(ready.leaves, gradients, strict=True))}


def _checked(case: Case, ready: Ready, reference: Tensors, setting: Setting) -> dict[str, Any]:
    """The first call, which compiles; what it gives against the reference; its memory."""
    began = time.perf_counter()
    results = _call(case, ready)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    ready.after()
    if ready.results is not None:
        results = ready.results()
    exact = reference if ready.reference is None else ready.reference()
    errors = {name: deviation(value, exact[name]) for name, value in results.items()}
    tolerances = {name: ready.tolerance.get(name, case.tolerance) for name in errors}
    del results, exact
    peak = peak_bytes(lambda: _call(case, ready), setting.device)
    ready.after()
    return {
        "first_s": first_s,
        "errors": errors,
        "tolerances": tolerances,
        "equal": bool(errors) and all(errors[name] <= tolerances[name] for name in errors),
        "peak_bytes": peak,
    }


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most memory that `call` takes at any time beyond what there was before.

    On a GPU by the allocator's count; on a CPU by the profiler's, which sees each allocation.
    """
    if device.type == "cuda":
        _emptied()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    del kept
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _time(case: Case, alive: list[tuple[Ready, dict[str, Any]]], setting: Setting) -> None:
    """Run the variants in turns; write their times into the records."""
    if not alive:
        return
    whole: list[list[float]] = [[] for _ in alive]
    forward: list[list[float]] = [[] for _ in alive]
    clock = _blocked if case.blocking or setting.device.type == "cpu" else _device_seconds

    def stretch(index: int, function: Callable[[], Any], repeats: int) -> float:
        with alive[index][0].around():
            seconds = clock(function, repeats)
            alive[index][0].after()
        return seconds

    def backward_too(index: int) -> Callable[[], Any]:
        return lambda: _call(case, alive[index][0])

    repeats = 1
    if all(ready.after is Ready.after for ready, _ in alive):
        once = min(stretch(index, backward_too(index), 1) for index in range(len(alive)))
        repeats = min(100, max(1, round(setting.stretch_s / max(once, 1e-9))))
    for turn in range(setting.rounds):
        if turn >= FEWEST_ROUNDS and time.monotonic() > setting.deadline:
            break
        # No variant always comes after the same other one.
        for index in (*range(turn % len(alive), len(alive)), *range(turn % len(alive))):
            ready = alive[index][0]
            whole[index].append(stretch(index, backward_too(index), repeats))
            if ready.leaves:
                forward[index].append(stretch(index, ready.run, repeats))
    for (ready, record), times, firsts in zip(alive, whole, forward, strict=True):
        record["seconds"] = _spread(times)
        record["forward_s"] = _spread(firsts) if ready.leaves else None
        # Each round by itself, as what else the machine does changes between rounds.
        ratios = [time / base for time, base in zip(times, whole[0], strict=True)]
        record["ratio"] = statistics.median(ratios)
        if case.rate is not None:
            record["rate"] = case.rate[1] / record["seconds"]["median"]


def _blocked(function: Callable[[], Any], repeats: int) -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - began) / repeats


def _device_seconds(function: Callable[[], Any], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "rounds": len(values)}
