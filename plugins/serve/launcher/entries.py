"""The entry of served models."""

from launcher.recipe.model import Entry
from plugins.serve.recipe_keys import SERVE
from runspec.keys.common import COMMON

ENTRIES = {
    "serve": Entry(
        keys={**COMMON, **SERVE},
        command=lambda recipe, config: (
            '"$VENV/bin/python" -m plugins.serve.replica "$RUN_DIR/train.yaml"'
        ),
        on_host=True,
        resumes=True,
        purpose="serve",
    )
}
