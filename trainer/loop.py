"""The training loop: steps, stop, save, log. It knows no method; `objective` is the method."""

import gc
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from runspec.step import StepSums
from trainer import figures, optimizers
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.checkpoint.committed import TrainerState
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.figures import Figures
from trainer.groups import trained_of
from trainer.layers.batch import MicroBatch
from trainer.methods.base import Models, Objective
from trainer.metrics import Work
from trainer.models.builder import Builder
from trainer.parallel import activations, gradients
from trainer.parallel import world as distributed
from trainer.parallel.world import StopRequest, World
from trainer.profiling import profiler
from trainer.reporting import Reporter
from trainer.sharded import reshard

if TYPE_CHECKING:
    from trainer.layers.balance import Balance

# Steps between two runs of Python's collector, as in torchtitan.
COLLECT_EVERY = 50


class Trainer:
    """One start of a run: everything that the loop needs, set up in the order that can fail.

    Args:
        attempt: which start of the run this is, counted from 0.
        objective: the training method.
    """

    def __init__(
        self, config: TrainConfig, world: World, attempt: int, objective: type[Objective]
    ) -> None:
        started = time.monotonic()
        self.world = world
        self.config = config = self._compilable(config)
        for note in config.notes:
            world.say(f"note: {note}")
        self.stop = StopRequest(world, config.output_dir)
        torch.manual_seed(config.seed * 1_000_003 + world.rank)
        if config.cudnn_deterministic_mode is not None:
            torch.set_deterministic_debug_mode(config.cudnn_deterministic_mode)

        self.objective = objective(config, world)
        self.data = self.objective.build_data()
        self.batches = self.data.training
        self.models = self.objective.build_models(Builder(config, world, self.data))
        self.model = self.models.policy
        # Parameters of a model that FSDP does not shard: the loop averages their gradients.
        held = isinstance(self.model.module, FSDPModule)
        self.replicas = None if held else world.replicas()
        self.balance = self._watch_routers()
        if config.checkpointer.get("adapter_checkpoint") is not None:
            from trainer.checkpoint import adapter

            continued = world.on_all(lambda: adapter.load(self.model, config))
            world.say(f"adapter from {continued}")
        self.objective.prepare(self.models, self.data)
        trainable, steps = trained_of(self.model.module), self.batches.total_steps
        self.optimizer = world.on_all(lambda: optimizers.build(config.optimizer, trainable))
        self.scheduler = world.on_all(
            lambda: optimizers.schedule(config.lr_scheduler, self.optimizer, steps)
        )
        keep, asynchronous = config.keep_last_n_checkpoints, config.enable_async_checkpointing
        self.checkpoints = Checkpoints(config.output_dir, world, attempt, keep, asynchronous)
        self.identity = self.objective.identity(self.models, self.data)
        self.saved_at = time.monotonic()
        # This rank's share of the loss of each step since the last logged one.
        self.losses: list[torch.Tensor] = []
        # The step before, if its figures are still to be logged, and its time if that is known.
        self.before: tuple[Figures, Work | None] | None = None
        self.state = self._resume()
        self.reporter = Reporter(
            config, world, self.models, self.data, self.checkpoints, attempt, self.state
        )
        self.guard = optimizers.NonFiniteGuard(
            self.optimizer, config.max_non_finite_steps, world.device, self.state.skipped_steps
        )
        self.profiler = world.on_all(lambda: profiler(config, world))
        self.reporter.setup(time.monotonic() - started)
        self.reporter.progress("running")

    def _compilable(self, config: TrainConfig) -> TrainConfig:
        """`config`, without `compile` if a node cannot: slower is better than not at all."""
        lacks = activations.missing_for_compile(self.world.device) if config.compile else None
        lacking = [(rank, what) for rank, what in enumerate(self.world.gather(lacks)) if what]
        if not lacking:
            return config
        self.world.say(
            f"note: not compiled, as the node of rank {lacking[0][0]} lacks {lacking[0][1]}"
        )
        return replace(config, compile=False)

    def _watch_routers(self) -> "Balance | None":
        """What measures the policy's routers, and adds their auxiliary loss; None without them."""
        routers, world = self.model.module.routers(), self.world
        if not routers:
            return None
        # Imported late: most models have no routers, and a rank is to start fast.
        from trainer.layers.balance import Balance

        parts = self.config.gradient_accumulation_steps * world.tensor_parallel_dim
        return Balance(routers, self.config.router_aux_loss_coef, parts)

    def train(self) -> bool:
        """Train to the last step; False if a stop was requested and done before it."""
        with self.profiler as profile:
            waited = self.reporter.clock.waiting(self.batches.from_step(self.state.step))
            for given in _collected_between(waited):
                micro_batches = self.objective.before_step(self.models, given, self.state.step)
                agreed = self._agreed(micro_batches)
                if self._stops(agreed):
                    return False
                self._step(micro_batches, agreed)
                if profile is not None:
                    profile.step()
        return True

    def _agreed(self, micro_batches: list[MicroBatch]) -> StepSums:
        """What all ranks must know before a step."""
        weight = self.world.data_weight
        own = StepSums(
            weight * sum(map(self.objective.target_count, micro_batches)),
            weight * sum(b.token_count for b in micro_batches),
            weight * sum(map(self.reporter.flops, micro_batches)),
            self.stop.seen_here(),
            self.guard.exceeded(),
            self.checkpoints.failed_here(),
            self.world.is_main and self.checkpoints.committed.lease.lost_here(),
            self._save_is_due(),
        )
        return StepSums(*self.world.sum(own))

    def _stops(self, agreed: StepSums) -> bool:
        """Whether the run has stopped before the next step; raises what has ended it."""
        if agreed.lost:
            raise self.checkpoints.committed.lease.superseded()
        self.reporter.saved()
        if agreed.failed:
            self.checkpoints.wait()
        if agreed.too_many:
            raise self.guard.fault(self.state.step)
        if agreed.stop:
            self._log_before()
            self._honour_stop()
        return bool(agreed.stop)

    def _step(self, micro_batches: list[MicroBatch], agreed: StepSums) -> None:
        """One optimizer step, and what is due after it: validation, a log line, a checkpoint."""
        config, state, last = self.config, self.state, self.batches.total_steps
        sums = self._backward(micro_batches, max(agreed.targets, 1))
        if agreed.targets:
            self.losses.append(sums["loss"] / agreed.targets)
        step = state.step + 1
        validating = self._validates(step)
        logging = validating or step in (1, last) or step % config.log_every_n_steps == 0
        every = config.save_every_n_steps
        saving = step == last or agreed.due or (every and step % every == 0)
        norm = self._update(sums["loss"])
        self._log_before()
        state.step, state.tokens = step, state.tokens + int(agreed.tokens)
        # The last one was measured on other weights, and this checkpoint may have none.
        state.val_loss = None
        self.reporter.count(agreed.tokens, agreed.flops)
        if logging or saving:
            sent = self._sent(sums, agreed.targets, norm, logging)
        # Any other logged step is read when the next one has been launched.
        if step in (1, last) or validating or saving:
            values = self._read(sent)
            if validating:
                with self.reporter.paused("validating"):
                    values |= self._validate()
                saving = saving or self._is_best()
            if logging:
                self.reporter.log(sent, values)
            if saving and (step == last or values["grad_norm"] is not None):
                if self._is_best():
                    state.best_val_loss = state.val_loss
                with self.reporter.paused("saving"):
                    self._save(wait=step == last)
        elif logging:
            # A CPU has done the step by now; the next one's time is not this one's.
            done = sent.arrived is None
            self.before = sent, self.reporter.clock.lap() if done else None

    def finish(self) -> None:
        """Write the export, and mark the run finished: what follows is none of its steps.

        Beside the weights the memory is free: the optimizer, what is frozen, and the copies that
        asynchronous saves have kept.
        """
        config = self.config
        self.reporter.ending("exporting")
        self.optimizer.zero_grad(set_to_none=True)
        # What is frozen is not exported.
        self.models = Models(self.model)
        self.checkpoints.release()
        del self.optimizer, self.scheduler, self.guard
        # FSDP's objects refer to each other: until then a frozen model keeps its memory.
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
            # New in torch 2.12; with 2.11 the host's pinned memory stays.
            if hasattr(torch.accelerator, "empty_host_cache"):
                torch.accelerator.empty_host_cache()
        self._choose_weights()
        self.world.say("exporting the model ...")
        # Imported late, as elsewhere here: a rank starts faster without what it needs later.
        from trainer.checkpoint.export import export

        folder = export(self.model, config, self.world)
        self.world.say(f"exported to {folder}")
        distributed.stop()
        self.reporter.close()
        # Too late to stop: everything is done.
        self.stop.clear()
        self.reporter.finished()

    def _backward(self, micro_batches: list[MicroBatch], targets: float) -> dict[str, torch.Tensor]:
        """Gradients of the mean loss over `targets`; this rank's sums by name, detached."""
        model = self.model.module
        # FSDP divides the sum over ranks by their number; the true divisor is all targets.
        scale = self.world.layout.data_parallel / targets
        sums = {"loss": torch.zeros((), device=self.world.device)}
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            gradients.set_gradient_sync(model, last=last, each=self.config.sync_each_micro_batch)
            loss, metrics = self.objective.loss(self.models, batch)
            (loss * scale).backward()
            if self.balance is not None:
                count = self.objective.target_count(batch)
                routed = self.balance.metrics()
                metrics = {**metrics, **{name: mean * count for name, mean in routed.items()}}
            figures.add(sums, {"loss": loss.detach(), **metrics}, self.objective.extremes)
        return sums

    def _update(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Clip and step unless something is not finite, schedule; the gradient norm."""
        trained, config = self.model.trainable, self.config
        gradients.reduce_partial_gradients(trained)
        if self.replicas is not None:
            dtype = gradients.REDUCED_IN[config.fsdp_reduce_dtype]
            gradients.average_over_replicas(trained, self.replicas, dtype)
        replicas = 1 if self.replicas is None else self.replicas.size()
        norm = gradients.gradient_norm(trained, loss_sum, replicas)
        self.lr = optimizers.learning_rate(self.optimizer)
        self.guard.step(trained, norm, config.clip_grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        return norm

    def _sent(
        self, sums: dict[str, torch.Tensor], targets: float, norm: torch.Tensor, logged: bool
    ) -> Figures:
        """The step's figures, on their way to the host."""
        device = self.world.device
        # One sum over all ranks: the losses since the last logged step come with this step's.
        recent = torch.stack(self.losses).sum() if self.losses else torch.zeros((), device=device)
        values = [*sums.values(), recent, norm, *self.guard.left_out()]
        step_figures = Figures(
            self.state.step,
            self.state.tokens,
            self.lr,
            targets,
            list(sums),
            len(self.losses),
            self.objective.step_figures() if logged else {},
            *figures.sent(values),
        )
        if logged:
            self.losses.clear()
        return step_figures

    def _read(self, step: Figures) -> dict[str, float | None]:
        """Means over all ranks and the gradient norm; None for one that is not finite.

        A step without a target has no mean. loss_mean is that of the steps since the last logged
        one.
        """
        *own, recent, norm, skipped, in_row = step.read()
        extremes, state = self.objective.extremes, self.state
        named = dict(zip(step.names, own, strict=True))
        summed, losses = figures.over_ranks(self.world, named, recent, extremes)
        state.skipped_steps = int(skipped)
        if in_row >= self.config.max_non_finite_steps:
            raise self.guard.fault(step.step)
        if skipped >= step.step == self.batches.total_steps:
            raise self.guard.fault(step.step, "in every step of the run")
        means = figures.means(summed, step.targets, extremes, self.objective.counted)
        if means["loss"] is not None:
            state.loss_first = means["loss"] if state.loss_first is None else state.loss_first
            state.loss_last = means["loss"]
        means["loss_mean"] = figures.finite(losses / step.losses) if step.losses else None
        return {**means, "grad_norm": figures.finite(norm)}

    def _log_before(self) -> None:
        """Log the step before, while the device works at the one that was launched."""
        before, self.before = self.before, None
        if before is not None:
            step, lap = before
            self.reporter.log(step, self._read(step), lap)

    def _validates(self, step: int) -> bool:
        """Whether the validation loss is due after `step`: every n steps, or after each epoch."""
        if self.data.validation is None:
            return False
        every = self.config.run_val_every_n_steps or self.batches.steps_per_epoch
        return step == self.batches.total_steps or step % every == 0

    def _validate(self) -> dict[str, float | None]:
        """Means over all targets of dataset_val, each sample once: val_loss, and the metrics.

        None for one that is not finite; no step is the best by such a val_loss. Leaves
        weights, gradients and random state as they were; all ranks call this together.
        """
        module, world, targets = self.model.module, self.world, 0
        sums: dict[str, torch.Tensor] = {}
        batches = self.data.validation
        if batches is None:
            return {}
        module.eval()
        try:
            with torch.no_grad():
                for (batch,) in batches.from_step(0):
                    loss, metrics = self.objective.loss(self.models, batch)
                    values = {"loss": loss, **metrics}
                    doubles = {name: value.double() for name, value in values.items()}
                    figures.add(sums, doubles, self.objective.extremes)
                    targets += self.objective.target_count(batch)
        finally:
            module.train()
            self.objective.validated()
            for each in self.models.modules:
                reshard(each)
        extremes, own = self.objective.extremes, {n: value.item() for n, value in sums.items()}
        summed, count = figures.over_ranks(world, own, targets, extremes)
        of_all = figures.means(summed, count, extremes, self.objective.counted)
        self.state.val_loss = of_all["loss"]
        return {f"val_{name}": mean for name, mean in of_all.items()}

    def _is_best(self) -> bool:
        """Whether the val_loss of this very step is the lowest, and its weights are wanted."""
        measured, best = self.state.val_loss, self.state.best_val_loss
        wanted = self.config.export_checkpoint != "last"
        return wanted and measured is not None and (best is None or measured < best)

    def _settings(self) -> dict[str, Any]:
        """What may change between a checkpoint and the start that resumes it, by key."""
        return {
            "optimizer": self.config.optimizer,
            "lr_scheduler": self.config.lr_scheduler or {},
            "total_steps": self.batches.total_steps,
            **self.objective.own_values(may_change=True),
        }

    def _save(self, wait: bool) -> None:
        self.reporter.flush()
        state = self.state
        state.world_size = self.world.size
        state.tensor_parallel_dim = self.world.tensor_parallel_dim
        state.skipped_steps = self.guard.total()
        state.lr = optimizers.learning_rate(self.optimizer)
        state.run, state.settings = self.identity, self._settings()
        state.data = self.batches.state(state.step)
        self.checkpoints.save(self.model.module, self.optimizer, state, wait)
        self.saved_at = time.monotonic()
        self.reporter.saved()

    def _save_is_due(self) -> bool:
        """True on rank 0, whose clock counts for all, if save_every_minutes have passed."""
        minutes = self.config.save_every_minutes or math.inf
        return self.world.is_main and time.monotonic() - self.saved_at >= 60 * minutes

    def _honour_stop(self) -> None:
        step = self.state.step
        self.world.say(f"asked to stop: stopping after step {step}")
        self.reporter.ending("stopping")
        self.checkpoints.wait()
        self.reporter.saved()
        if step and step not in self.checkpoints.steps():
            self._save(wait=True)
        self.reporter.progress("stopped")
        self.reporter.close()
        self.stop.clear()

    def _choose_weights(self) -> None:
        """Put the best checkpoint's weights into the model, if these are to be exported."""
        best = self.world.from_main(self.checkpoints.committed.best)
        if self.config.export_checkpoint == "last" or best is None:
            if self.config.export_checkpoint == "best":
                self.world.say("no checkpoint has a val_loss: exporting the last step")
            return
        step, val_loss = best
        of = "of all validations"
        if self.state.best_val_loss is None or self.state.best_val_loss < val_loss:
            of = "among the checkpoints that are left"
        self.world.say(f"exporting step {step}: its val_loss {val_loss:.4f} is the lowest {of}")
        if step == self.state.step:
            return
        fault = self.checkpoints.load_weights(step, self.model.module)
        if fault is not None:
            self.world.say(f"checkpoints/step_{step} is damaged ({fault}): exporting the last step")

    def _resume(self) -> TrainerState:
        """Restore the newest checkpoint; the config decides on optimizer, schedule and steps."""
        last = self.batches.total_steps
        note = optimizers.warmup_note(self.config.lr_scheduler, last)
        if note is not None:
            self.world.say(note)
        state = self.checkpoints.load(self.model.module, self.optimizer, self.identity)
        if state is None:
            return TrainerState()
        if state.step > last:
            raise ConfigError(
                f"epochs and max_steps give {last} steps, and checkpoints/step_{state.step} has "
                f"done more; set max_steps={state.step} to export it, or a higher number to go on"
            )
        self.batches.restore(state.step, state.data)
        optimizers.advance(self.scheduler, state.step)
        self.world.say(f"resuming from checkpoints/step_{state.step}")
        for change in state.changes(self._settings()):
            self.world.say(f"note: {change}, from step {state.step + 1} on")
        rate = optimizers.learning_rate(self.optimizer)
        if state.lr is not None and state.lr != rate and state.step < last:
            self.world.say(
                f"note: the learning rate of step {state.step + 1} changes from {state.lr:.4g} to "
                f"{rate:.4g}"
            )
        return state


def _collected_between(steps: Iterable[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """Let Python's collector run between steps only, on all ranks at the same ones.

    Within a step it would hold up the launches of one rank, for which all others then wait.
    """
    gc.collect()
    gc.disable()
    try:
        for number, step in enumerate(steps, 1):
            yield step
            if number % COLLECT_EVERY == 0:
                gc.collect(1)
    finally:
        gc.enable()
