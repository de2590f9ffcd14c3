"""Whether the virtual environment of the jobs is there, and its torch is a build for their GPUs."""

import os
from collections.abc import Iterable
from pathlib import Path

from launcher import gpus, paths, venv
from launcher.check import Context, Finding, Skipped, failed, ok, warning
from launcher.errors import SlurmFault


def python(context: Context) -> Iterable[Finding]:
    if not context.here(venv.python()):
        raise Skipped("only the nodes have it")
    return packages()


def packages() -> list[Finding]:
    """Find an environment that is missing, and packages at other versions than the pinned ones."""
    subject, program, root = "virtual environment", venv.python(), paths.venv_root()
    if not os.access(program, os.X_OK):
        message = f"there is no {program}"
        if "COOKBOOK_VENV" in os.environ:
            message += ", which COOKBOOK_VENV names"
        remedy = "bash setup.sh makes one; node_paths: of the site's file if only the nodes have it"
        return [failed(subject, message, remedy)]
    if faults := venv.unsupported():
        message = f"{root}: {'; '.join(faults)}"
        return [failed(subject, message, "bash setup.sh installs the pinned ones")]
    if other := [*venv.other_versions().values()]:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        message = f"{root} has {', '.join(other[:3])}{more}, not the pinned versions"
        return [warning(subject, message, "bash setup.sh")]
    return [ok(subject, str(root))]


def torch_build(context: Context) -> Iterable[Finding]:
    """Whether the installed torch runs on the GPUs that are asked for, as far as is known here."""
    subject, build = "torch build", venv.torch_build()
    if build.version is None or not context.here(venv.python()):
        raise Skipped("only the nodes have it")
    if context.config.get("device") == "cpu" or context.cluster.gpu_request == "none":
        raise Skipped("the job asks for no GPU")
    kind, _ = kind_of_gpu(context)
    shown = f"torch {build.version} is built for {build.platform}"
    wanted, option = (build.hip, "rocm") if kind.is_amd else (build.cuda, "cu130")
    if not wanted and context.executor.queued and _gpus_are_simulated():
        raise Skipped("the GPUs of this one-host Slurm are simulated")
    if not wanted:
        remedy = f"bash setup.sh --torch {option} (or another build: bash setup.sh --help)"
        return [failed(subject, f"{shown}, and the GPUs are {kind.name}", remedy)]
    return [ok(subject, f"{shown}, for {kind.name}")]


def kind_of_gpu(context: Context) -> tuple[gpus.Gpu, str]:
    """Return the kind of GPU, and who named it; Skipped if nobody did."""
    if context.cluster.gpu:
        return gpus.by_name(context.cluster.gpu), "the site's file"
    named, source = context.resources.gpu_type, "resources.gpu_type"
    if not named and context.executor.queued:
        try:
            known = context.partitions
        except SlurmFault as fault:
            raise Skipped(f"it is not known which GPUs there are: {fault.faults[0]}") from fault
        wanted = (context.resources.partition or "").replace(",", " ").split()
        chosen = [p for name, p in known.items() if name in wanted or (p.default and not wanted)]
        types = {kind for part in chosen for nodes in part.kinds for kind in nodes.gpus if kind}
        named, source = (types.pop() if len(types) == 1 else None), "sinfo"
    if named and (gpu := gpus.by_label(named)):
        return gpu, f"{source}: {named}"
    write = "write gpu: with a name of configs/gpus.yaml into the site's file"
    raise Skipped(f"it is not known which GPUs there are: {write}")


def _gpus_are_simulated() -> bool:
    """Whether Slurm is that of slurm/dev-cluster, whose GPUs' files are beside slurm.conf."""
    conf = os.environ.get("SLURM_CONF")
    return conf is not None and (Path(conf).parent / "dev" / "nvidia0").exists()
