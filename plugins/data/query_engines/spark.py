"""Spark through ibis: with the master of a job, or with threads of this host."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError, first_line
from plugins.data.query_engines import java, spill, tasks
from plugins.data.query_engines.base import QueryEngine
from plugins.data.query_engines.tasks import Task


class Spark(QueryEngine):
    """Spark through ibis.

    Args:
        memory: bytes of the driver and of each executor.
        temp_dir: a folder on each node's own disk, for shuffles and what is spilled.
        threads: of a local Spark; those of workers are their own.
        master: address of a master, None for this host.
        event_log: folder of the event log, None for none.
    """

    name = "spark"

    def __init__(
        self, memory: int, temp_dir: Path, threads: int, master: str | None, event_log: str | None
    ) -> None:
        home = java.home()
        try:
            from pyspark.sql import SparkSession
        except ImportError:
            raise DataError(
                "pyspark is missing: install it with: bash setup.sh --with spark"
            ) from None
        import ibis

        self._java = java.version(home)
        self._local = spill.make("spark", temp_dir)
        self._group = ""
        os.environ["JAVA_HOME"] = str(java.usable_home(home, self._local))
        os.environ["PYSPARK_PYTHON"] = sys.executable
        size = f"{max(memory // 2**20, 512)}m"
        settings: dict[str, Any] = {
            "spark.master": master or f"local[{threads}]",
            "spark.app.name": "cookbook prepare",
            "spark.driver.memory": size,
            "spark.executor.memory": size,
            "spark.driver.bindAddress": "0.0.0.0",
            "spark.local.dir": str(self._local),
            "spark.ui.enabled": "true" if master else "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(self._local / "warehouse"),
            "spark.sql.shuffle.partitions": str(2 * threads if not master else 64),
            "spark.sql.adaptive.enabled": "true",
            "spark.python.worker.reuse": "true",
            # A lost worker must not use up the attempts of its tasks.
            "spark.task.maxFailures": "8",
        }
        if address := os.environ.get("HEAD_ADDR") if master else None:
            settings["spark.driver.host"] = address
        elif not master:
            settings["spark.driver.host"] = "127.0.0.1"
        if event_log:
            settings |= {
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": f"file://{event_log}",
            }
        try:
            self.session = SparkSession.builder.config(map=settings).getOrCreate()
        except Exception as error:
            spill.remove(self._local)
            reason = first_line(error)
            raise DataError(f"Spark did not start with Java {self._java}: {reason}") from None
        self.session.sparkContext.setLogLevel("ERROR")
        if master is not None and self.session.sparkContext.uiWebUrl:
            print(f"Spark's pages: {self.session.sparkContext.uiWebUrl}", flush=True)
        super().__init__(ibis.pyspark.connect(self.session), threads)

    def versions(self) -> dict[str, str]:
        return {"spark": self.session.version, "java": self._java}

    def read(self, folder: Path) -> Any:
        return self.con.read_parquet(str(folder))

    def _copy(self, table: Any, folder: Path, partition: str | None) -> None:
        self._group = f"cookbook {folder}"
        self.session.sparkContext.setJobGroup(self._group, folder.name)
        frame = self.session.sql(self.con.compile(table))
        writer = frame.write.mode("overwrite").option("compression", "snappy")
        if partition:
            writer = writer.partitionBy(partition)
        try:
            writer.parquet(str(folder))
        except Exception as error:
            raise DataError(f"Spark: {_reason(error)}") from None

    def _share(self) -> float | None:
        """Return the share of finished tasks in the stages so far: more stages may follow."""
        tracker = self.session.sparkContext.statusTracker()
        stages = set()
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            stages |= set(info.stageIds) if info else set()
        known = [stage for each in stages if (stage := tracker.getStageInfo(each))]
        total = sum(stage.numTasks for stage in known)
        return sum(stage.numCompletedTasks for stage in known) / total if total else None

    def _run(self, jobs: Sequence[Task]) -> list[str]:
        context = self.session.sparkContext
        try:
            results = context.parallelize(jobs, len(jobs)).map(tasks.run).collect()
        except Exception as error:
            raise DataError(f"Spark: {_reason(error)}") from None
        return [fault for each in results for fault in each]

    def close(self) -> None:
        self.session.stop()
        spill.remove(self._local)


def _reason(error: Exception) -> str:
    """Return the line of a Spark error that gives the cause."""
    text = str(error)
    if "No space left on device" in text:
        return "no space is left on a node's disk: set temp_dir= to one with room"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause = re.compile(r"(Caused by: )?[\w.$]+(Exception|Error): \S")
    causes = [line for line in lines if cause.match(line)]
    return (causes[-1] if causes else lines[0] if lines else type(error).__name__)[:400]
