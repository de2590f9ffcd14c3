"""Times variants of the same computation in turns and checks their results against a reference."""

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

# Rounds in which all variants are timed once; fewer when the time is short, but at least three.
ROUNDS, MIN_ROUNDS = 11, 3
# Each timing repeats short calls for about this long, so that clock resolution does not matter.
TIMED_S = 0.03

Tensors = dict[str, torch.Tensor]


class Unavailable(Exception):
    """A variant that cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Size:
    """The shapes of one measurement, in the terms of a Llama model.

    A micro-batch has batch x sequence tokens. `layers` is the number of transformer blocks for the
    optimizer part, `state_mib` the size of model and optimizer state for the checkpoint part.
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
        """Embedding dimension."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.batch * self.sequence


SIZES = {
    # For tests, which check results and not times.
    "tiny": Size(2, 64, 2, 1, 64, 256, 512, 1, 4, 1),
    # For a CPU: Llama 3.1 8B with every width divided by 8.
    "small": Size(2, 512, 8, 2, 64, 1792, 16032, 2, 8, 64),
    # Llama 3.1 8B.
    "8b": Size(2, 4096, 32, 8, 128, 14336, 128256, 4, 16, 1024),
}


@dataclass(frozen=True)
class Setting:
    """Device, dtype, shapes and time limits of a measurement.

    compiled: whether variants that use torch.compile are measured too.
    rounds, timed_s: each variant is timed `rounds` times, for about `timed_s` seconds each.
    deadline: value of time.monotonic() after which no new variant is started.
    """

    device: torch.device
    dtype: torch.dtype
    size: Size
    compiled: bool = True
    rounds: int = ROUNDS
    timed_s: float = TIMED_S
    deadline: float = math.inf

    @property
    def reference_dtype(self) -> torch.dtype:
        """Dtype of the reference: fp64 on a CPU; fp32 on a GPU, where fp64 is too slow."""
        return torch.float64 if self.device.type == "cpu" else torch.float32

    @property
    def tolerance(self) -> float:
        """Largest `relative_error` that a correct result in `dtype` may have."""
        return 1e-4 if self.dtype == torch.float32 else 3e-2

    def random(self, *shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
        """Normal random numbers in `dtype`, generated on the device: a CPU would take minutes."""
        return normal(shape, self.device, seed).mul_(scale).to(self.dtype)


@dataclass
class Runnable:
    """A variant that is set up and can be called.

    run: one forward call; returns the output.
    leaves: name -> leaf tensor whose gradient the backward pass computes; empty: forward only.
    results: what is compared with the reference, if it is not the output and the gradients.
    reference: the variant's own reference, if it computes with other weights by design.
    tolerance: by name of the result, where it differs from the case's tolerance.
    context: a context manager in which the variant runs.
    after: called after each timed call, and not timed.
    figures: further measurements, made at the end; they are printed in the column `notes`.
    """

    run: Callable[[], Any]
    leaves: Tensors = field(default_factory=dict)
    results: Callable[[], Tensors] | None = None
    reference: Callable[[], Tensors] | None = None
    tolerance: dict[str, float] = field(default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    after: Callable[[], None] = lambda: None
    figures: Callable[[], dict[str, Any]] = dict


@dataclass
class Variant:
    """One implementation of a case; `prepare` may raise ImportError or Unavailable."""

    name: str
    prepare: Callable[[], Runnable]


@dataclass
class Case:
    """A computation that several variants implement; times are relative to the first variant.

    what: shapes and data, as text.
    reference: name -> correct result, for "output" and for each leaf's gradient.
    grad_output: gradient of the output; None if there is no backward pass.
    rate: (unit, work of one forward and backward call), from which a rate is computed.
    blocking: measure how long the call blocks the host, not how long the device works.
    """

    name: str
    what: str
    variants: list[Variant]
    reference: Callable[[], Tensors]
    tolerance: float
    grad_output: torch.Tensor | None = None
    rate: tuple[str, float] | None = None
    blocking: bool = False


def normal(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Normal random numbers, fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a leaf tensor that requires grad."""
    return tensor.detach().requires_grad_()


def compiled(setting: Setting, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile of `function`; raises Unavailable if the setting excludes compilation."""
    if not setting.compiled:
        raise Unavailable("torch.compile is switched off")
    return torch.compile(function, **options)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest relative error of any row (last dimension) of a result.

    A row's error is ||value - exact|| divided by the larger of the row's norm and the root mean
    square of all rows' norms. So an error in a few rows is seen, and a row close to zero does not
    dominate. Infinite if a value is not finite or the shapes differ.
    """
    if value.shape != exact.shape:
        return math.inf
    rows = exact.detach().reshape(-1, exact.shape[-1]) if exact.ndim else exact.reshape(1, 1)
    difference = value.detach().to(rows.device, rows.dtype).reshape(rows.shape) - rows
    errors = torch.linalg.vector_norm(difference, dim=1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    mean_norm = norms.square().mean().sqrt()
    worst = float((errors / torch.maximum(norms, mean_norm).clamp_min(1e-30)).max())
    return worst if math.isfinite(worst) else math.inf


def run_case(case: Case, setting: Setting) -> dict[str, Any]:
    """Check, measure and time all variants of a case; returns the record for levers.json."""
    reference = case.reference()
    records: list[dict[str, Any]] = []
    prepared: list[tuple[Runnable, dict[str, Any]]] = []
    for variant in case.variants:
        record: dict[str, Any] = {"name": variant.name}
        records.append(record)
        try:
            if time.monotonic() > setting.deadline:
                raise Unavailable("no time left")
            runnable = variant.prepare()
            with runnable.context():
                record |= _check(case, runnable, reference, setting)
            prepared.append((runnable, record))
        except (ImportError, Unavailable) as error:
            record["skipped"] = _reason(error)
        except torch.OutOfMemoryError:
            record["skipped"] = "out of memory"
            _free_memory()
        except Exception as error:
            record["failed"] = _reason(error)
    del reference
    _free_memory()
    _time_in_turns(case, prepared, setting)
    for runnable, record in prepared:
        record["figures"] = runnable.figures()
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


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _call(case: Case, runnable: Runnable) -> Tensors:
    """One forward and backward call: the output and the gradients of the leaves."""
    output = runnable.run()
    if not runnable.leaves:
        return {"output": output} if isinstance(output, torch.Tensor) else {}
    gradients = torch.autograd.grad(output, list(runnable.leaves.values()), case.grad_output)
    return {"output": output.detach(), **dict(zip(runnable.leaves, gradients, strict=True))}


def _check(case: Case, runnable: Runnable, reference: Tensors, setting: Setting) -> dict[str, Any]:
    """First call, which compiles; comparison of its results with the reference; peak memory."""
    began = time.perf_counter()
    results = _call(case, runnable)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    runnable.after()
    if runnable.results is not None:
        results = runnable.results()
    exact = reference if runnable.reference is None else runnable.reference()
    errors = {name: relative_error(value, exact[name]) for name, value in results.items()}
    tolerances = {name: runnable.tolerance.get(name, case.tolerance) for name in errors}
    del results, exact
    peak = peak_bytes(lambda: _call(case, runnable), setting.device)
    runnable.after()
    return {
        "first_s": first_s,
        "errors": errors,
        "tolerances": tolerances,
        "equal": bool(errors) and all(errors[name] <= tolerances[name] for name in errors),
        "peak_bytes": peak,
    }


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of `call` in bytes, beyond what was allocated before.

    From torch's CUDA allocator on a GPU; from torch.profiler's allocation events on a CPU.
    """
    if device.type == "cuda":
        _free_memory()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def _time_in_turns(
    case: Case, prepared: list[tuple[Runnable, dict[str, Any]]], setting: Setting
) -> None:
    """Time the variants in turns and write the times into their records."""
    if not prepared:
        return
    total: list[list[float]] = [[] for _ in prepared]
    forward: list[list[float]] = [[] for _ in prepared]
    clock = _host_seconds if case.blocking or setting.device.type == "cpu" else _device_seconds

    def timed(index: int, function: Callable[[], Any], repeats: int) -> float:
        with prepared[index][0].context():
            seconds = clock(function, repeats)
            prepared[index][0].after()
        return seconds

    def forward_and_backward(index: int) -> Callable[[], Any]:
        return lambda: _call(case, prepared[index][0])

    repeats = 1
    if all(runnable.after is Runnable.after for runnable, _ in prepared):
        once = min(timed(index, forward_and_backward(index), 1) for index in range(len(prepared)))
        repeats = min(100, max(1, round(setting.timed_s / max(once, 1e-9))))
    for turn in range(setting.rounds):
        if turn >= MIN_ROUNDS and time.monotonic() > setting.deadline:
            break
        # Each round starts with another variant, so that the order has no effect.
        for index in (
            *range(turn % len(prepared), len(prepared)),
            *range(turn % len(prepared)),
        ):
            runnable = prepared[index][0]
            total[index].append(timed(index, forward_and_backward(index), repeats))
            if runnable.leaves:
                forward[index].append(timed(index, runnable.run, repeats))
    for (runnable, record), times, forward_times in zip(prepared, total, forward, strict=True):
        record["seconds"] = _quartiles(times)
        record["forward_s"] = _quartiles(forward_times) if runnable.leaves else None
        # Ratios are taken within a round, because the load of the machine changes between rounds.
        ratios = [time / base for time, base in zip(times, total[0], strict=True)]
        record["ratio"] = statistics.median(ratios)
        if case.rate is not None:
            record["rate"] = case.rate[1] / record["seconds"]["median"]


def _host_seconds(function: Callable[[], Any], repeats: int) -> float:
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


def _quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "rounds": len(values)}
