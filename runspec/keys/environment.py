"""The keys of an environment: configs/environments/NAME.yaml, or `environment:` in a recipe."""

from dataclasses import dataclass
from typing import Any

from runspec.keys.key import keys_of, option

KINDS = "venv | pyxis | apptainer"
CONTAINERS = ("pyxis", "apptainer")


@dataclass(frozen=True)
class EnvironmentKeys:
    """A field for each key."""

    description: str | None = option("text", "One line about the environment.")
    name: str | None = option("text", "Name of the record that the other keys are from.")
    kind: str = option(KINDS, "What contains the packages.", "venv")
    image: str | None = option("text", "Image of a container: a file, or a registry's name.")
    modules: tuple[str, ...] = option("texts", "Modules to load, in this order.")
    setup: tuple[str, ...] = option(
        "texts", "Shell lines that the job runs first, outside of a container."
    )
    srun: tuple[str, ...] = option("texts", "Additional options of the srun that starts the nodes.")
    options: tuple[str, ...] = option(
        "texts", "Additional options of the container: of Apptainer or Pyxis."
    )
    prefix: tuple[str, ...] = option(
        "texts", "Command before the interpreter, such as [numactl, --localalloc]."
    )
    python: str | None = option(
        "text",
        "Interpreter: a path, such as that of a conda environment, or a name in PATH. Default: the "
        "kit's virtual environment; python3 in a container.",
    )
    binds: tuple[str, ...] = option(
        "texts",
        "Folders that a container sees: PATH, SOURCE:TARGET or SOURCE:TARGET:ro. The shared "
        "folder and the run are always bound.",
    )
    variables: dict[str, Any] = option("open block", "Environment variables. No secrets.")
    dependencies: tuple[str, ...] = option(
        "texts",
        "Packages such as trl==1.16.0: built once before the job is queued, and shared by all "
        "runs with the same list.",
    )
    pins: bool = option(
        "flag",
        "Dependencies fit the kit's own packages, and share them. false: a whole environment, "
        "without the kit's versions.",
        True,
    )


ENVIRONMENT = keys_of(EnvironmentKeys)
