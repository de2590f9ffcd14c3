"""The keys of `entry: script:PATH`, a training script of the user's own."""

from __future__ import annotations

from runspec.keys.key import Key

_KEYS = (
    Key(
        "code_root",
        "text",
        None,
        "Folder that is copied into the run; it counts from the recipe's file. Default: the "
        "script's folder.",
    ),
    Key("args", "list", None, "Arguments of the script, one item each."),
    Key("parameters", "open block", None, "For the script: the YAML file $COOKBOOK_PARAMETERS."),
)
SCRIPT = {key.name: key for key in _KEYS}
