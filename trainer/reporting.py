"""What a run reports: its set-up, its logged steps, progress.json and its last line."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runspec import files, progress
from runspec.progress import Heartbeat
from trainer import metrics
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.checkpoint.committed import TrainerState
from trainer.config import TrainConfig
from trainer.data.batches import Data
from trainer.figures import Figures
from trainer.layers.batch import MicroBatch
from trainer.methods.base import Models
from trainer.parallel.device import described
from trainer.parallel.world import World

# The watchdog (slurm/watchdog.py, with its number of median steps) ends ranks that hang: it has
# their dumps written, and names the one that holds up the others. torch's own timeout is so much
# later: it would end the waiting ranks first, and is for runs without a supervisor.
SLOW_STEPS, GRACE_S = 5, 60.0


class Reporter:
    """Measures the steps of one start of a run and writes what people and the launcher read.

    Args:
        attempt: which start of the run this is, counted from 0.
        state: where the run is; the loop keeps it up to date.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        models: Models,
        data: Data,
        checkpoints: Checkpoints,
        attempt: int,
        state: TrainerState,
    ) -> None:
        self._config, self._world, self._policy = config, world, models.policy
        self._data, self._checkpoints, self._state = data, checkpoints, state
        self._attempt, self._device = attempt, described(world.device)
        self._metrics = world.on_main(lambda: metrics.Metrics(config.output_dir, state.step))
        frozen = [models.teacher] if models.teacher else []
        if config.reference_kind:
            frozen.append(models.reference or models.policy)
        self._frozen = _frozen_line(config, models)
        self._flops = metrics.model_flops(models.policy.module)
        for model in frozen:
            self._flops += metrics.model_flops(model.module, frozen=True)
        # The known peaks are bf16's.
        self._peak_tflops = metrics.peak_tflops(world.device) if config.dtype == "bf16" else None
        self._blocked_s = 0.0
        self.clock = metrics.Clock(state.step)
        logs = config.output_dir / files.LOGS / str(attempt)
        self._heartbeat = Heartbeat(logs if world.is_main else None)
        self._hang_timeout_s = float(os.environ.get("HANG_TIMEOUT_S") or 0)
        self._limit_s: float | None = None

    def setup(self, seconds: float) -> None:
        """Print what is trained, how and on what."""
        config, world, batches = self._config, self._world, self._data.training
        model = self._policy
        trainable, total = model.parameter_counts()
        validation = self._data.validation
        lines = [
            f"model      {model.module.title or config.model['_component_']}, {total:,} parameters",
            f"method     {model.method}, {trainable:,} trainable ({100 * trainable / total:.2f} %)",
            *self._frozen,
            f"ranks      {world.size} on {world.device.type}, {_layout(world, config)}",
            f"data       {batches.described}, {batches.samples_per_step} per step, "
            f"{batches.steps_per_epoch} steps per epoch",
            *([] if validation is None else [f"validation {validation.described}"]),
            f"steps      {batches.total_steps} in {config.epochs} epochs, "
            f"starting after step {self._state.step}; set up in {seconds:.1f} s",
            *(["compile    the first step is compiled: about a minute"] if config.compile else []),
        ]
        self._world.say("\n".join(lines))

    def flops(self, batch: MicroBatch) -> float:
        """Model FLOPs of a batch, the forward passes of frozen models included."""
        return self._flops.of(batch.token_count, batch.target_count, batch.lengths)

    def count(self, tokens: float, flops: float) -> None:
        """Count the work of one step, over all ranks."""
        self.clock.add(tokens, flops)
        self._heartbeat.step(self._state.step)
        if self._limit_s is None and self._hang_timeout_s and (usual_s := self._heartbeat.usual_s):
            self._limit_s = GRACE_S + max(self._hang_timeout_s, SLOW_STEPS * usual_s)
            self._world.limit(self._limit_s)

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """What happens inside is part of no step: saving, validating."""
        self._world.limit(None)
        with self.clock.paused(), self._heartbeat.phase(phase):
            yield
        self._world.limit(self._limit_s)

    def ending(self, phase: str) -> None:
        """The steps are over: stopping, exporting."""
        self._heartbeat.enter(phase)
        self._world.limit(None)

    def log(
        self, step: Figures, values: dict[str, float | None], lap: metrics.Work | None = None
    ) -> None:
        """Log a step; all ranks call this together.

        Args:
            step: as the loop sent it; all before it are counted, and none after it.
            values: loss and loss_mean, the objective's own metrics, grad_norm, and those of
                dataset_val if it was measured.
            lap: the work up to this step; None if it ends now.
        """
        state, world = self._state, self._world
        lap, total = lap or self.clock.lap(), self._data.training.total_steps
        left = self.clock.left(total)
        own = {**metrics.memory(world.device), "data_wait_s": lap.data_wait_s / max(lap.steps, 1)}
        highest = dict(zip(own, world.max(list(own.values())), strict=True))
        blocked = self._checkpoints.blocked_s - self._blocked_s
        self._blocked_s = self._checkpoints.blocked_s
        record = {
            "step": step.step,
            "epoch": self._data.training.epoch_of(step.step - 1) + 1,
            **{n: value for n, value in {**values, **step.more}.items() if n != "grad_norm"},
            "lr": step.lr,
            "grad_norm": values["grad_norm"],
            "skipped_steps": state.skipped_steps,
            **lap.rates(world.size, self._peak_tflops),
            "step_time_s": round(lap.seconds / max(lap.steps, 1), 4),
            "data_wait_s": round(highest["data_wait_s"], 4),
            # A peak of 0 is a CPU's: there is nothing to measure.
            **{n: round(v, 3) or None for n, v in highest.items() if n.endswith("_gb")},
            "checkpoint_blocked_s": round(blocked, 4),
            "tokens": step.tokens,
            "left_s": None if left is None else round(left, 1),
            "time": round(time.time(), 3),
        }
        if self._metrics is not None:
            self._metrics.write(record)
            self._world.say(metrics.progress_line(record, total, self._config.epochs))

    def saved(self) -> None:
        """Report the checkpoints that were committed since the last call."""
        for step in self._checkpoints.newly_committed():
            self.progress("running")
            self._world.say(f"saved checkpoints/step_{step}")

    def progress(self, state: str) -> None:
        """Bring progress.json up to date (rank 0).

        Args:
            state: running, stopped or finished.
        """
        if not self._world.is_main:
            return
        now, total, committed = self._state, self.clock.total, self._checkpoints.committed
        best_step, best_val_loss = committed.best() or (None, None)
        rates = total.rates(self._world.size, self._peak_tflops)
        facts = {
            "state": state,
            "attempt": self._attempt,
            "step": now.step,
            "total_steps": self._data.training.total_steps,
            # The name of rank 0's GPU, or CPU.
            "device": self._device,
            "checkpoint_step": max(committed.steps(), default=0),
            # The checkpoint with the lowest val_loss.
            "best_step": best_step,
            "best_val_loss": best_val_loss,
            # Losses are None before step 1.
            "loss_first": now.loss_first,
            "loss_last": now.loss_last,
            "skipped_steps": now.skipped_steps,
            # Of this start alone, and None until it has trained.
            **(rates if total.steps else dict.fromkeys(rates)),
        }
        progress.write(self._config.output_dir, facts)

    def finished(self) -> None:
        """Mark the run finished."""
        self.progress("finished")
        first, last = self._state.loss_first, self._state.loss_last
        span = "not measured" if first is None or last is None else f"{first:.4f} -> {last:.4f}"
        count = self._state.skipped_steps
        skipped = f", {count:,} updates skipped" if count else ""
        self._world.say(
            f"finished: {self._state.step} steps on {self._device}, loss {span}{skipped}"
        )

    def flush(self) -> None:
        """Bring the metrics to the disk."""
        if self._metrics is not None:
            self._metrics.flush()

    def close(self) -> None:
        """Bring the metrics to the disk, for good."""
        if self._metrics is not None:
            self._metrics.close()


def _frozen_line(config: TrainConfig, models: Models) -> list[str]:
    """What is run beside the policy, a line each."""
    lines = []
    if config.reference_kind:
        own = models.reference and f"frozen, {models.reference.parameter_counts()[1]:,} parameters"
        lines.append(f"reference  {own or 'the policy with its adapter off'}")
    if models.teacher is not None:
        lines.append(f"teacher    frozen, {models.teacher.parameter_counts()[1]:,} parameters")
    return lines


def _layout(world: World, config: TrainConfig) -> str:
    """How the ranks divide the work, in words."""
    layout = world.layout
    masters = f" with {config.master_weights} master weights" if config.master_weights else ""
    fp8 = f", products in fp8 ({config.fp8_recipe})" if config.fp8_recipe else ""
    parts = {
        config.dtype + masters + fp8: True,
        f"FSDP over {layout.shard}": layout.shard > 1,
        f"{layout.replicate} data-parallel replicas": layout.replicate > 1,
        f"tensor parallel over {layout.tensor_parallel}": layout.tensor_parallel > 1,
        f"expert parallel over {layout.expert_parallel}": layout.expert_parallel > 1,
        "parameters and optimizer on the CPU": config.fsdp_cpu_offload,
    }
    return ", ".join(part for part, holds in parts.items() if holds)
