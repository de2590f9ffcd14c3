"""Other settings of a recipe by the predicted time of their step: --scaling and --tune.

`Scaling`: how fast it would be on more nodes and in other layouts, from what its ranks send.
`Tuning`: its fastest settings that fit. Tried are these layouts, with and without each kind of
activation checkpointing, and every way to split a step's rows into micro-steps; with sampled
answers also how many of the job's nodes train, and how many generate. The rows per step, and so
what is learned, stay the same. Nothing is measured: what is close in this table is for a
benchmark to decide.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from launcher.sizing import search
from launcher.sizing.communication import Message, messages
from launcher.sizing.search import Prediction, Predictor, layout_overrides
from launcher.sizing.step_config import GIB, StepConfig
from runspec.layout import Layout

NODES = (2, 4, 8, 16, 32, 64)
# Predictions that lie closer together than this say nothing about which is faster.
ALIKE = 0.05
SHOWN = 8


def layouts(step: StepConfig) -> list[tuple[int, int, int]]:
    """Return tensor parallelism, replicas and expert parallelism to compare, the simplest first.

    Layers whole or split within a node; one replica over all nodes or one replica in each, or, if
    an adapter is trained, in each GPU or tensor-parallel group; experts whole, spread over a node's
    ranks, or over all of a replica.
    """
    each = {1, step.nodes}
    return [
        (split, count, spread)
        for split in search.TENSOR_PARALLEL
        for count in sorted(each if step.adapter is None else each | {step.layout.ranks // split})
        for spread in search.spreads(step)
    ]


def layout_name(layout: Layout) -> str:
    """Return what a layout is called: TP8 x FSDP, EP8 x HSDP, ..."""
    spread = f"EP{layout.expert_parallel}" if layout.expert_parallel > 1 else ""
    split = f"TP{layout.tensor_parallel}" if layout.tensor_parallel > 1 else ""
    data = "DDP" if layout.replicate > 1 else ""
    if layout.shard > 1:
        data = "HSDP" if layout.replicate > 1 else "FSDP"
    return " x ".join(part for part in (split, spread, data) if part) or "one GPU"


class Scaling:
    """What is predicted of a recipe: its own step, and other layouts on more nodes.

    Each GPU has as many rows as in the recipe, or a tensor-parallel group one row if that would
    be less.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, own = predictor, predictor.own
        self.messages = messages(own)
        self.own = predictor.of(own)

        def rows(step: StepConfig) -> list[dict[str, int]]:
            per_rank = own.batch / own.layout.tensor_parallel
            return [{"batch": max(1, round(per_rank * step.layout.tensor_parallel))}]

        candidates = search.settings(own, nodes=NODES, layout=layouts, rows=rows)
        self.compared = [predictor.of(step) for step in candidates]
        # The simplest layout that fits and is within 5 % of the fastest, by nodes.
        self.choice: dict[int, Prediction] = {}
        for nodes in NODES:
            fitting = [each for each in self.compared if each.step.nodes == nodes and each.fits]
            if fitting:
                least = (1 - ALIKE) * max(each.rate for each in fitting)
                self.choice[nodes] = next(each for each in fitting if each.rate >= least)

    def as_json(self) -> dict[str, Any]:
        """Return everything; sizes of messages in bytes, times in seconds."""
        links, layout = self.predictor.links, self.own.step.layout
        return {
            "basis": "predicted, not measured",
            "mfu": self.predictor.mfu,
            "pace": self.predictor.pace,
            "links": vars(links),
            "own": _row(self.own),
            "sent_bytes": sum(message.sent for message in self.messages),
            "messages": [
                {**vars(each), "sent": each.sent, "seconds_each": links.seconds(layout, each)}
                for each in self.messages
            ],
            "compared": [_row(each) for each in self.compared],
            "choice": {nodes: layout_overrides(best.step) for nodes, best in self.choice.items()},
        }

    def lines(self) -> Iterator[str]:
        """Yield it as a person reads it."""
        took, step, links = self.own.time, self.own.step, self.predictor.links
        spread = step.layout.expert_parallel > 1
        inside = "tensor and expert parallelism" if spread else "tensor parallelism"
        yield (
            f"Messages of one step per GPU, {layout_name(step.layout)} on {step.nodes} x "
            f"{step.gpus_per_node} GPUs; predicted, not measured"
        )
        yield from self._message_lines()
        yield (
            f"one step {took.seconds:.3g} s, {took.tokens_per_second_per_gpu:,.0f} tokens/s/GPU: "
            f"MFU {100 * took.mfu:.1f} %, HFU {100 * took.hfu:.1f} %\n"
            f"computing {100 * took.computing_share:.0f} % of it, waiting for {inside} "
            f"{took.tensor_parallel_s:.2g} s, for weights and gradients {took.sharding_s:.2g} s\n\n"
            "Tokens/s/GPU by nodes, and the share of the time that is computing; predicted, not "
            "measured; * does not fit\n"
            f"by {self.predictor.basis}; {links.within_gbs:g} GB/s within a node, "
            f"{8 * links.between_gbs:g} Gbit/s per GPU between nodes"
        )
        yield from self._compared_lines()

    def _message_lines(self) -> Iterator[str]:
        alike: dict[tuple[str, str, int], list[Message]] = defaultdict(list)
        for each in self.messages:
            alike[each.what, each.kind, each.ranks].append(each)
        seconds, layout = self.predictor.links.seconds, self.own.step.layout
        for (what, kind, ranks), group in alike.items():
            count, sent = sum(each.count for each in group), sum(each.sent for each in group)
            took = sum(each.count * seconds(layout, each) for each in group)
            if took >= 0.0005:
                yield (
                    f"  {what:<24} {kind:<14} of {ranks:>4} {count:>6} x "
                    f"{sent / count / 2**20:>9.3f} MiB {sent / GIB:>9.2f} GiB {took:>8.3f} s"
                )

    def _compared_lines(self) -> Iterator[str]:
        rows: dict[str, dict[int, Prediction]] = defaultdict(dict)
        for each in self.compared:
            rows[layout_name(each.step.layout)][each.step.nodes] = each
        width = max(14, *(len(name) + 2 for name in rows))
        yield f"{'LAYOUT':<{width}}{'BATCH':>5}" + "".join(f"{nodes:>13}" for nodes in NODES)
        for name, cells in rows.items():
            batch = next(iter(cells.values())).step.batch
            yield f"{name:<{width}}{batch:>5}" + "".join(_cell(cells.get(nodes)) for nodes in NODES)
        yield "the simplest that fits and is within 5 % of the fastest:"
        for nodes, best in self.choice.items():
            name = layout_name(best.step.layout)
            yield f"  on {nodes:>2} nodes  {name:<13} {layout_overrides(best.step)}"


def _row(prediction: Prediction) -> dict[str, Any]:
    step = prediction.step
    return {
        "name": layout_name(step.layout),
        "overrides": layout_overrides(step),
        "batch": step.batch,
        "nodes": step.nodes,
        **prediction.as_json(),
    }


def _cell(prediction: Prediction | None) -> str:
    if prediction is None:
        return f"{'-':>13}"
    mark = " " if prediction.fits else "*"
    return f"{prediction.rate:>7,.0f}{mark}{100 * prediction.time.computing_share:>3.0f} %"


# The fastest settings ----------------------------------------------------------------------------


class Tuning:
    """What is predicted of a recipe, and of the settings near it that fit, the fastest first."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.own = predictor.of(predictor.own)
        modes = [{"checkpointing": mode} for mode in search.CHECKPOINTING]
        candidates = search.settings(
            predictor.own, split=_splits, layout=layouts, rows=self._rows, checkpointing=modes
        )
        fitting = [each for each in map(predictor.of, candidates) if each.fits]
        fitting.sort(key=lambda each: -each.rate)
        self.faster = [*self._simplest(fitting)]

    def _rows(self, step: StepConfig) -> Iterator[dict[str, int]]:
        """Every way to split the rows of the recipe's step."""
        own = self.predictor.own
        rows, left = divmod(own.rows_per_step, step.layout.data_parallel)
        for batch in () if left else range(1, rows + 1):
            if rows % batch == 0:
                for sync in {own.sync_each, step.fsdp if batch < rows else own.sync_each}:
                    yield {"batch": batch, "accumulation": rows // batch, "sync_each": sync}

    def changes(self, prediction: Prediction) -> str:
        """Return the keys that differ from the recipe's."""
        return search.overrides(prediction.step, self.own.step)

    def _simplest(self, fitting: list[Prediction]) -> Iterator[Prediction]:
        """Of settings predicted alike the one that changes the least, then the leanest."""
        while fitting:
            least = (1 - ALIKE) * fitting[0].rate
            # What does not fit is no measure.
            if self.own.fits and least <= self.own.rate:
                return
            alike = [each for each in fitting if each.rate > least]
            yield min(alike, key=lambda each: (self.changes(each).count("="), each.peak_gib))
            fitting = fitting[len(alike) :]

    def as_json(self) -> dict[str, Any]:
        """Return the recipe's own setting and the faster ones; times in seconds."""
        return {
            "basis": "predicted, not measured",
            "pace": self.predictor.pace,
            "own": {"overrides": "", **self.own.as_json()},
            "faster": [{"overrides": self.changes(each), **each.as_json()} for each in self.faster],
        }

    def lines(self) -> Iterator[str]:
        """Yield it as a person reads it."""
        step, predictor = self.own.step, self.predictor
        yield (
            f"Settings that fit {predictor.gpu.name}, {step.rows_per_step} rows per step in each; "
            "predicted, not measured"
        )
        yield f"by {predictor.basis}"
        yield f"{'TOKENS/S/GPU':>12}{'MFU %':>7}{'HFU %':>7}{'GIB':>7}  CHANGES"
        fits = "" if self.own.fits else ", which does not fit"
        yield _line(self.own, f"none: {layout_name(step.layout)}, as the recipe has it{fits}")
        if self.faster and not self.own.fits:
            yield "the recipe does not fit; these settings do, the fastest first:"
        for each in self.faster[:SHOWN]:
            yield _line(each, self.changes(each))
        if not self.faster and self.own.fits:
            yield "nothing that fits is predicted to be more than 5 % faster"
        elif not self.faster:
            yield (
                "neither the recipe nor a setting near it fits; --compare shows whether more GPUs, "
                "LoRA or QLoRA do"
            )


def _splits(step: StepConfig) -> Iterator[int]:
    """How many of the job's nodes may train, if others can generate."""
    nodes = step.nodes + step.rollout_nodes
    return iter(range(nodes, 0, -1) if step.keeps_sampled else (nodes,))


def _line(prediction: Prediction, text: str) -> str:
    took = prediction.time
    return (
        f"{prediction.rate:>12,.0f}{100 * took.mfu:>7.1f}{100 * took.hfu:>7.1f}"
        f"{prediction.peak_gib:>7.1f}  {text}"
    )
