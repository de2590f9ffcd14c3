"""The keys of an environment: configs/environments/NAME.yaml, or `environment:` in a recipe."""

from runspec.keys.key import Key, table

KINDS = "venv | conda | modules | pyxis | apptainer"
CONTAINERS = ("pyxis", "apptainer")

ENVIRONMENT = table(
    Key("description", "text", "One line about the environment."),
    Key("name", "text", "Name of the record that the other keys are from."),
    Key("kind", KINDS, "What contains the packages.", "venv"),
    Key("image", "text", "Image of a container: a file, or a registry's name."),
    Key("conda", "text", "Name or folder of the conda environment."),
    Key("conda_root", "text", "Folder of conda. Default: that of CONDA_EXE, else ~/miniforge3."),
    Key("modules", "texts", "Modules to load, in this order."),
    Key("setup", "texts", "Shell lines that the job runs first, outside of a container."),
    Key("srun", "texts", "Additional options of the srun that starts the nodes."),
    Key("options", "texts", "Additional options of the container: of Apptainer or Pyxis."),
    Key("prefix", "texts", "Command before the interpreter, such as [numactl, --localalloc]."),
    Key(
        "python",
        "text",
        "Interpreter: a path, or a name in PATH. Default: the kit's virtual environment; python in "
        "conda, python3 in a container.",
    ),
    Key(
        "binds",
        "texts",
        "Folders that a container sees: PATH, SOURCE:TARGET or SOURCE:TARGET:ro. The shared folder "
        "and the run are always bound.",
    ),
    Key("variables", "open block", "Environment variables. No secrets."),
    Key(
        "dependencies",
        "texts",
        "Packages such as trl==1.16.0: built once before the job is queued, and shared by all runs "
        "with the same list.",
    ),
    Key(
        "pins",
        "flag",
        "Dependencies fit the kit's own packages, and share them. false: a whole environment, "
        "without the kit's versions.",
        True,
    ),
)
