#!/usr/bin/env bash
# From raw messages to a served model, and back to data: bash examples/support_intents/run.sh [--local] [STEP...]
# README.md beside it says what each step does. Nothing is downloaded. --local: without Slurm. Without
# STEP all of them: data base prepare spark train eval registry serve log strategies.
# SUPPORT_COUNT: number of messages to generate, 500000 by default.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}
data=$root/datasets raw=$root/datasets/raw/support model=$root/models/support-llama
how=() steps=()
for word; do
  if [ "$word" = --local ]; then how=(--local); else steps+=("$word"); fi
done
[ ${#steps[@]} -gt 0 ] || steps=(data base prepare spark train eval registry serve log strategies)

# Submits a recipe under a name.
submitted() {
  cookbook submit "${@:2}" --name "$1" --json "${how[@]}" |
    python -c 'import json, sys; print(json.load(sys.stdin)["run"])' >"$data/$1.run"
}
followed() { cookbook watch "$(run "$1")" --plain; }
# The run that was submitted last under a name.
run() { cat "$data/$1.run"; }
# Ends the script if a file is missing that an earlier step makes.
needs() { [ -e "$2" ] || { echo "error: $2 is missing: bash $0 $1 ${how[*]}" >&2; exit 1; }; }
evaluated() { cookbook eval "$@" --suite "$here/suite.yaml" --watch "${how[@]}"; }
# The gates, for the samples of the newest evaluation of a model.
gates() { { cookbook eval "$1" --results --as-gates && cat "$here/gates.yaml"; } >"$data/support-gates.yaml"; }
promoted() { cookbook promote support --gates "$data/support-gates.yaml" "$@"; }

step_data() { # messages with planted faults: a Delta table and a file of JSON lines
  python "$here/generate.py" "$raw" --count "${SUPPORT_COUNT:-500000}"
}

step_base() { # a base model that reads requests, and has not seen what they want
  needs data "$raw-base.jsonl"
  submitted support-base "$here/base.yaml"
  followed support-base
  ln -sfn "$root/runs/$(run support-base)/export" "$model"
}

step_prepare() { # filter, duplicates, personal data, stratified split; a Delta table; with DuckDB
  needs data "$raw-truth.json"
  needs base "$model"
  cookbook prepare support
  cookbook data show support
  python - "$data/prepared/support/current/data" "$data/support-table" <<'END'
import sys

import pyarrow.dataset as dataset
from deltalake import write_deltalake

rows = dataset.dataset(sys.argv[1], partitioning=["split"]).scanner().to_reader()
write_deltalake(sys.argv[2], rows, partition_by=["split"], mode="overwrite")
END
}

content_of() { # the hash of a prepared set's rows
  cookbook data show "$1" --json | grep '"content_sha256"'
}

step_spark() { # the same with Spark, on two nodes of an allocation; the same rows
  needs prepare "$data/prepared/support/current"
  local nodes=2
  [ ${#how[@]} -eq 0 ] || nodes=1
  cookbook prepare support --name support-spark --nodes "$nodes" engine=spark memory=1500M --watch "${how[@]}"
  [ "$(content_of support)" = "$(content_of support-spark)" ]
}

step_train() { # QLoRA and LoRA, validated, the best checkpoint exported, tracked in MLflow
  needs prepare "$data/prepared/support/current"
  submitted support-qlora "$here/support_qlora.yaml" "checkpointer.checkpoint_dir=$model"
  submitted support-lora "$here/support_qlora.yaml" "checkpointer.checkpoint_dir=$model" model.quantize_base=false
  followed support-qlora
  followed support-lora
  cookbook results "$(run support-qlora)" "$(run support-lora)"
}

step_eval() { # perplexity, and accuracy per intent, against the base
  needs train "$data/support-lora.run"
  python "$here/samples.py" "$data/prepared/support/current" "$data"
  evaluated "$(run support-base)" &
  evaluated "$(run support-qlora)" --against base --samples 2
  wait $!
}

step_registry() { # candidate, gates, staging, champion, tags; a successor; rollback
  needs eval "$data/support-test.jsonl"
  cookbook register "$(run support-base)" --as support
  gates "$(run support-base)"
  if promoted --to staging 2>&1; then exit 1; fi
  cookbook register "$(run support-qlora)" --as support
  promoted --to staging
  promoted --to champion --why "the first one"
  cookbook register "$(run support-lora)" --as support
  evaluated "$(run support-lora)" --against models:/support@champion
  promoted --to champion --why "LoRA"
  promoted --rollback champion --why "an exercise"
  cookbook registry support
}

step_serve() { # the champion, asked by its customers
  needs eval "$data/support-questions.jsonl"
  cookbook serve models:/support@champion --name support bind=node --time 00:30:00 "${how[@]}"
  trap 'cookbook serve --stop support' EXIT
  python "$here/traffic.py" "$data"
  cookbook serve --stats support
  cookbook serve --stop support
  trap - EXIT
}

step_log() { # requests and the customers' corrections as a training set
  needs serve "$data/support-feedback.jsonl"
  cp "$data/support-feedback.jsonl" "$root/endpoints/support/feedback.jsonl"
  cookbook prepare from-requests support
  cookbook prepare "$data/requests-support/requests-support.yaml"
  cookbook data show requests-support
}

step_strategies() { # one task by eight methods, in one table
  bash "$here/../strategies/run.sh" "${how[@]}"
}

for step in "${steps[@]}"; do
  declare -F "step_$step" >/dev/null || { echo "no step $step: see the head of $0" >&2; exit 2; }
done
times=()
for step in "${steps[@]}"; do
  began=$SECONDS
  printf '\n== %s: %s\n' "$step" "$(sed -n "s/^step_$step() { # //p" "$here/run.sh")"
  "step_$step"
  times+=("$step $((SECONDS - began)) s")
done
printf '\n== seconds\n'
printf '%s\n' "${times[@]}" "all $SECONDS s"
