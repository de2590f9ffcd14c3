# shellcheck shell=bash
# The environment of the ranks: modules, which the job script loads once on the first node, and
# containers, which every node starts. Sourced only if a record of configs/environments
# is used (docs/environments.md).

# Runs a command that reads shared files, again while they may be out of sight.
patiently() {
  local until=$((SECONDS + ${FILES_WAIT_S:-30}))
  "$@" && return
  ((SECONDS >= until)) || printf 'cookbook: it is tried again for %s s\n' "${FILES_WAIT_S:-30}" >&2
  while ((SECONDS < until)); do
    sleep 1
    if "$@" 2>/dev/null; then return; fi
  done
  return 1
}

# Loads a module. `module` is a function of the login shell, which a job does not inherit.
load_module() {
  local init
  if ! type module >/dev/null 2>&1; then
    for init in "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh \
      /usr/share/{lmod/lmod,modules}/init/bash; do
      # shellcheck disable=SC1090  # the site's
      if [ -r "$init" ]; then source "$init" && break; fi
    done
  fi
  type module >/dev/null 2>&1 || { printf 'cookbook: this node has no module command: define it in environment.setup, as /etc/profile does\n' >&2; return 1; }
  module load "$1" || { printf 'cookbook: the module %s cannot be loaded: module avail shows the names\n' "$1" >&2; return 1; }
  # Modules before version 4.3 return 0 for a module that is not there.
  case :${LOADEDMODULES:-}: in *:"$1":* | *:"$1"/*) ;; *) printf 'cookbook: the module %s was not loaded: module avail shows the names\n' "$1" >&2; return 1 ;; esac
}

# Sets ENV_PYTHON, an interpreter that is a name in PATH, as a path.
find_python() {
  ENV_PYTHON=$(type -P "$1") || { printf 'cookbook: there is no %s in PATH: set environment.python\n' "$1" >&2; return 1; }
  export ENV_PYTHON
}

# The names of the variables that a container gets. It has its own paths, and HOME is not bound.
passed_variables() {
  compgen -e | grep -vxE 'PATH|HOME|PWD|OLDPWD|SHLVL|_|TMPDIR|HOSTNAME|VIRTUAL_ENV|LD_.*|(CONDA|LMOD|MODULE|XDG|BASH_FUNC|PYTHONHOME|PMIX?|SLURM_(CPU_BIND|STEP|TASK)).*|__.*|LOADEDMODULES|_LMFILES_'
}

# Sets INSIDE, the command that runs another inside the container on this node.
# Arguments: kind, image, binds (one per line), options of the container.
enter_container() {
  local kind=$1 image=$2 line binds=() names gpus=${SLURM_GPUS_ON_NODE:-0}
  while read -r line; do
    # A folder inside of one that is bound is there already.
    [ -z "$line" ] || binds+=("$line")
  done <<<"$COOKBOOK_ROOT"$'\n'"$RUN_DIR"$'\n'"$(realpath "$COOKBOOK")"$'\n'"$3"
  shift 3
  # The host's libraries are not the image's.
  unset LD_LIBRARY_PATH LD_PRELOAD
  export PYTHONNOUSERSITE=1
  [[ $gpus =~ ^[0-9]+$ ]] || gpus=1
  case $kind in
    apptainer)
      INSIDE=("${APPTAINER:-apptainer}" exec --no-home --pwd "$PWD")
      if command -v nvidia-smi >/dev/null && ((gpus)); then INSIDE+=(--nv); fi
      if [ -e /dev/kfd ]; then INSIDE+=(--rocm); fi
      for line in "${binds[@]}"; do INSIDE+=(--bind "$line"); done
      INSIDE+=("$@" "$image")
      ;;
    pyxis)
      names=$(passed_variables | paste -sd,)
      for line in "${!binds[@]}"; do case ${binds[$line]} in *:*) ;; *) binds[line]=${binds[$line]}:${binds[$line]} ;; esac; done
      # A name is bound to this job and image: an existing container of that name is used as it is.
      INSIDE=(srun --overlap --mem=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$NODE_NAME" --cpu-bind=none
        ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --export=ALL --kill-on-bad-exit=1
        --job-name=inside --container-image="$image" --container-name="cookbook-${SLURM_JOB_ID:-0}-$(cksum <<<"$image" | cut -d' ' -f1)"
        --container-mounts="$(IFS=, && printf '%s' "${binds[*]}")" --container-workdir="$PWD" --no-container-mount-home
        --container-env="$names" "$@")
      ;;
  esac
}
