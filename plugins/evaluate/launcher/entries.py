"""The entry of evaluations."""

from launcher.recipe.model import Entry
from plugins.evaluate.recipe_keys import EVAL, TASK, task_faults
from runspec.keys.common import COMMON

ENTRIES = {
    "eval": Entry(
        keys={**COMMON, **EVAL},
        inner={"tasks": TASK},
        module="plugins.evaluate.main",
        resumes=True,
        purpose="evaluate",
        faults=task_faults,
    )
}
