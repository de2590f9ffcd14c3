"""The entry of served models."""

from launcher.recipe.model import Entry
from plugins.serve.recipe_keys import SERVE, package_of
from runspec.keys.common import COMMON

ENTRIES = {
    "serve": Entry(
        keys={**COMMON, **SERVE},
        command=lambda recipe, config: (
            '"$VENV/bin/python" -m plugins.serve.server "$RUN_DIR/train.yaml"'
        ),
        on_host=True,
        backend=package_of,
        resumes=True,
        purpose="serve",
    )
}
