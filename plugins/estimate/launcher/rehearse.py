"""cookbook doctor --rehearse: a recipe's parts on one node, in ten minutes, and what to change."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher import gpus, slurm, venv, yamlfile
from launcher import site as sites
from launcher.check import Finding, failed, preflight
from launcher.check.doctor.ask import NodeReport, Question, ask
from launcher.check.doctor.report import node_findings
from launcher.do.prepare import prepare
from launcher.do.submit import context, plan, refuse
from launcher.errors import RunFault, UsageFault
from launcher.recipe import load as recipes
from launcher.recipe.model import Recipe, Resources
from launcher.run import directory
from launcher.run.directory import runs_root
from launcher.site import Site
from launcher.slurm import executors
from launcher.slurm.job import Executor
from plugins.estimate.launcher import rehearsal
from plugins.estimate.launcher.recipe_step import model_of
from plugins.estimate.launcher.rehearsal import Part, Scene
from runspec import files
from runspec.shape import Shape

LIMIT_S = 600
# Of the checks before a part, the folders' creation and Slurm's own.
_SPARE_S = 60
# Number of blocks, or as many as needed to have one of each kind; number of samples.
BLOCKS, SAMPLES = 4, 4000
_OVERRIDES = (
    # rehearse.sh ends each part.
    *("max_steps=1000000", "epochs=1000000", "log_every_n_steps=1"),
    *("save_every_n_steps=1000000", "keep_last_n_checkpoints=1"),
)

_LEFT_OUT = ("dataset_val", "run_val_every_n_steps")

Say = Callable[[str], None]


def rehearse(
    site: Site, name: str, overrides: Sequence[str], wait_s: float, say: Say
) -> tuple[Path, list[Finding]]:
    """Rehearse a recipe on one node of the site; return the folder of its logs, and the findings.

    Args:
        wait_s: how long the job may wait to start.

    Raises:
        UsageFault: the recipe is none of the kit's own methods, or is wrong.
        PreflightFault: a check found a fault that would stop each part.
        RunFault: the job did not start.
    """
    executor = executors.choose(False)
    kept = [each for each in overrides if not each.startswith("first_blocks=")]
    whole = _recipe(name, kept, site, executor)
    if (method := whole.entry.method) is None:
        raise UsageFault(f"{whole.name} starts {whole.entry_name}: only training can be rehearsed")
    root, ranks = site.root, whole.resources.gpus_per_node
    config = whole.resolved(root, "run")
    shape, _ = model_of(config, method, [])
    cut = [*overrides, *_cut(whole, shape, overrides)]
    short = _recipe(name, cut, site, executor)
    refuse(preflight.faults(context(plan(short, site, executor, "rehearsal"))))
    prepare(short, site, say)
    folder = root / "rehearsals" / directory.new_name(whole.name)
    blocks = model_of(short.resolved(root, "run"), method, [])[0].layers
    parts = _parts(name, cut, site, executor, folder, blocks)
    say(
        f"rehearsing {whole.name} with {blocks} of {shape.layers} blocks "
        f"and {ranks} rank{'s' * (ranks > 1)} on one node: {LIMIT_S // 60} minutes at most; logs "
        f"in {folder}"
    )
    answered, report, findings = _asked(site, short, folder, wait_s)
    gpu = gpus.by_label(report.gpus[0][0]) if report.gpus else None
    scene = Scene(whole.name, config, ranks, shape.layers, gpu, site.network_gbits)
    findings += rehearsal.findings(scene, _ended(parts, report))
    if not report.yes("rehearsed"):
        why = answered.message or "its time was over"
        message, remedy = "the job ended before all parts had run", "with fewer first_blocks"
        findings.append(failed("rehearsal", f"{message} ({why})", f"see the logs; again, {remedy}"))
    return folder, findings


def _asked(
    site: Site, short: Recipe, folder: Path, wait_s: float
) -> tuple[slurm.Step, NodeReport, list[Finding]]:
    """Check a node and run all parts there, as one job; return the node's findings, too."""
    ranks = short.resources.gpus_per_node
    own = {key: str(value) for key, value in (short.config.get("env") or {}).items()}
    question = Question(
        replace(site, environment=site.environment | own),
        _srun(site, short.resources),
        ranks,
        venv.torch_build(),
        wait_s,
        LIMIT_S + wait_s,
    )
    settings = {
        "RANKS_PER_NODE": ranks,
        "REHEARSAL": folder,
        "MODULE": short.entry.module,
        "LIMIT_S": LIMIT_S - _SPARE_S,
        "HF_HOME": site.root / "hf",
        "COOKBOOK_ROOT": site.root,
    }
    script = (Path(__file__).parents[1] / "rehearse.sh").read_text(encoding="utf-8")
    answered, reports = ask(question, settings, script)
    if answered.pending or not reports:
        message = answered.message or "Slurm gave no reason"
        raise RunFault(
            f"the job of the rehearsal did not start within {wait_s:.0f} s ({message}) and was "
            "cancelled: try again later, or wait longer with --wait SECONDS"
        )
    return answered, reports[0], node_findings(reports[0], question)


def _recipe(name: str, overrides: Sequence[str], site: Site, executor: Executor) -> Recipe:
    return sites.complete(recipes.load(name, overrides, {"nodes": 1}), site, executor)


def _cut(whole: Recipe, shape: Shape, given: Sequence[str]) -> list[str]:
    """The overrides that make a recipe short."""
    order = shape.order
    kinds = 1 + max(order.index(kind) for kind in set(order))
    overrides = [*_OVERRIDES, *(f"~{key}" for key in _LEFT_OUT if key in whole.config)]
    if not any(each.startswith("first_blocks=") for each in given):
        overrides.append(f"first_blocks={min(len(order), max(BLOCKS, kinds))}")
    split = (whole.config.get("dataset") or {}).get("split")
    if isinstance(split, str) and split.isidentifier():
        overrides.append(f"dataset.split={split}[:{SAMPLES}]")
    return overrides


def _parts(
    name: str, cut: list[str], site: Site, executor: Executor, folder: Path, blocks: int
) -> list[Part]:
    """Write the folder of each part, with its train.yaml."""
    parts = []
    for part, place, compiled in (
        ("uncompiled", "uncompiled", "false"),
        ("compiled", "compiled", "true"),
        ("resumed", "compiled", "true"),
    ):
        recipe = _recipe(name, [*cut, f"compile={compiled}"], site, executor)
        path = folder / place
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = recipe.train_config(site.root, str(path))
        config["data_cache_dir"] = str(runs_root(site.root) / ".data_cache")
        files.write_text(path / files.TRAIN, yamlfile.dump(config), mode=0o600)
        resolved = recipe.resolved(site.root, str(path))
        parts.append(Part(part, resolved, blocks, path, folder / f"{part}.log"))
    return parts


def _srun(site: Site, resources: Resources) -> list[str]:
    """Slurm's options for one node as the recipe asks for it."""
    without = ("time",)
    options = sites.slurm_options(resources, site, resources.gpus_per_node, without)
    if resources.cpus_per_gpu:
        options.append(f"--cpus-per-task={resources.cpus_per_gpu * resources.gpus_per_node}")
    return options + ["--exclusive"] * resources.exclusive


def _ended(parts: list[Part], report: NodeReport) -> list[Part]:
    """The parts with what the node said of them: name, folder, exit status, seconds."""
    said = {line.split()[0]: line.split()[1:] for line in report.values.get("part", [])}
    ended = []
    for part in parts:
        if part.name in said:
            place, status, seconds = said[part.name]
            folder = part.folder.parent / place
            part = replace(part, folder=folder, status=int(status), seconds=int(seconds))
        ended.append(part)
    return ended
