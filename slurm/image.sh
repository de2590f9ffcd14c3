# shellcheck shell=bash
# Sourced by slurm/node.sh and slurm/job.sh if the site's start_from is image, and run at a job's end.
# Mounts the images of the virtual environment and of the kit's code, so that the ranks of a node open
# none of their files on the shared filesystem. If that fails, the node uses these files, and says why.

# Sets VENV and COOKBOOK to what is in the images.
start_from_images() { # folder for this attempt's mounts on the node's own disk
  local folder=$1 reason env_place
  release_images "${folder%/*}" dead
  if reason=$(mount_image "$(nearest "$ENV_IMAGE")" "$folder/environment"); then
    for env_place in "$folder"/environment/{,*/,.[!.]*/}pyvenv.cfg; do [ ! -r "$env_place" ] || break; done
    if timeout 60 "${env_place%/*}/bin/python" -I -S -c '' 2>/dev/null; then
      VENV=${env_place%/*}
    else
      reason="the Python in it does not start"
    fi
  fi
  if [ -z "$reason" ] && reason=$(mount_image "$(nearest "$(code_image)")" "$folder/code"); then
    COOKBOOK=$folder/code
  fi
  [ -z "$reason" ] || printf 'cookbook: node %s opens the files of %s one by one: %s\n' "$NODE_NAME" "$VENV" "$reason"
  # At the end of an attempt Slurm kills this loop with the step: then the job script unmounts.
  { trap '' TERM INT HUP; while kill -0 $$; do sleep 2; done; release_images "$folder"; } >/dev/null 2>&1 </dev/null &
}

# Sets JOB_VENV and JOB_CODE, from which the job script starts its own programs. The nodes mount the
# images themselves.
start_job_from_images() {
  local VENV=$VENV COOKBOOK=$COOKBOOK NODE_NAME=${SLURMD_NODENAME:-$(hostname -s)}
  local folder=${TMPDIR:-/tmp}/cookbook-$UID
  mkdir -m 700 "$folder" 2>/dev/null
  if [ -O "$folder" ] && [ ! -L "$folder" ]; then start_from_images "$folder/images/$SLURM_JOB_ID.job"; fi
  # shellcheck disable=SC2034  # slurm/record.sh uses them
  JOB_VENV=$VENV JOB_CODE=$COOKBOOK
}

code_image() {
  local code
  code=$(readlink -f "$COOKBOOK")
  printf '%s\n' "${ENV_IMAGE%/*}/code-${code##*/}.sqsh"
}

# Where this job's copy of an image is on each node.
copy_of() { printf '%s\n' "$COPY_IMAGES_TO/cookbook-$UID-$SLURM_JOB_ID-${1##*/}"; }

# Sends the images to the nodes' own disks over Slurm's network, once per job, so that the shared
# filesystem is read once. A node without a whole copy mounts the shared image.
copy_images() {
  local image answer
  [ ! -e "$(copy_of "$ENV_IMAGE")" ] || return 0
  for image in "$ENV_IMAGE" "$(code_image)"; do
    answer=$(timeout "${COPY_LIMIT_S:-900}" sbcast --force "$image" "$(copy_of "$image")" 2>&1) ||
      say "not every node has a copy of ${image##*/} in $COPY_IMAGES_TO: ${answer:-it took too long}"
  done
}

# The copy of an image on this node's own disk, or the shared image if that copy is not whole.
nearest() { # image
  local copy reason
  if [ -z "${COPY_IMAGES_TO:-}" ] || [ -z "${SLURM_JOB_ID:-}" ]; then echo "$1" && return; fi
  copy=$(copy_of "$1")
  if [ ! -O "$copy" ] || [ -L "$copy" ]; then
    reason="it has no copy in $COPY_IMAGES_TO"
  elif ! is_whole "$copy"; then
    reason="$copy is not whole"
  else
    echo "$copy" && return
  fi
  printf 'cookbook: node %s reads %s on the shared filesystem: %s\n' "$NODE_NAME" "$1" "$reason" >&2
  echo "$1"
}

# The filesystem's size is in its header: a copy may have been cut off.
is_whole() { # image
  local size
  size=$(od -An -t u8 -j 40 -N 8 "$1" 2>/dev/null)
  [ "$(head -c 4 "$1" | tr -d '\0')" = hsqs ] && [ "$(stat -c %s "$1")" -ge "$((size))" ]
}

# Mounts an image at a folder. Prints the reason if it cannot.
mount_image() { # file folder
  local program
  [ -r "$1" ] || { echo "it cannot read $1 (cookbook submit makes it)"; return 1; }
  is_whole "$1" || { echo "$1 is damaged: remove it, and cookbook submit makes it again"; return 1; }
  mkdir -p "$2" || { echo "it cannot make $2"; return 1; }
  for program in squashfuse_ll squashfuse; do
    if [ ! -w /dev/fuse ] || ! command -v $program >/dev/null; then continue; fi
    # Ranks that save a checkpoint after TERM still need their files.
    (trap '' TERM INT HUP; exec $program -f -o ro "$1" "$2") >/dev/null 2>&1 </dev/null &
    echo $! >"$2.pid"
    for _ in {1..50}; do
      ! mountpoint -q "$2" || return 0
      kill -0 $! 2>/dev/null || break
      sleep 0.1
    done
  done
  # A kernel lets root mount it, and users if the administrators configured that.
  rm -f "$2.pid"
  ! mount -t squashfs -o loop,ro "$1" "$2" 2>/dev/null || return 0
  rmdir "$2"
  echo "it has no squashfuse with /dev/fuse, and may not mount $1"
  return 1
}

# Unmounts what is below a folder, or what is left there of daemons that were killed.
release_images() { # folder [dead]
  local place
  for place in "$1"/*/*/ "$1"/*/; do
    place=${place%/}
    [ -r "$place.pid" ] || mountpoint -q "$place" || continue
    [ "${2:-}" != dead ] || { [ -r "$place.pid" ] && ! kill -0 "$(<"$place.pid")" 2>/dev/null; } || continue
    fusermount3 -uz "$place" 2>/dev/null || fusermount -uz "$place" 2>/dev/null || umount -l "$place" 2>/dev/null
    rm -f "$place.pid"
    rmdir "$place" "${place%/*}" 2>/dev/null
  done
}

# As a program, on each node: the end of a job.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  for each in "${TMPDIR:-/tmp}/cookbook-$(id -u)/images/$SLURM_JOB_ID".*; do release_images "$each"; done
  if [ -n "${COPY_IMAGES_TO:-}" ]; then
    rm -f "$COPY_IMAGES_TO/cookbook-$UID-$SLURM_JOB_ID-"*.sqsh
    # Of jobs that ended without this.
    find "$COPY_IMAGES_TO" -maxdepth 1 -name "cookbook-$UID-*.sqsh" -user "$UID" -mtime +7 -delete
  fi
fi
