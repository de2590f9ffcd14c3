"""The entries of engines."""

from collections.abc import Iterable
from pathlib import Path

from launcher.recipe.entries import script_of
from launcher.recipe.model import Content, Entry
from plugins.engines.launcher.engine import FOLLOWER, Engine
from plugins.engines.launcher.engines import ENGINES, read
from plugins.engines.launcher.torchtune import ENTRY as TORCHTUNE
from plugins.engines.recipe_keys import ENGINE
from runspec.keys.common import COMMON


def _notes(config: Content) -> Iterable[str]:
    read_from, folder = config.get("config_read_from"), config.get("work_dir")
    if folder and read_from and Path(str(folder)) != Path(str(read_from)).parent:
        yield f"it starts in {folder}, from which the paths in {Path(str(read_from)).name} count"


def _entry(engine: Engine) -> Entry:
    scripts = engine.overrides == "parameters"
    return Entry(
        keys={**COMMON, **ENGINE},
        title=engine.records.name,
        command=engine.start,
        program=script_of if scripts else lambda recipe: None,
        own_code=scripts,
        resumes=True,
        companion=FOLLOWER,
        notes=_notes,
        records=engine.recorded,
        engine=engine.schema,
        config=engine.config,
        read=read,
        recognises=engine.may_read if engine.known_by[0] else None,
        dependencies=engine.dependencies,
        pins=engine.pins,
        layout_fault=engine.layout_fault,
    )


ENTRIES = {
    **{name: _entry(engine) for name, engine in ENGINES.items()},
    "torchtune:": TORCHTUNE,
}
