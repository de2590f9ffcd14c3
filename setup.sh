#!/usr/bin/env bash
# Makes the virtual environment of the cookbook; can be repeated at any time. bash setup.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
VENV=${COOKBOOK_VENV:-$REPO/.venv}

usage() {
  cat <<'END'
Usage: bash setup.sh [--demo | --test | --test-all] [--with NAME] [--torch BUILD | VERSION]
                     [--torch-index URL] [--dry-run]
       bash setup.sh --bundle FOLDER [--python 3.12] [--arch aarch64] [--torch BUILD | none]
                     [--with NAME] [--recipe FILE]
       bash setup.sh --from FOLDER [--demo]

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
  --torch VERSION     another torch version, 2.11 to 2.15, with or without a build: 2.12.0+cu126
                      (default: the one in constraints.txt)
  --torch system      the torch that a Python of this machine has: of a module, a container, conda. It
                      stays as it is; all other packages are the environment's own
  --torch-index URL   where to get torch, instead of PyTorch's index of the build: a mirror of it, or
                      a folder of wheels
  --dry-run           show which build is chosen and how pip is called, and change nothing
  --help

For a cluster without internet (docs/offline.md); --bundle needs Linux or macOS, Python and git:

  --bundle FOLDER     fill a folder with the checkout, every wheel for the cluster, and their hashes.
                      A second call goes on, and may add parts and recipes
  --from FOLDER       set up from such a folder, with no network
  --python VERSION    the cluster's Python: 3.11, 3.12 (default) or 3.13
  --arch ARCH         the cluster's processor, as uname -m prints it there: x86_64 (default) or aarch64
  --torch none        leave torch and what it needs out of the folder: the cluster has its own
  --recipe FILE       also the dependencies in a recipe's environment. May be repeated

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

WANT=env TORCH='' TORCH_INDEX='' SYSTEM='' DRY_RUN='' EXTRAS=() BUNDLE='' FROM='' PYTHON='' ARCH='' RECIPES=()
PYTHONS='3.11 3.12 3.13'
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
    --torch | --torch-index | --bundle | --from | --python | --arch | --recipe)
      [ -n "${2:-}" ] || die "$1 needs a value: bash setup.sh --help" 2
      case $1 in
        --torch) TORCH=$2 ;;
        --torch-index) TORCH_INDEX=$2 ;;
        --bundle) BUNDLE=$2 ;;
        --from) FROM=$2 ;;
        --python) PYTHON=$2 ;;
        --arch) ARCH=$2 ;;
        --recipe) RECIPES+=("$2") ;;
      esac
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
if [ -n "$BUNDLE" ]; then
  [ "$FROM$DRY_RUN$WANT" = env ] || die "--bundle installs nothing: give it without --from, --demo, --test and --dry-run" 2
  [ "$TORCH" != system ] || die "--torch system is for the cluster: give --bundle --torch none, and there --from FOLDER" 2
  [[ ${PYTHON:-3.12}/${ARCH:-x86_64} =~ ^3\.1[1-3]/(x86_64|aarch64)$ ]] || die "--python takes 3.11, 3.12 or 3.13, and --arch x86_64 or aarch64" 2
elif [[ $PYTHON$ARCH${RECIPES[*]-} != '' || $TORCH = none ]]; then
  die "--python, --arch, --recipe and --torch none are for --bundle FOLDER" 2
elif [ -n "$FROM" ]; then
  [[ $WANT != test* && $TORCH$TORCH_INDEX =~ ^(system)?$ ]] || die "--from has the torch that --bundle chose, and no packages for tests: give it without --test, and without --torch or with --torch system" 2
fi
[[ $TORCH =~ ^(none|system)?$ || $TORCH =~ $BUILDS || $TORCH =~ ^2\.1[1-5]\.[0-9]+(\+[a-z0-9.]+)?$ ]] ||
  die "--torch $TORCH: give a build (cu126, cu128, cu130, rocm, cpu), system, or a version: this kit supports torch 2.11 to 2.15; write it as 2.11.0 or 2.11.0+cu128" 2
[[ $REPO$VENV != *[[:space:]]* ]] ||
  die "the path of the checkout or of COOKBOOK_VENV contains a space, which job scripts cannot handle: move it"

# Parts ----------------------------------------------------------------------------------------

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

can_install() {
  [ -z "$FROM" ] && command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
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
    if [[ " $PYTHONS " = *" $version "* ]]; then
      command -v "$candidate"
      return
    fi
    seen="$seen $candidate is $version;"
  done
  [ -z "$FROM" ] ||
    die "$FROM is for Python $PYTHONS, which is not found here (${seen:- no python3 at all}): 'module load' it, set COOKBOOK_PYTHON to it, or, where there is network, name yours with --python: $(field "$FROM" command)"
  die "no Python 3.11, 3.12 or 3.13 found (${seen:-no python3 at all}): install one, or 'module load' one, or set COOKBOOK_PYTHON to one"
}

# Prints the version and the folder of a Python's torch, or why the kit cannot use it.
torch_of() {
  PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH} "$1" - 2>&1 <<'PY'
import sys
from importlib import metadata
from pathlib import Path

from runspec import versions

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
  local candidate version found seen='' before=''
  # The environment of an earlier call sees that torch.
  if [ -n "$(compgen -G "$VENV/lib/python3*/site-packages/cookbook-torch.pth")" ]; then before=$VENV/bin/python; fi
  for candidate in ${COOKBOOK_PYTHON:-$before python3 python python3.13 python3.12 python3.11}; do
    version=$(version_of "$candidate") || continue
    if [[ " $PYTHONS " != *" $version "* ]]; then
      found="is Python $version, not ${PYTHONS// / or }"
    elif found=$(torch_of "$candidate"); then
      SYSTEM=$(command -v "$candidate")
      read -r TORCH TORCH_FOLDER < <(tail -n 1 <<<"$found")
      say "torch $TORCH of $SYSTEM is used, in $TORCH_FOLDER"
      return
    fi
    seen="$seen; $candidate: $(tail -n 1 <<<"$found")"
  done
  die "no Python here has a torch for this kit$seen: 'module load' it, activate its conda environment, or set COOKBOOK_PYTHON to the interpreter that has it"
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
  local driver='' capability='' kept=$VENV/.cookbook-torch
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
  name_torch
}

# Turns a build into a version and an index.
name_torch() {
  local build=''
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
  { printf '%s\n' ${EXTRAS[@]+"${EXTRAS[@]}"} "$@" && if [ -f "$VENV/.cookbook-extras" ]; then cat "$VENV/.cookbook-extras"; fi; } |
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

# The same constraints with the chosen torch.
constraints_of_torch() { sed "${TORCH:+s/^torch==.*/torch==$TORCH/}" "$REPO/constraints.txt"; }

# Runs a command, or only shows it.
run() { if [ -n "$DRY_RUN" ]; then say "+ $*"; else "$@"; fi; }

# Arguments: the file of constraints, and the parts.
pip_install() {
  local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-input --constraint "$1")
  if [ -n "$FROM" ]; then
    pip+=(--no-index --find-links "$FROM/wheels")
  # torch alone from its own index: every other package comes from the default one.
  elif [ -n "$TORCH_INDEX" ]; then
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
  rm -f "$VENV/constraints.txt"
  if [ -n "$TORCH" ]; then
    constraints=$VENV/constraints.txt
    constraints_of_torch >"$constraints"
  fi
  say "installing the pinned packages (some minutes; log in $log)"
  if ! pip_install "$constraints" "$extra" >"$log" 2>&1; then
    grep -iE '^ *error' "$log" | tail -n 5 >&2 || tail -n 5 "$log" >&2
    die "the packages could not be installed: see $log, fix the cause (network, proxy, disk, or a build of torch that does not exist: --torch), then run this again; on a cluster without internet: --from FOLDER (docs/offline.md)"
  fi
  "$VENV/bin/python" - <<'PY' >>"$log" 2>&1 || die "the installed packages do not work: see the end of $log"
import torch, transformers, tensorboard, launcher, trainer
print("torch", torch.__version__, "cuda", torch.version.cuda)
PY
  rm -f "$VENV/uv.toml"
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
  local cluster=$REPO/slurm/dev-cluster/cluster.py
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
  "$VENV/bin/python" "$cluster" up --name "$1" || die "the one-host Slurm did not start: see above, or $cluster --help"
  eval "$("$VENV/bin/python" "$cluster" env --name "$1")"
  SLURM=one-host
}

# A cluster without internet: docs/offline.md ----------------------------------------------------

# A folder has bundle.txt (what it is for), slurm-cookbook.tar.gz, wheels/ and, once it is complete, SHA256SUMS.
hashes() { if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi; }

# For uv, in place of each requirement of torch: it and what it alone needs are left out.
NO_TORCH="torch; python_version < '3'"

# Prints a line of bundle.txt, "" if there is none. Arguments: the folder, and the line's first word.
field() { if [ -f "$1/bundle.txt" ]; then sed -n "s/^$2 //p" "$1/bundle.txt"; fi; }

# What the wheels depend on in the checkout.
pins() { cat "$REPO/constraints.txt" "$REPO/pyproject.toml" | hashes | cut -c1-16; }

# Puts what some requirements need into the folder. Arguments: a name for messages, then files and options of uv.
fetch() {
  local name=$1 list=$WORK/list log=$WORK/log pip=("$WORK/venv/bin/python" -m pip --disable-pip-version-check) verb file source
  shift
  say "choosing the versions for $name"
  # A build's own index also has other packages, in a few versions only. Of each Python a patch release that clusters
  # have: 3.11.0 is too old for some packages.
  "$WORK/venv/bin/uv" pip compile --quiet --no-header --no-annotate --index-strategy unsafe-first-match \
    --python-version "$PYTHON.5" --python-platform "$ARCH-manylinux_2_28" "${OPTIONS[@]}" "$@" >"$list" 2>"$log" ||
    die "no versions of the packages of $name fit together for Python $PYTHON on $ARCH: $(tr -s ' \n' ' ' <"$log")"
  ! grep ' @ ' "$list" >"$log" ||
    die "$name needs $(paste -sd, "$log"): a folder carries packages of an index only: install this one by hand on the cluster"
  say "fetching what the folder lacks of $(grep -c == "$list") packages"
  # pip checks the hash of each file, those of an earlier call, too. Few packages at a time: what is complete is kept.
  PYTHONUNBUFFERED=1 xargs -n 8 "${pip[@]}" download --no-input --no-deps --prefer-binary --dest "$FOLDER/wheels" \
    --implementation cp --python-version "$PYTHON.5" "${PLATFORMS[@]}" <"$list" 2>"$log" |
    while read -r verb file; do if [[ $verb = Downloading && $file != *.metadata* ]]; then say "  ${file##*/}"; fi; done ||
    die "$(grep -i '^error' "$log" | head -n 3): fix the cause (network, proxy, disk), then repeat this command: it goes on"
  for source in "$FOLDER"/wheels/*.tar.gz "$FOLDER"/wheels/*.zip; do
    [ -f "$source" ] || continue
    say "building a wheel of ${source##*/}, as there is none for Python $PYTHON on $ARCH"
    "${pip[@]}" wheel --quiet --no-deps --wheel-dir "$WORK" "$source" >"$log" 2>&1 || true
    rm "$source"
    mv "$WORK"/*py3-none-any.whl "$FOLDER/wheels/" 2>/dev/null ||
      die "$name needs ${source##*/}, which has no wheel for Python $PYTHON on $ARCH, and whose source makes none for every machine: leave it out, or choose another --python"
  done
}

make_bundle() {
  local line before python parts number extras=()
  git -C "$REPO" rev-parse --quiet --verify HEAD >/dev/null || die "$REPO is not a git checkout: clone it with git, and run this there"
  mkdir -p "$BUNDLE/wheels" || die "cannot write $BUNDLE: name a folder that you own"
  FOLDER=$(cd "$BUNDLE" && pwd -P)
  # What is not given is as in an earlier call.
  [ -n "$TORCH" ] || TORCH=$(field "$FOLDER" torch)
  PYTHON=${PYTHON:-$(field "$FOLDER" python)} ARCH=${ARCH:-$(field "$FOLDER" arch)}
  PYTHON=${PYTHON:-3.12} ARCH=${ARCH:-x86_64} TORCH=${TORCH#default}
  name_torch
  for line in "python $PYTHON" "arch $ARCH" "torch ${TORCH_CHOICE%% *}" "pins $(pins)"; do
    before=$(field "$FOLDER" "${line%% *}")
    [ -z "$before" ] || [ "$before" = "${line#* }" ] ||
      die "$BUNDLE was made for other clusters or for another version of the kit (${line%% *}: $before, now ${line#* }): name another folder"
  done
  read -r -a parts <<<"$({ field "$FOLDER" parts | tr ' ' '\n' && printf '%s\n' ${EXTRAS[@]+"${EXTRAS[@]}"}; } | sort -u | paste -sd' ' -)"
  rm -f "$FOLDER/SHA256SUMS"
  printf '%s\n' "python $PYTHON" "arch $ARCH" "torch ${TORCH_CHOICE%% *}" "pins $(pins)" "parts ${parts[*]-}" \
    "command bash setup.sh --bundle FOLDER --python $PYTHON --arch $ARCH${TORCH:+ --torch ${TORCH_CHOICE%% *}}${parts[*]+ ${parts[*]/#/--with }}" >"$FOLDER/bundle.txt"
  say "$FOLDER: for Linux on $ARCH with glibc 2.28 or newer, Python $PYTHON, torch ${TORCH_CHOICE%% *}${parts[*]+, with ${parts[*]}}"
  [ -n "$TORCH$TORCH_INDEX" ] || say "torch is pip's own build, for CUDA 13 (NVIDIA driver 580 or newer); if the nodes have an older driver: --torch cu126"
  [ -z "$(git -C "$REPO" status --porcelain)" ] || say "warning: what is not committed in $REPO is left out"
  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
  python=$(find_python)
  { "$python" -m venv "$WORK/venv" &&
    "$WORK/venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-input --constraint "$REPO/constraints.txt" uv --editable "$REPO"; } ||
    die "uv, which chooses the versions, could not be installed: see above: fix the cause (network, proxy), then repeat this command"
  for number in "${!RECIPES[@]}"; do
    "$WORK/venv/bin/python" - "${RECIPES[number]}" "$number" >"$WORK/$number.txt" <<'PY' || exit
import sys

from launcher.errors import CookbookError
from launcher.recipe import load

try:
    environment = load.load(sys.argv[1]).environment
except CookbookError as error:
    sys.exit("\n".join(f"error: {fault}" for fault in error.faults))
if environment and environment.dependencies:
    print(f"-c {sys.argv[2]}-constraints.txt" * environment.pins, *environment.dependencies, sep="\n")
PY
    [ -s "$WORK/$number.txt" ] || say "${RECIPES[number]} has no dependencies: the kit's packages are enough"
  done
  PLATFORMS=() OPTIONS=(--python "$WORK/venv/bin/python")
  # pip takes no version of glibc: these are all that 2.28 runs, the newest first.
  for line in $(seq 28 -1 5 | sed 's/^/manylinux_2_/') manylinux2014 manylinux2010 manylinux1 linux; do PLATFORMS+=(--platform "${line}_$ARCH"); done
  if [ -d "$TORCH_INDEX" ]; then
    PLATFORMS+=(--find-links "$TORCH_INDEX") OPTIONS+=(--find-links "$TORCH_INDEX")
  elif [ -n "$TORCH_INDEX" ]; then
    PLATFORMS+=(--extra-index-url "$TORCH_INDEX") OPTIONS+=(--index "$TORCH_INDEX")
  fi
  if [ "$TORCH" = none ]; then
    echo "$NO_TORCH" >"$WORK/without.txt"
    OPTIONS+=(--override "$WORK/without.txt")
    TORCH=''
  fi
  constraints_of_torch >"$WORK/constraints.txt"
  printf '%s\n' '-c constraints.txt' setuptools wheel >"$WORK/kit.txt"
  for line in cluster ${parts[@]+"${parts[@]}"}; do extras+=(--extra "$line"); done
  fetch "the kit" "$REPO/pyproject.toml" "${extras[@]}" "$WORK/kit.txt"
  for number in "${!RECIPES[@]}"; do
    [ -s "$WORK/$number.txt" ] || continue
    # A version that a recipe names takes the place of the kit's.
    sed -n 's/^\([A-Za-z0-9._-]*\)==.*/^\1==/p' "$WORK/$number.txt" >"$WORK/named.txt"
    grep -vif "$WORK/named.txt" "$WORK/constraints.txt" >"$WORK/$number-constraints.txt"
    fetch "${RECIPES[number]}" "$WORK/$number.txt"
  done
  # A clone and not an archive: if the cluster has git, runs record the commit.
  git -c advice.detachedHead=false clone --quiet --depth 1 "file://$REPO" "$WORK/slurm-cookbook"
  git -C "$WORK/slurm-cookbook" remote remove origin
  COPYFILE_DISABLE=1 tar -C "$WORK" -czf "$FOLDER/slurm-cookbook.tar.gz" slurm-cookbook
  (cd "$FOLDER" && hashes bundle.txt slurm-cookbook.tar.gz wheels/*.whl >SHA256SUMS.new && mv SHA256SUMS.new SHA256SUMS)
  say ''
  say "ready: $(du -sh "$FOLDER" | cut -f1). Copy the folder to a filesystem that all nodes of the cluster see. There:"
  say "  tar xzf FOLDER/slurm-cookbook.tar.gz"
  say "  cd slurm-cookbook"
  say "  bash setup.sh --from FOLDER"
}

# Refuses a folder that is not for this machine and this checkout, or not whole, before anything is written.
check_bundle() {
  local own again have version part bad
  own=$(uname -m)
  [ -f "$FROM/bundle.txt" ] || die "$FROM is not a folder of setup.sh --bundle: see docs/offline.md"
  FROM=$(cd "$FROM" && pwd -P)
  [[ $FROM != *[[:space:]]* ]] || die "the path $FROM contains a space: move the folder"
  PYTHONS=$(field "$FROM" python) ARCH=$(field "$FROM" arch) TORCH=${TORCH:-$(field "$FROM" torch)} have=$(field "$FROM" parts)
  again="make one where there is network: $(field "$FROM" command)"
  [ -f "$FROM/SHA256SUMS" ] || die "$FROM is not complete: ${again/make one/repeat}"
  [ "$ARCH" = "$own" ] || die "$FROM is for $ARCH, and this machine is $own: ${again/--arch $ARCH/--arch $own}"
  [ "$(field "$FROM" pins)" = "$(pins)" ] ||
    die "$FROM is for another version of the kit than $REPO: use the one in it (tar xzf $FROM/slurm-cookbook.tar.gz), or, in a checkout of this version, $again"
  if ! version=$(version_of "$VENV/bin/python"); then
    find_python >/dev/null
  elif [ "$version" != "$PYTHONS" ]; then
    die "$FROM is for Python $PYTHONS, and $VENV has $version: set COOKBOOK_VENV to a new folder, or ${again/--python $PYTHONS/--python $version}"
  fi
  for part in $(parts); do
    [[ " $have " = *" $part "* ]] || die "$FROM lacks the part $part: add it where there is network: $(field "$FROM" command) --with $part"
  done
  read -r -a EXTRAS <<<"$have"
  TORCH=${TORCH#default}
  [ "$TORCH" != none ] || TORCH=system
  name_torch
  say "checking the hashes of $(grep -c '' "$FROM/SHA256SUMS") files in $FROM"
  # A file without a hash is named, too: pip might choose it.
  bad=$(cd "$FROM" && { sha256sum --check --quiet SHA256SUMS 2>/dev/null || true; } | sed 's/: FAILED.*//' &&
    { find wheels -type f | sort | grep -vxFf <(cut -c67- SHA256SUMS) || true; })
  [ -z "$bad" ] || die "altered, incomplete or missing in $FROM: ${bad//$'\n'/, }: copy the folder again, for instance with rsync --checksum"
}

# The work -------------------------------------------------------------------------------------

if [ -n "$BUNDLE" ]; then
  make_bundle
  exit
fi
if [ -n "$FROM" ]; then check_bundle; fi
if [ -n "$DRY_RUN" ]; then
  [ -n "$FROM" ] || choose_torch
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
[ -n "$FROM" ] || choose_torch
make_venv
# For pip, too: torch counts as installed, and with its version as a constraint it stays.
[ -z "$SYSTEM" ] || printf '%s\n' "$TORCH_FOLDER" >"$(echo "$VENV"/lib/python3*/site-packages)/cookbook-torch.pth"
if [[ $WANT = test* ]]; then install_packages dev; else install_packages; fi
if [ -n "$FROM" ]; then
  # uv builds the dependencies of recipes from the same folder, and takes the torch that is there.
  printf 'no-index = true\nfind-links = ["%s/wheels"]\n' "$FROM" >"$VENV/uv.toml"
  [ -z "$SYSTEM" ] || printf 'override-dependencies = ["%s"]\n' "$NO_TORCH" >>"$VENV/uv.toml"
fi
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
      say "  use it    source $VENV/bin/activate; eval \"\$(python $REPO/slurm/dev-cluster/cluster.py env --name demo)\"; squeue"
      say "  stop it   $VENV/bin/python $REPO/slurm/dev-cluster/cluster.py down --name demo"
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
