#!/usr/bin/env bash
# Makes the virtual environment of the cookbook; can be repeated at any time. bash setup.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
VENV=${COOKBOOK_VENV:-$REPO/.venv}

usage() {
  cat <<'END'
Usage: bash setup.sh [--demo | --test | --test-all] [--with NAME] [--torch BUILD | VERSION]
                     [--torch-index URL] [--dry-run]

Makes the virtual environment that login and compute nodes share, with every package at the version
in constraints.txt, and checks Python, disk space, the filesystem and Slurm.

  --demo              set up, then fine-tune a small model on two nodes through Slurm
  --test              set up, then run the quick tests (8 minutes on two cores)
  --test-all          set up, then run every test, including the long ones
  --with NAME         also install an optional part: one of the extras in pyproject.toml. May be
                      repeated; the parts of earlier calls are kept
  --torch BUILD       the build of torch, for the nodes' driver: cu126 (NVIDIA driver 525 or newer),
                      cu128 (570, with torch 2.11), cu130 (580), rocm or rocm7.2 (AMD), cpu. Default:
                      by the driver of this host; without one, pip's own build, for CUDA 13
  --torch VERSION     another torch version, 2.11 to 2.13, with or without a build: 2.12.0+cu126
                      (default: the one in constraints.txt)
  --torch system      the torch that a Python of this machine has: of a module, a container, conda. It
                      stays as it is; all other packages are the environment's own
  --torch-index URL   where to get torch, instead of PyTorch's index of the build: a mirror of it, or
                      a folder of wheels
  --dry-run           show which build is chosen and how pip is called, and change nothing
  --help

A later call keeps the choice of torch, unless it is given another.

  COOKBOOK_VENV       folder of the virtual environment (default: .venv in the checkout)
  COOKBOOK_PYTHON     the Python interpreter for it (default: the newest of python3.13, 3.12, 3.11)

If there is no Slurm, and the machine is Debian or Ubuntu with root or sudo, the demo and the tests
install slurm-wlm and munge and start a real Slurm on this host; --test-all also installs slurmdbd
and mariadb-server-core, for the tests of accounts and limits, and openssh-server, for those of
cookbook --host. On other machines --demo runs without Slurm.
END
}

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $1"
  exit "${2:-1}"
}

WANT=env TORCH='' TORCH_INDEX='' DRY_RUN='' EXTRAS=() SYSTEM=''
BUILDS='^(cpu|cu[0-9]{3}|rocm([0-9.]+)?)$'
while [ $# -gt 0 ]; do
  case $1 in
    --demo | --test | --test-all)
      [ "$WANT" = env ] || die "give one of --demo, --test and --test-all: bash setup.sh --help" 2
      WANT=${1#--}
      ;;
    --with)
      [ $# -ge 2 ] || die "--with needs a name: bash setup.sh --help" 2
      known=$(sed -n '/^\[project.optional-dependencies\]/,/^$/s/^\([a-z0-9-]*\) = .*/\1/p' "$REPO/pyproject.toml" | { grep -vxE 'client|cluster|dev' || true; })
      { [ -n "$2" ] && grep -qxF -e "$2" <<<"$known"; } || die "unknown part '$2': --with accepts ${known//$'\n'/, }" 2
      EXTRAS+=("$2")
      shift
      ;;
    --torch | --torch-index)
      [ $# -ge 2 ] || die "$1 needs a value: bash setup.sh --help" 2
      if [ "$1" = --torch ]; then TORCH=$2; else TORCH_INDEX=$2; fi
      shift
      ;;
    --dry-run) DRY_RUN=yes ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) die "unknown option '$1': bash setup.sh --help" 2 ;;
  esac
  shift
done
[[ -z $TORCH || $TORCH = system || $TORCH =~ $BUILDS || $TORCH =~ ^2\.1[1-3]\.[0-9]+(\+[a-z0-9.]+)?$ ]] ||
  die "--torch $TORCH: give a build (cu126, cu128, cu130, rocm, cpu), system or a version: this kit supports torch 2.11 to 2.13; write it as 2.11.0 or 2.11.0+cu128" 2
[[ $REPO$VENV != *[[:space:]]* ]] ||
  die "the path of the checkout or of COOKBOOK_VENV contains a space, which job scripts cannot handle: move it"

# Parts ----------------------------------------------------------------------------------------

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

can_install() {
  command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
}

apt_install() {
  say "installing $* with apt-get ($1 is missing on this machine)"
  local log
  log=$(mktemp)
  # Without an up-to-date list of packages apt-get does not find them.
  if ! { as_root apt-get update -qq &&
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    die "apt-get could not install $*: install them by hand, then run this again"
  fi
  rm -f "$log"
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
  local candidate version seen=''
  for candidate in ${COOKBOOK_PYTHON:-python3.13 python3.12 python3.11 python3}; do
    version=$(version_of "$candidate") || continue
    case $version in
      3.11 | 3.12 | 3.13)
        command -v "$candidate"
        return
        ;;
    esac
    seen="$seen $candidate is $version;"
  done
  die "no Python 3.11, 3.12 or 3.13 found (${seen:-no python3 at all}): install one, or 'module load' one, or set COOKBOOK_PYTHON to one"
}

# Prints the version and the folder of a Python's torch, or why the kit cannot use it.
torch_of() {
  PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH} "$1" - 2>&1 <<'PY'
import sys
from importlib import metadata
from pathlib import Path

from runspec import versions

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"is Python {sys.version_info[0]}.{sys.version_info[1]}, not 3.11 to 3.13")
try:
    import torch

    # What pip compares: a build's mark, such as +cu130, may be missing in it.
    version = metadata.version("torch")
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
if fault := versions.fault("torch", version):
    sys.exit(fault)
print(version, Path(torch.__file__).resolve().parents[1])
PY
}

# For --torch system: sets SYSTEM, the first Python whose torch the kit can use, TORCH, its version, and TORCH_FOLDER.
find_torch() {
  local candidate found seen='' before=''
  # The environment of an earlier call sees that torch.
  if [ -n "$(compgen -G "$VENV/lib/python3*/site-packages/cookbook-torch.pth")" ]; then before=$VENV/bin/python; fi
  for candidate in ${COOKBOOK_PYTHON:-$before python3 python python3.13 python3.12 python3.11}; do
    version_of "$candidate" >/dev/null || continue
    if found=$(torch_of "$candidate"); then
      SYSTEM=$(command -v "$candidate")
      read -r TORCH TORCH_FOLDER < <(tail -n 1 <<<"$found")
      say "torch $TORCH of $SYSTEM is used, in $TORCH_FOLDER"
      return
    fi
    seen="$seen; $candidate: $(tail -n 1 <<<"$found")"
  done
  die "--torch system: no Python here has a torch for this kit$seen: 'module load' it, activate its conda environment, or set COOKBOOK_PYTHON to the interpreter that has it"
}

check_disk() {
  local folder=$VENV free_gb
  while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
  free_gb=$(($(df -Pk "$folder" | awk 'NR == 2 {print $4}') / 1048576))
  [ "$free_gb" -ge 3 ] ||
    die "$folder has $free_gb GiB free; the packages need 2 GiB, with CUDA 8: free some space, or set COOKBOOK_VENV"
  if [ "$free_gb" -lt 10 ]; then say "warning: $folder has only $free_gb GiB free; a CUDA build of torch needs about 8"; fi
}

# Sets TORCH, TORCH_INDEX and TORCH_CHOICE: as given, as before, or by this host's driver. Builds for CUDA 12 run on
# drivers from 525 on; those for 12.8, the first with kernels for Blackwell, end with torch 2.11
# (github.com/pytorch/pytorch/issues/178665). pip's own build is for CUDA 13, which needs 580.
choose_torch() {
  local driver='' capability='' build='' kept=$VENV/.cookbook-torch
  if [ -z "$TORCH$TORCH_INDEX" ] && [ -f "$kept" ]; then
    read -r TORCH TORCH_INDEX <"$kept"
    TORCH=${TORCH#default}
  elif [ -z "$TORCH$TORCH_INDEX" ] && [ -z "$(compgen -G "$VENV/lib/python3*/site-packages/torch")" ]; then
    IFS=', ' read -r driver capability < <(timeout 20 nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || true
    if [[ ! $driver =~ ^[0-9]+[.] ]]; then
      if [ -e /dev/kfd ]; then
        say "this host has AMD GPUs: torch's build for ROCm is used"
        TORCH=rocm
      else
        say "this host has no GPU: pip's own build of torch is used, for CUDA 13 (NVIDIA driver 580 or newer); for nodes with an older driver or AMD GPUs: --torch cu126 or --torch rocm"
      fi
    elif [ "${driver%%.*}" -lt 525 ]; then
      die "this host's NVIDIA driver $driver is too old: torch needs 525 or newer; update it, or, if the nodes have another, give --torch with a build for them: cu126, cu128, cu130"
    elif [ "${driver%%.*}" -lt 580 ]; then
      TORCH=cu126
      if [[ ${capability%%.*} =~ ^1[0-9]$ ]]; then
        [ "${driver%%.*}" -ge 570 ] ||
          die "this host's NVIDIA driver $driver is too old for its GPUs, of compute capability $capability: they need 570 or newer; if the nodes have another, give --torch with a build for them: cu126, cu128, cu130"
        TORCH=cu128
      fi
      say "this host's NVIDIA driver is $driver: torch's build $TORCH is used; if the nodes have another driver: --torch cu130 (580 or newer)"
    else
      say "this host's NVIDIA driver is $driver: pip's own build of torch is used, for CUDA 13"
    fi
  fi
  TORCH_CHOICE="${TORCH:-default} $TORCH_INDEX"
  if [ "$TORCH" = system ]; then
    find_torch
    return
  fi
  if [[ $TORCH =~ $BUILDS ]]; then
    build=$TORCH TORCH=''
  elif [[ $TORCH = *+* ]]; then
    build=${TORCH#*+} TORCH=${TORCH%%+*}
  else
    return 0
  fi
  case $build in
    rocm) build=rocm7.2 ;;
    cu128) TORCH=${TORCH:-2.11.0} ;;
  esac
  TORCH=${TORCH:-$(sed -n 's/^torch==//p' "$REPO/constraints.txt")}+$build
  TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/$build}
}

make_venv() {
  local python version own
  if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    version=$(version_of "$VENV/bin/python") own=$VENV/lib/python$version/site-packages
    # Of two torches the environment's own would count, so one with the other kind is made again.
    if [ -n "$SYSTEM" ]; then
      if [ "$version" = "$(version_of "$SYSTEM")" ] && [ ! -d "$own/torch" ]; then return; fi
    elif [[ $version =~ ^3[.]1[123]$ ]] && [ ! -f "$own/cookbook-torch.pth" ]; then
      return
    fi
  fi
  python=${SYSTEM:-$(find_python)}
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    # Debian ships this part of Python as a separate package.
    can_install || die "$python cannot create virtual environments: install python3-venv, or set COOKBOOK_PYTHON to another"
    apt_install python3-venv
  fi
  say "making the virtual environment $VENV with Python $(version_of "$python")"
  "$python" -m venv --clear "$VENV" || die "$python could not create $VENV: see above"
}

# The parts asked for now and before, and those given, one a line.
parts() {
  { printf '%s\n' "${EXTRAS[@]}" "$@" && if [ -f "$VENV/.cookbook-extras" ]; then cat "$VENV/.cookbook-extras"; fi; } |
    sed '/^$/d' | sort -u
}

# The same as pip writes them, with the part of every cluster: [cluster,data,spark].
extras() {
  printf '[%s]' "$(parts cluster "$@" | paste -sd, -)"
}

# Changes if anything has to be installed.
fingerprint() {
  { cat "$REPO/constraints.txt" "$REPO/pyproject.toml" && printf '%s|%s|%s|%s' "$1" "$TORCH" "$TORCH_INDEX" "$REPO"; } |
    sha256sum | cut -d' ' -f1
}

# Runs a command, or only shows it.
run() { if [ -n "$DRY_RUN" ]; then say "+ $*"; else "$@"; fi; }

# Arguments: the file of constraints, and the parts.
pip_install() {
  local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-input --constraint "$1")
  # torch alone from its own index: every other package comes from the default one.
  if [ -n "$TORCH_INDEX" ]; then
    local from=(--index-url "$TORCH_INDEX")
    if [ -d "$TORCH_INDEX" ]; then from=(--find-links "$TORCH_INDEX"); fi
    run "${pip[@]}" "${from[@]}" "torch${TORCH:+==$TORCH}" || return
  fi
  run "${pip[@]}" setuptools wheel &&
    run "${pip[@]}" --no-build-isolation --editable "$REPO$2"
}

install_packages() {
  local extra stamp=$VENV/.cookbook-setup log=$VENV/setup.log constraints now started=$SECONDS
  extra=$(extras "$@")
  now=$(fingerprint "$extra")
  # A virtual environment with the test tools is also right without --test.
  if [ -f "$stamp" ] && grep -qxF -e "$now" -e "$(fingerprint "$(extras dev)")" "$stamp"; then
    say "the virtual environment $VENV is up to date"
    return
  fi
  rm -f "$stamp"
  constraints=$REPO/constraints.txt
  if [ -n "$TORCH" ]; then
    constraints=$VENV/constraints.txt
    sed "s/^torch==.*/torch==$TORCH/" "$REPO/constraints.txt" >"$constraints"
  fi
  say "installing the pinned packages (some minutes; log in $log)"
  if ! pip_install "$constraints" "$extra" >"$log" 2>&1; then
    grep -iE '^ *error' "$log" | tail -n 5 >&2 || tail -n 5 "$log" >&2
    die "the packages could not be installed: see $log, fix the cause (network, proxy, disk, or a build of torch that does not exist: --torch), then run this again"
  fi
  "$VENV/bin/python" - <<'PY' >>"$log" 2>&1 || die "the installed packages do not work: see the end of $log"
import torch, torchtune, transformers, tensorboard, launcher, trainer
print("torch", torch.__version__, "cuda", torch.version.cuda)
PY
  # A later setup.sh keeps the torch and the parts that were asked for.
  printf '%s\n' "$TORCH_CHOICE" >"$VENV/.cookbook-torch"
  parts >"$VENV/.cookbook-extras.new"
  mv "$VENV/.cookbook-extras.new" "$VENV/.cookbook-extras"
  printf '%s\n' "$now" >"$stamp"
  say "installed in $((SECONDS - started)) s"
}

# For users who may only read the checkout: Python would compile it again for each of their commands.
compile_kit() {
  (cd "$REPO" && "$VENV/bin/python" -m compileall -qq launcher runspec trainer plugins) ||
    say "warning: $REPO cannot be written: its Python modules are compiled at each start"
}

check_slurm() {
  local version hosts kind
  if ! command -v sbatch >/dev/null; then
    say "Slurm: no sbatch on this machine"
    return
  fi
  version=$(sbatch --version 2>/dev/null) || version='installed here'
  if ! hosts=$(timeout 10 sinfo --noheader --Node --format=%o 2>/dev/null) || [ -z "$hosts" ]; then
    say "Slurm: $version, but no controller answers"
    return
  fi
  hosts=$(sort -u <<<"$hosts" | wc -l)
  say "Slurm: $version answers; $hosts host(s)"
  kind=$(stat --file-system --format=%T "$VENV")
  case $kind in
    ext2/ext3 | xfs | btrfs | tmpfs | overlayfs | zfs)
      if [ "$hosts" -gt 1 ]; then
        say "warning: $VENV is on $kind, which other nodes usually cannot see: put the checkout (or COOKBOOK_VENV) on a shared filesystem"
      fi
      ;;
  esac
}

has_accounting() (
  PATH=$PATH:/usr/sbin:/sbin
  command -v slurmdbd >/dev/null && command -v mariadbd >/dev/null
)

# Sets SLURM to cluster (it answers), one-host (started here) or none.
find_slurm() {
  local cluster=$REPO/slurm/dev-cluster/cluster.sh
  SLURM=none
  if command -v sbatch >/dev/null && timeout 10 sinfo --noheader >/dev/null 2>&1; then
    SLURM=cluster
    return
  fi
  if ! command -v slurmctld >/dev/null && ! [ -x /usr/sbin/slurmctld ]; then
    if command -v sbatch >/dev/null; then
      say "Slurm's controller does not answer, and this machine has no slurmctld to start a one-host Slurm"
      return
    fi
    can_install || return 0
    apt_install slurm-wlm munge
  fi
  bash "$cluster" up --name "$1" || die "the one-host Slurm did not start: see above, or bash $cluster --help"
  eval "$(bash "$cluster" env --name "$1")"
  SLURM=one-host
}

# The work -------------------------------------------------------------------------------------

if [ -n "$DRY_RUN" ]; then
  choose_torch
  [ -z "$TORCH" ] || say "torch==$TORCH takes the place of the version in constraints.txt"
  pip_install "$REPO/constraints.txt" "$(if [[ $WANT = test* ]]; then extras dev; else extras; fi)"
  exit
fi
mkdir -p "$(dirname "$VENV")" || die "cannot create $(dirname "$VENV"): set COOKBOOK_VENV to a folder that you own"
exec 9>"$VENV.lock" || die "cannot write $VENV.lock: set COOKBOOK_VENV to a folder that you own"
if ! flock --nonblock 9; then
  say "another setup.sh is using $VENV: waiting for it"
  flock 9
fi
check_disk
choose_torch
make_venv
# For pip, too: torch counts as installed, and with its version as a constraint it stays.
[ -z "$SYSTEM" ] || printf '%s\n' "$TORCH_FOLDER" >"$(echo "$VENV"/lib/python3*/site-packages)/cookbook-torch.pth"
if [[ $WANT = test* ]]; then install_packages dev; else install_packages; fi
compile_kit
# What is started from here on must not keep the lock.
exec 9>&-
check_slurm

case $WANT in
  env)
    # cookbook init says itself what comes next, on another machine.
    [ -z "${COOKBOOK_INIT:-}" ] || exit 0
    say ''
    say "ready. Next:"
    say "  source $VENV/bin/activate"
    if command -v sbatch >/dev/null && timeout 10 sinfo >/dev/null 2>&1; then
      say "  cookbook submit --recipe demo --nodes 2 --watch"
    else
      say "  cookbook submit --recipe demo --nodes 2 --watch --local     (without Slurm; with a one-host Slurm: bash setup.sh --demo)"
    fi
    ;;
  demo)
    find_slurm demo
    options=(--recipe demo --nodes 2 --watch)
    if [ "$SLURM" = none ]; then
      say "there is no Slurm, and it cannot be installed here: the same job runs on this host without it"
      options+=(--local)
    fi
    say "+ cookbook submit ${options[*]}"
    "$VENV/bin/cookbook" submit "${options[@]}"
    model=$("$VENV/bin/cookbook" status last --json | sed -n 's/^ *"path": "\([^"]*\)".*/\1/p')/export
    question="What is the difference between a job and a job step?"
    say "+ python -m trainer.generate $model \"$question\""
    "$VENV/bin/python" -m trainer.generate "$model" "$question" || say "the model did not answer: see above"
    device=$("$VENV/bin/cookbook" status last --json | sed -n 's/^ *"device": "\(.*\)",$/\1/p')
    say "the demo was trained on: ${device:-unknown}"
    if [ "$SLURM" = one-host ]; then
      say ''
      say "the one-host Slurm keeps running:"
      say "  use it    source $VENV/bin/activate; eval \"\$(bash $REPO/slurm/dev-cluster/cluster.sh env --name demo)\"; squeue"
      say "  stop it   bash $REPO/slurm/dev-cluster/cluster.sh down --name demo"
    fi
    ;;
  test | test-all)
    if ! command -v slurmctld >/dev/null && ! [ -x /usr/sbin/slurmctld ]; then
      can_install || die "the tests need a real Slurm, and setup.sh cannot install it here: install slurm-wlm and munge"
      apt_install slurm-wlm munge
    fi
    if [ "$WANT" = test-all ] && ! has_accounting && can_install; then
      # If this system names them differently, the other tests still run.
      (apt_install slurmdbd mariadb-server-core) || say "the tests of accounts and limits are skipped"
    fi
    if [ "$WANT" = test-all ] && ! { { command -v sshd || [ -x /usr/sbin/sshd ]; } && command -v rsync; } >/dev/null && can_install; then
      (apt_install openssh-server rsync) || say "the tests of cookbook --host are skipped"
    fi
    cd "$REPO"
    if [ "$WANT" = test ]; then exec "$VENV/bin/python" -m pytest; fi
    exec "$VENV/bin/python" -m pytest -m "not named"
    ;;
esac
