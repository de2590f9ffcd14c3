"""Supervised fine-tuning, full or by an adapter: torchrun ... -m trainer.sft <run>/train.yaml"""

import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainer import activations, data, distributed, models, optimizers, parallel
from trainer import config as configs
from trainer import progress as progresses
from trainer.checkpoint import Checkpoints, TrainerState
from trainer.config import TrainConfig
from trainer.distributed import StopRequest, World
from trainer.errors import (
    TrainerError,
    describe,
    write_error_record,
)
from trainer.export import export
from trainer.flops import model_flops, peak_tflops
from trainer.generate import write_samples
from trainer.guard import NonFiniteGuard
from trainer.loss import TokenLoss
from trainer.metrics import Clock, Metrics, memory, progress_line, say, totals_line
from trainer.models import Model
from trainer.profiling import profiler
from trainer.progress import Progress
from trainer.tensor_parallel import vocabulary_split_loss
from trainer.validation import validation_loss
from trainer.weights import SafetensorsSource


class Trainer:
    """One run: everything that the training loop needs, set up in the order that can fail.

    Args:
        attempt: which start of the run this is, counted from 0.
    """

    def __init__(self, config: TrainConfig, world: World, attempt: int) -> None:
        started = time.monotonic()
        self.world = world
        self.say = say(world.is_main)
        self.config = config = self._compilable(config)
        for note in config.notes:
            self.say(f"note: {note}")
        self.stop = StopRequest(world, config.output_dir)
        torch.manual_seed(config.seed * 1_000_003 + world.rank)
        if config.cudnn_deterministic_mode is not None:
            torch.set_deterministic_debug_mode(config.cudnn_deterministic_mode)

        self.data = data.build(config, world, self.say)
        self.batches = self.data.training
        self.loss = world.agree(lambda: TokenLoss(config))
        self.model: Model = models.build(config, world, self.loss.output_chunks, self.data.faults)
        self.optimizer = world.agree(
            lambda: optimizers.build(config.optimizer, self.model.trainable)
        )
        self.scheduler = world.agree(
            lambda: optimizers.schedule(
                config.lr_scheduler, self.optimizer, self.batches.total_steps
            )
        )
        self.base_weights = self._base_weights()
        self.checkpoints = Checkpoints(
            config.output_dir,
            world,
            attempt,
            keep=config.keep_last_n_checkpoints,
            asynchronous=config.enable_async_checkpointing,
        )
        self.saved_at, self.blocked_s = time.monotonic(), 0.0
        self.state = self._resume()
        self.progress = Progress(self.batches.total_steps, attempt)
        self.metrics = world.on_main(lambda: Metrics(config.output_dir, self.state.step))
        self.guard = NonFiniteGuard(
            self.optimizer, config.max_non_finite_steps, world.device, self.state.skipped_steps
        )
        self.flops = model_flops(self.model.module)
        # The known peaks are bf16's.
        self.peak_tflops = peak_tflops(world.device) if config.dtype == "bf16" else None
        self.profiler = world.agree(lambda: profiler(config, world, self.state.step))
        self.clock = Clock(self.state.step)
        self._tell(time.monotonic() - started)
        self._report("running")

    def _compilable(self, config: TrainConfig) -> TrainConfig:
        """`config`, without `compile` where a node cannot: slower is better than not at all."""
        lacks = activations.missing_for_compile(self.world.device) if config.compile else None
        told = [(rank, what) for rank, what in enumerate(self.world.gather(lacks)) if what]
        if not told:
            return config
        self.say(f"note: not compiled, as the node of rank {told[0][0]} lacks {told[0][1]}")
        return replace(config, compile=False)

    def train(self) -> bool:
        """Train to the last step; False where a stop was asked for and honoured before it."""
        config, batches, state = self.config, self.batches, self.state
        last, weight = batches.total_steps, self.world.data_weight
        clock = self.clock
        with self.profiler as profile:
            for micro_batches in clock.waiting(batches.from_step(state.step)):
                targets, tokens, pairs, stop, too_many, failed, due = self.world.sum(
                    [
                        weight * sum(b.target_count for b in micro_batches),
                        weight * sum(b.token_count for b in micro_batches),
                        weight * sum(b.attention_pairs for b in micro_batches),
                        self.stop.seen_here(),
                        self.guard.exceeded(),
                        self.checkpoints.failed_here(),
                        self._save_is_due(),
                    ]
                )
                self._tell_saved()
                if failed:
                    self.checkpoints.wait()
                if too_many:
                    raise self.guard.fault(state.step)
                if stop:
                    self._honour_stop()
                    return False
                loss_sum = self._backward(micro_batches, max(targets, 1))
                step = state.step + 1
                validating = self._validates(step)
                logging = validating or step in (1, last) or step % config.log_every_n_steps == 0
                saving = (
                    step == last
                    or due
                    or (config.save_every_n_steps and step % config.save_every_n_steps == 0)
                )
                norm = self._update(loss_sum)
                state.step, state.tokens = step, state.tokens + int(tokens)
                # The last one was measured on other weights, and this checkpoint may have none.
                state.val_loss = None
                clock.add(tokens, self.flops.of(tokens, targets, pairs))
                if logging or saving:
                    figures = self._figures(loss_sum, targets, norm)
                if validating:
                    with clock.paused():
                        figures["val_loss"] = self._validate()
                if logging:
                    self._log(figures)
                if saving and (step == last or figures["grad_norm"] is not None):
                    with clock.paused():
                        self._save(wait=step == last)
                profile.step()
        return True

    def finish(self) -> None:
        """Write the export and the samples, then mark the run finished."""
        config = self.config
        self.optimizer.zero_grad(set_to_none=True)
        self._choose_weights()
        self.say("exporting the model ...")
        folder = export(self.model, config, self.world)
        self.say(f"exported to {folder}")
        # The other ranks are done; the model's memory is needed for the one that answers.
        del self.model, self.optimizer, self.scheduler
        device = self.world.device
        distributed.stop()
        if self.metrics is not None:
            self.metrics.close()
            if config.generate:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                write_samples(config.output_dir / "samples.jsonl", folder, config.generate, device)
        # Too late to stop: everything is done.
        self.stop.clear()
        self._report("finished")
        self.say(f"finished: {self.state.step} steps, loss {_span(self.progress)}")
        if self.progress.train_s is not None:
            self.say(totals_line(asdict(self.progress)))

    def _backward(self, micro_batches: list[data.MicroBatch], targets: float) -> torch.Tensor:
        """Gradients of the mean loss over `targets` tokens; this rank's summed loss, detached."""
        model, device = self.model.module, self.world.device
        # FSDP divides the sum over ranks by their number; the true divisor is all tokens.
        scale = self.world.data_size / targets
        total = torch.zeros((), device=device)
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            parallel.set_gradient_sync(model, last=last, each=self.config.sync_each_micro_batch)
            with vocabulary_split_loss(self.world.tensor_parallel_dim):
                loss_sum = self.loss(model, batch, device)
                (loss_sum * scale).backward()
            total += loss_sum.detach()
        return total

    def _update(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Clip, step unless something is not finite, schedule; the gradient norm."""
        parallel.sum_shares(self.model.trainable)
        norm = parallel.clip_gradients(self.model.trainable, self.config.clip_grad_norm, loss_sum)
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.guard.step(norm)
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        return norm

    def _figures(
        self, loss_sum: torch.Tensor, targets: float, norm: torch.Tensor
    ) -> dict[str, float | None]:
        """Loss and gradient norm over all ranks, None where one is not finite."""
        own = self.world.data_weight * loss_sum.item()
        loss = self.world.sum([own])[0] / max(targets, 1)
        state = self.state
        state.skipped_steps, in_row = self.guard.counts()
        if in_row >= self.config.max_non_finite_steps:
            raise self.guard.fault(state.step)
        if math.isfinite(loss):
            state.loss_first = loss if state.loss_first is None else state.loss_first
            state.loss_last = loss
        return {"loss": _finite(loss), "grad_norm": _finite(norm.item())}

    def _validates(self, step: int) -> bool:
        """Whether the validation loss is due after `step`: every n steps, or after each epoch."""
        if self.data.validation is None:
            return False
        every = self.config.run_val_every_n_steps or self.batches.steps_per_epoch
        return step == self.batches.total_steps or step % every == 0

    def _validate(self) -> float | None:
        """The validation loss; None where it is not finite, and no checkpoint is the best by it."""
        loss = validation_loss(self.model, self.loss, self.data.validation, self.world)
        self.state.val_loss = _finite(loss)
        return self.state.val_loss

    def _log(self, figures: dict[str, float | None]) -> None:
        state, config, world = self.state, self.config, self.world
        lap = self.clock.lap()
        own = {**memory(world.device), "data_wait_s": lap.data_wait_s / max(lap.steps, 1)}
        highest = dict(zip(own, world.max(list(own.values())), strict=True))
        self._keep_peaks(highest)
        blocked, self.blocked_s = (
            self.checkpoints.blocked_s - self.blocked_s,
            self.checkpoints.blocked_s,
        )
        record = {
            "step": state.step,
            "epoch": self.batches.epoch_of(state.step - 1) + 1,
            **{name: value for name, value in figures.items() if name != "grad_norm"},
            "lr": self.lr,
            "grad_norm": figures["grad_norm"],
            "skipped_steps": state.skipped_steps,
            **lap.rates(world.size, self.peak_tflops),
            "step_time_s": round(lap.seconds / max(lap.steps, 1), 4),
            "data_wait_s": round(highest["data_wait_s"], 4),
            # A peak of 0 is a CPU's: there is nothing to measure.
            **{n: round(v, 3) or None for n, v in highest.items() if n.endswith("_gb")},
            "checkpoint_blocked_s": round(blocked, 4),
            "tokens": state.tokens,
            "time": round(time.time(), 3),
        }
        if self.metrics is not None:
            self.metrics.write(record)
            left = self.clock.left(state.step, self.batches.total_steps)
            self.say(progress_line(record, self.batches.total_steps, config.epochs, left))

    def _keep_peaks(self, highest: dict[str, float]) -> None:
        now = self.progress
        for name in ("peak_memory_allocated_gb", "peak_memory_reserved_gb"):
            if highest[name]:
                setattr(now, name, round(max(highest[name], getattr(now, name) or 0), 3))

    def _save(self, wait: bool) -> None:
        if self.metrics is not None:
            self.metrics.flush()
        state = self.state
        state.world_size = self.world.size
        state.tensor_parallel_dim = self.world.tensor_parallel_dim
        state.skipped_steps, _ = self.guard.counts()
        state.scheduler = optimizers.schedule_state(self.scheduler)
        state.run = self._identity()
        self.checkpoints.save(self.model.module, self.optimizer, state, wait)
        self.saved_at = time.monotonic()
        self._tell_saved()

    def _tell_saved(self) -> None:
        """Tell of checkpoints that were committed, at once or beside the training."""
        for step in self.checkpoints.newly_committed():
            self._report("running")
            self.say(f"saved checkpoints/step_{step}")

    def _save_is_due(self) -> bool:
        """True on rank 0, whose clock counts for all, where save_every_minutes have passed."""
        minutes = self.config.save_every_minutes
        if minutes is None or not self.world.is_main:
            return False
        return time.monotonic() - self.saved_at >= 60 * minutes

    def _honour_stop(self) -> None:
        step = self.state.step
        self.say(f"asked to stop: stopping after step {step}")
        self.checkpoints.wait()
        self._tell_saved()
        if step and step not in self.world.gather(self.checkpoints.steps())[0]:
            self._save(wait=True)
        self._report("stopped")
        if self.metrics is not None:
            self.metrics.close()
        self.stop.clear()

    def _choose_weights(self) -> None:
        """Put the best checkpoint's weights into the model, where these are to be exported."""
        best = self.world.gather(self.checkpoints.best())[0]
        if self.config.export_checkpoint == "last" or best is None:
            if self.config.export_checkpoint == "best":
                self.say("no checkpoint has a val_loss: exporting the last step")
            return
        step, val_loss = best
        self.say(f"exporting step {step}, the best by val_loss {val_loss:.4f}")
        if step == self.state.step:
            return
        fault = self.checkpoints.load_weights(step, self.model.module)
        if fault is not None:
            self.say(f"checkpoints/step_{step} is damaged ({fault}): exporting the last step")

    def _resume(self) -> TrainerState:
        restored = self.checkpoints.load(self.model.module, self.optimizer, self._identity())
        if restored is None:
            return TrainerState()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(restored.scheduler)
        self.say(f"resuming from checkpoints/step_{restored.step}")
        return restored

    def _base_weights(self) -> str | None:
        """Which base model an adapter belongs to, for its checkpoints do not hold that."""
        if self.model.method == "full":
            return None
        found = self.world.on_main(
            lambda: SafetensorsSource.open(self.config.checkpointer).fingerprint()
        )
        return self.world.gather(found)[0]

    def _identity(self) -> dict[str, Any]:
        """What must stay the same between a checkpoint and the start that resumes it."""
        return {
            "method": self.model.method,
            "model": self.config.model,
            "base_weights": self.base_weights,
            "dtype": self.config.dtype,
            "master_weights": self.config.master_weights,
            "fp8_recipe_name": self.config.fp8_recipe,
            "optimizer": self.config.optimizer["_component_"],
            "seed": self.config.seed,
            "shuffle": self.config.shuffle,
            "dataset_size": self.batches.size,
            "dataset_sha256": self.batches.rows.samples.sha256,
            "packed_row_length": self.batches.rows.length,
            "samples_per_step": self.batches.samples_per_step,
            "steps_per_epoch": self.batches.steps_per_epoch,
        }

    def _report(self, state: str) -> None:
        """Bring progress.json up to date (rank 0)."""
        now = self.progress
        now.state, now.step = state, self.state.step
        now.checkpoint_step = max(self.checkpoints.steps(), default=0)
        now.loss_first, now.loss_last = self.state.loss_first, self.state.loss_last
        now.skipped_steps = self.state.skipped_steps
        total = self.clock.total
        if total.steps:
            for name, value in total.rates(self.world.size, self.peak_tflops).items():
                setattr(now, name, value)
            now.train_s = round(total.seconds, 3)
        now.best_step, now.best_val_loss = self.checkpoints.best() or (None, None)
        now.checkpoint_blocked_s = round(self.checkpoints.blocked_s, 3)
        if self.world.is_main:
            now.write(self.config.output_dir)

    def _tell(self, setup_s: float) -> None:
        config, world, batches = self.config, self.world, self.batches
        trainable, total = self.model.parameter_counts()
        per_step = batches.samples_per_step
        self.say(
            f"model      {config.model['_component_']}, {total:,} parameters\n"
            f"method     {self.model.method}, {trainable:,} trainable "
            f"({100 * trainable / total:.2f} %)\n"
            f"ranks      {world.size} on {world.device.type}, {parallel.described(config, world)}\n"
            f"data       {_described(batches)}, {per_step} a step, "
            f"{batches.steps_per_epoch} steps an epoch\n"
            f"{_validation_line(self.data.validation)}"
            f"steps      {batches.total_steps} in {config.epochs} epochs, "
            f"starting after step {self.state.step}; set up in {setup_s:.1f} s"
        )


def _described(batches: data.Batches) -> str:
    samples, rows = len(batches.rows.samples), batches.rows
    if rows.length is None:
        return f"{samples:,} samples"
    return (
        f"{samples:,} samples in {len(rows):,} packed rows of {rows.length:,} tokens, "
        f"{100 * rows.filled:.0f} % filled"
    )


def _validation_line(batches: data.Batches | None) -> str:
    return "" if batches is None else f"validation {_described(batches)}\n"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _span(progress: Progress) -> str:
    if progress.loss_first is None or progress.loss_last is None:
        return "not measured"
    return f"{progress.loss_first:.4f} -> {progress.loss_last:.4f}"


def is_finished(config: TrainConfig) -> bool:
    """True where an earlier start of this run has done everything."""
    recorded = progresses.recorded(config.output_dir)
    return recorded.get("state") == "finished" and (config.output_dir / "export").is_dir()


def run(config: TrainConfig, attempt: int) -> None:
    """Do one start of a run, from where the last one got to."""
    world = distributed.start(
        config.device,
        config.tensor_parallel_dim,
        config.data_parallel_replicate_dim,
        config.data_parallel_shard_dim,
    )
    if world.gather(is_finished(config))[0]:
        say(world.is_main)(f"already finished: see {config.output_dir / 'export'}")
        return
    trainer = Trainer(config, world, attempt)
    try:
        if trainer.train():
            trainer.finish()
    except Exception:
        trainer.checkpoints.settle()
        raise


def guarded(path: Path, task: Callable[[TrainConfig, int], None]) -> int:
    """Load the config and run `task`; turn a fault into a record, a message and an exit status."""
    rank, attempt = int(os.environ.get("RANK", 0)), _attempt()
    run_dir = path.absolute().parent
    try:
        config = configs.load(path)
        run_dir = config.output_dir
        task(config, attempt)
    except Exception as error:
        text = describe(error)
        # One write a message, so that the lines of several ranks do not mix.
        sys.stderr.write(f"[rank {rank}] error: {text}\n")
        sys.stderr.flush()
        if not isinstance(error, TrainerError):
            traceback.print_exc()
        try:
            write_error_record(run_dir / "logs" / str(attempt), rank, error)
        except OSError as fault:
            print(f"[rank {rank}] the error record failed: {fault}", file=sys.stderr, flush=True)
        return error.exit_status if isinstance(error, TrainerError) else 1
    distributed.stop()
    return 0


def _attempt() -> int:
    text = os.environ.get("COOKBOOK_ATTEMPT", "0")
    return int(text) if text.isdigit() else 0


def main(arguments: list[str]) -> int:
    """Train by the given train.yaml; exit status 0, 1, 2 for wrong usage, 65 for no finite loss."""
    if len(arguments) != 1:
        print("usage: python -m trainer.sft <run>/train.yaml", file=sys.stderr)
        return 2
    return guarded(Path(arguments[0]), run)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # A rank that failed must not hang in the clean-up of a broken process group.
        os._exit(status)
