"""Prints the id of the run's MLflow run, which the first node makes once: mlflow_run.py

Shell lines of the user's own find it as MLFLOW_RUN_ID: mlflow.start_run() then continues it, in a
retry too, and cookbook track adds to it. Needs RUN_DIR, NODE_RANK and MLFLOW_TRACKING_URI, and
mlflow in the environment of the workload; without them nothing is printed, and the status is 1.
"""

import os
import sys
import time
from pathlib import Path

WAIT_S = 120


def main() -> int:
    run_dir = Path(os.environ["RUN_DIR"])
    kept = run_dir / "mlflow_run_id"
    until = time.monotonic() + WAIT_S
    while os.environ.get("NODE_RANK", "0") != "0" and time.monotonic() < until:
        if kept.exists():
            break
        time.sleep(0.5)
    if not kept.exists():
        if os.environ.get("NODE_RANK", "0") != "0":
            return 1
        try:
            import mlflow

            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            tags = {"cookbook.run": run_dir.name, "mlflow.runName": run_dir.name}
            client = mlflow.MlflowClient()
            known = client.get_experiment_by_name(name)
            store = mlflow.get_tracking_uri().removeprefix("sqlite:///")
            # MLflow's default is in whatever folder the process runs in.
            place = Path(store).absolute().parent / "artifacts" / name
            given = {"artifact_location": place.as_uri()} if Path(store).is_file() else {}
            experiment = known.experiment_id if known else client.create_experiment(name, **given)
            made = client.create_run(experiment, tags=tags).info.run_id
        except Exception as error:
            print(f"cookbook: no MLflow run: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        temporary = kept.with_suffix(".tmp")
        temporary.write_text(made, encoding="utf-8")
        os.replace(temporary, kept)
    print(kept.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
