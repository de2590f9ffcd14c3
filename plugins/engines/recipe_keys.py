"""The keys of a recipe that starts an engine."""

from runspec.keys.common import SCRIPT
from runspec.keys.key import Key, table

ENGINE = table(
    Key(
        "config",
        "text",
        "The engine's own config file, relative to the recipe's, if the entry names one of its "
        "programs (trl:dpo); the recipe's parameters are put over it.",
    ),
    Key(
        "work_dir",
        "text",
        "Folder in which the engine starts, relative to the recipe's file, or on the command line "
        "to the current one. Default: the nearest folder, from the config's upwards, else the "
        "current one, that contains the files named in the config.",
        may_change=True,
    ),
    Key(
        "config_read_from",
        "text",
        "Where the run's parameters came from; the kit writes it and reads the file only once.",
    ),
    *(SCRIPT[name] for name in ("code_root", "args", "parameters")),
)
