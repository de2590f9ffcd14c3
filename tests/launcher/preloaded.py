"""What a command of the launcher may import, for the process that tests/forked.py forks."""

from importlib import import_module

from launcher import cli, paths
from launcher.slurm import render

for path in sorted((paths.REPO_ROOT / "launcher").rglob("*.py")):
    # huggingface_hub reads the environment of the command when it is imported.
    if path.name != "__main__.py" and path.parent.name != "hub":
        import_module(".".join(path.relative_to(paths.REPO_ROOT).with_suffix("").parts))
# Half of the work of a dry run is to compile the templates.
for path in paths.TEMPLATES.glob("*.sbatch.j2"):
    render.template(path.name)


def main(arguments: list[str]) -> None:
    """Be the cookbook command; its arguments are those of the process."""
    cli.main()
