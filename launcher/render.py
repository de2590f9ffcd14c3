"""A recipe and a cluster in, the text of a job script out; reads templates, changes nothing."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jinja2

from launcher import paths, slurm, stock
from launcher.cluster import Cluster
from launcher.errors import RecipeFault, nearest
from launcher.recipe import Recipe, Resources

# The trainer may need this long to finish a step and write a checkpoint; a short job gives it a
# quarter of its time.
_LEAD_SHARE = 4

_DIRECTIVE = re.compile(r"[A-Za-z0-9_.,:=@+/&|*()\[\]-]+\Z")


def _directive(value: Any) -> str:
    """Let a value into an #SBATCH line, which knows no quoting: a newline would add a directive."""
    text = str(value)
    if not _DIRECTIVE.match(text):
        raise RecipeFault(
            f"the value {text!r} cannot stand in an #SBATCH line: use letters, digits and . _ -"
        )
    return text


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    environment.filters["directive"] = _directive
    return environment.get_template(name)


def with_site_defaults(resources: Resources, cluster: Cluster) -> Resources:
    """Return resources with the cluster's values where the recipe and the options say nothing."""
    unset = Resources()
    missing = {
        item.name: cluster.resources[item.name]
        for item in fields(Resources)
        if getattr(resources, item.name) == getattr(unset, item.name)
        and cluster.resources.get(item.name) is not None
    }
    for key in ("mem", "time"):
        if key in missing:
            missing[key] = str(missing[key])
    return replace(resources, **missing)


def command(recipe: Recipe, config: dict[str, Any]) -> str:
    """Return what torchrun starts as each rank, as shell text for the node script.

    config is the recipe resolved for its run.
    """
    if recipe.entry == "sft":
        return 'python -m trainer.sft "$RUN_DIR/train.yaml"'
    if recipe.script and recipe.code_root:
        # It runs in the copy of its folder.
        words = [os.path.relpath(recipe.script, recipe.code_root), *(config.get("args") or [])]
        return f"python {shlex.join(map(str, words))}"
    name, known = recipe.entry.removeprefix("torchtune:"), stock.recipes()
    if name not in known:
        raise RecipeFault(
            f"torchtune has no recipe {name!r}{nearest(name, known)}; it has "
            f"{', '.join(known) or 'none'} in {paths.venv_root()}"
        )
    if not known[name].distributed and recipe.resources.world_size > 1:
        raise RecipeFault(
            f"torchtune's {name} runs on one GPU, and {recipe.resources.nodes} x "
            f"{recipe.resources.gpus_per_node} are asked for: --nodes 1 --gpus-per-node 1"
        )
    return f'python {shlex.quote(str(known[name].path))} --config "$RUN_DIR/train.yaml"'


def job_script(recipe: Recipe, cluster: Cluster, run_dir: Path, job_name: str) -> str:
    """Return the whole job script of a run whose folder is run_dir."""
    resources = with_site_defaults(recipe.resources, cluster)
    lead_s = cluster.signal_lead_s
    if resources.time_s:
        lead_s = max(1, min(lead_s, resources.time_s // _LEAD_SHARE))
    gpus = f"{resources.gpus_per_node}"
    if resources.gpu_type:
        gpus = f"{resources.gpu_type}:{gpus}"
    root = cluster.root
    config = recipe.resolved(root, str(run_dir))
    return _template("job.sbatch.j2").render(
        recipe=recipe.name,
        run=run_dir.name,
        run_dir=run_dir,
        script=run_dir / "job.sbatch",
        job_name=job_name,
        token=token(run_dir.name),
        nodes=resources.nodes,
        gpus_per_node=resources.gpus_per_node,
        gpus=gpus,
        gpu_request=cluster.gpu_request,
        cpus_per_task=(resources.cpus_per_gpu or 0) * resources.gpus_per_node,
        resources={item.name: getattr(resources, item.name) for item in fields(resources)},
        export=slurm.EXPORT,
        signal=cluster.signal,
        signal_lead_s=lead_s,
        repo_root=paths.REPO_ROOT,
        venv=paths.venv_root(),
        root=root,
        hf_home=root / "hf",
        max_retries=recipe.max_retries,
        network_interface=cluster.network_interface,
        environment=cluster.environment,
        job_setup=cluster.job_setup,
        own_environment=config.get("env") or {},
        secrets=recipe.secrets,
        timeout_s=recipe.timeout_s,
        is_script=recipe.script is not None,
        command=command(recipe, config),
    )


def token(run: str) -> str:
    """Return the mark that a run's jobs carry in their comment, by which they are found again."""
    return f"cookbook:{run}"
