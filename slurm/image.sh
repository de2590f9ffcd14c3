# shellcheck shell=bash
# Sourced by slurm/node.sh and slurm/job.sh if the site's start_from is image, and run at a job's end.
# Mounts the images of the virtual environment and of the kit's code, so that the ranks of a node open
# none of their files on the shared filesystem. If that fails, the node uses these files, and says why.

# Sets VENV and COOKBOOK to what is in the images.
start_from_images() { # folder for this attempt's mounts on the node's own disk
  local folder=$1 place reason='' env_place
  release_images "${folder%/*}" dead
  if place=$(open_image "$ENV_IMAGE" "$folder/environment"); then
    for env_place in "$place"/{,*/,.[!.]*/}pyvenv.cfg; do [ ! -r "$env_place" ] || break; done
    if timeout 60 "${env_place%/*}/bin/python" -I -S -c '' 2>/dev/null; then
      VENV=${env_place%/*}
    else
      reason="the Python in it does not start"
    fi
  else
    reason=$place
  fi
  if [ -z "$reason" ]; then
    if place=$(open_image "$(code_image)" "$folder/code"); then COOKBOOK=$place; else reason=$place; fi
  fi
  [ -z "$reason" ] || printf 'cookbook: node %s opens the files of %s one by one: %s\n' "$NODE_NAME" "$VENV" "$reason"
  # At the end of an attempt Slurm may kill this loop with the step: then the job script unmounts. After
  # scancel that can start nothing: like what mounts, the loop is no child of what Slurm kills by its tree.
  ({ trap '' TERM INT HUP; while kill -0 $$; do sleep 2; done; release_images "$folder"; } >/dev/null 2>&1 </dev/null &)
}

# Sets JOB_VENV and JOB_CODE, from which the job script starts its own programs. The nodes mount the
# images themselves.
start_job_from_images() {
  # Copies are made later.
  local VENV=$VENV COOKBOOK=$COOKBOOK NODE_NAME=${SLURMD_NODENAME:-$(hostname -s)} COPY_IMAGES_TO=
  local folder=${TMPDIR:-/tmp}/cookbook-$UID
  mkdir -m 700 "$folder" 2>/dev/null
  if [ -O "$folder" ] && [ ! -L "$folder" ]; then start_from_images "$folder/images/$SLURM_JOB_ID.job"; fi
  # shellcheck disable=SC2034  # slurm/record.sh uses them
  JOB_VENV=$VENV JOB_CODE=$COOKBOOK
}

# Prints the folder in which an image's files are, or why they are in none.
open_image() { # image folder
  local image reason
  image=$(nearest "$1")
  if reason=$(mount_image "$image" "$2"); then echo "$2" && return; fi
  if [ "$image" != "$1" ] && unpack_copy "$image" "$reason"; then echo "$image.d" && return; fi
  echo "$reason"
  return 1
}

# Unpacks this node's own copy of an image beside it, once per job.
unpack_copy() { # copy reason
  local folder=$1.d new needs free since=$SECONDS PATH=$PATH:/usr/sbin:/sbin
  command -v unsquashfs >/dev/null && command -v flock >/dev/null || return
  # shellcheck disable=SC2094  # descriptor 9 is a lock
  {
    flock 9
    if [ -O "$folder" ] && [ ! -L "$folder" ]; then return 0; fi
    # Files take whole blocks of the disk.
    needs=$(unsquashfs -lls "$1" 2>/dev/null | awk '{ size += $3 + 4096 } END { print int(size / 1024) }')
    free=$(df -k --output=avail "${1%/*}" 2>/dev/null | tail -n 1)
    if ((free < needs)); then
      printf 'cookbook: node %s does not unpack %s: %s has %d MiB free, and it needs %d\n' \
        "$NODE_NAME" "${1##*/}" "${1%/*}" $((free >> 10)) $((needs >> 10)) >&2
      return 1
    fi
    new=$(mktemp -d "$1.XXXXXX") || return
    # Other nodes wait for this one at the rendezvous.
    if ! { timeout 80 unsquashfs -no-progress -no-xattrs -force -dest "$new" "$1" && touch "$new" && mv -T "$new" "$folder"; } >/dev/null 2>&1; then
      rm -rf "$new"
      printf 'cookbook: node %s could not unpack %s within 80 s\n' "$NODE_NAME" "${1##*/}" >&2
      return 1
    fi
    printf 'cookbook: node %s unpacked %s in %d s: %s\n' "$NODE_NAME" "${1##*/}" $((SECONDS - since)) "$2" >&2
  } 9<"$1"
}

code_image() {
  local code
  code=$(readlink -f "$COOKBOOK")
  printf '%s\n' "${ENV_IMAGE%/*}/code-${code##*/}.sqsh"
}

# Where this job's copy of an image is on each node.
copy_of() { printf '%s\n' "$COPY_IMAGES_TO/cookbook-$UID-$SLURM_JOB_ID-${1##*/}"; }

# Sends the images to the own disks of the attempt's nodes over Slurm's network, so that the shared
# filesystem is read once: once per job and node, before anything else is started there. A node
# without copies mounts the shared images. Removes the copies of nodes that have been replaced.
copy_images() {
  local node new='' gone='' used=$HOSTS${ROLLOUT_HOSTS:+,$ROLLOUT_HOSTS} had=${COPIED:-}
  for node in ${used//,/ }; do [[ ,$had, == *",$node,"* ]] || new+=${new:+,}$node; done
  for node in ${had//,/ }; do [[ ,$used, == *",$node,"* ]] || gone+=${gone:+,}$node; done
  COPIED=$used
  if [ -n "$gone" ]; then release_nodes "$gone" copies & fi
  [ -z "$new" ] || send_copies "$new"
}

send_copies() { # nodes
  local log=$LOGS/copies.log holder ready step images=("$ENV_IMAGE" "$(code_image)")
  local count since=$SECONDS
  count=$(count_of "$1")
  say "sending the images to $COPY_IMAGES_TO of ${1//,/, }"
  : >"$log"
  # This step keeps the copies. Whatever ends the job, Slurm ends the step with TERM, and it removes them.
  srun --overlap --mem=0 --no-kill --job-name=copies --nodes="$count" --nodelist="$1" --ntasks="$count" --ntasks-per-node=1 \
    bash "$COOKBOOK/slurm/image.sh" keep "$(du -ckL --apparent-size "${images[@]}" | awk 'END { print $1 }')" </dev/null >"$log" 2>&1 &
  holder=$!
  HOLDERS+=("$holder")
  until (($(grep -c '^node ' "$log") >= count)) || copying_ends $holder 60; do sleep 0.2; done
  ready=$(sed -n 's/^node \(.*\) is ready, .*/\1/p' "$log" | paste -sd,)
  step=$(sed -n 's/^node .* is ready, step //p' "$log" | head -n 1)
  if (($(count_of "$ready") == count)) && send_images; then
    kill -USR2 $holder
    since=$SECONDS
    until (($(grep -c '^kept ' "$log") >= count)) || copying_ends $holder 60; do sleep 0.2; done
    return 0
  fi
  end_copies $holder
  [ -z "$STOP_ASKED" ] || return 0
  say "not every node has a copy of ${ENV_IMAGE##*/} in $COPY_IMAGES_TO: $(grep -v ' is ready, ' "$log" | head -n 1)"
  if [ -n "$ready" ] && [ "$(count_of "$ready")" != "$count" ]; then send_copies "$ready"; fi
}

# Sends both images to the nodes of a step. They get their names when all nodes have them.
send_images() {
  local image
  for image in "${images[@]}"; do
    since=$SECONDS
    sbcast --force --jobid="$SLURM_JOB_ID.$step" "$image" "$(copy_of "$image").part" >>"$log" 2>&1 &
    until copying_ends $! "${COPY_LIMIT_S:-900}"; do sleep 0.2; done
    kill $! 2>/dev/null && echo "sending ${image##*/} took too long" >>"$log"
    wait $! || return
  done
}

# Returns true if a process has ended or had its time, or if the attempt is to stop.
copying_ends() { # process seconds
  ! kill -0 "$1" 2>/dev/null || [ -n "$STOP_ASKED" ] || ((SECONDS - since >= $2))
}

count_of() { tr , '\n' <<<"$1" | grep -c .; }

# Ends steps that keep copies.
end_copies() { # processes of srun
  local process since=$SECONDS
  for process; do kill -USR1 "$process" 2>/dev/null; done
  for process; do
    while kill -0 "$process" 2>/dev/null && ((SECONDS - since < 5)); do sleep 0.2; done
    kill "$process" 2>/dev/null
  done
}

# The step that keeps a node's copies.
keep_copies() { # KiB
  local free
  remove_copies
  trap 'kill $! 2>/dev/null; remove_copies; exit 0' TERM USR1
  trap complete_copies USR2
  # Of jobs that ended without this, at a power failure for example.
  find "$COPY_IMAGES_TO" -maxdepth 1 -name "cookbook-$UID-*.sqsh*" -user "$UID" -mtime +7 -exec rm -rf {} + 2>/dev/null
  free=$(df -k --output=avail "$COPY_IMAGES_TO" 2>/dev/null | tail -n 1)
  if [ ! -w "$COPY_IMAGES_TO" ]; then
    echo "node $SLURMD_NODENAME cannot write there"
  elif ((free < $1)); then
    echo "node $SLURMD_NODENAME has $((free >> 10)) MiB free there, and they need $(($1 >> 10))"
  else
    echo "node $SLURMD_NODENAME is ready, step $SLURM_STEP_ID"
    # The next job may not take them for left behind.
    while :; do
      sleep 3600 & wait $!
      touch -c "$COPY_IMAGES_TO/cookbook-$UID-$SLURM_JOB_ID-"*.sqsh*
    done
  fi
}

complete_copies() {
  local image copy
  for image in "$ENV_IMAGE" "$(code_image)"; do
    copy=$(copy_of "$image")
    [ ! -e "$copy.part" ] || mv -f "$copy.part" "$copy" 2>/dev/null
  done
  echo "kept on $SLURMD_NODENAME"
}

remove_copies() { rm -rf "$COPY_IMAGES_TO/cookbook-$UID-$SLURM_JOB_ID-"*.sqsh*; }

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
  local header
  read -ra header < <(od -An -v -t u8 -w48 -N 48 "$1" 2>/dev/null)
  # 0x73717368 is hsqs, as it is read here.
  ((${#header[@]} == 6 && (header[0] & 0xffffffff) == 0x73717368 && header[5] > 0)) &&
    [ "$(stat -c %s "$1")" -ge "${header[5]}" ]
}

# Programs that mount an image for a user. Apptainer and Singularity have one of their own.
squashfuse_programs() {
  local name place
  [ -w /dev/fuse ] || return
  command -v squashfuse_ll squashfuse
  for name in apptainer singularity; do
    place=$(readlink -f "$(command -v $name)")
    place=${place%/bin/*}/libexec/$name/bin/squashfuse_ll
    if [ -x "$place" ]; then printf '%s\n' "$place"; fi
  done
}

# Mounts an image at a folder. Prints the reason if it cannot.
mount_image() { # file folder
  local program
  [ -r "$1" ] || { echo "it cannot read $1 (cookbook submit makes it)"; return 1; }
  is_whole "$1" || { echo "$1 is damaged: remove it, and cookbook submit makes it again"; return 1; }
  mkdir -p "$2" || { echo "it cannot make $2"; return 1; }
  for program in $(squashfuse_programs); do
    # Ranks that save a checkpoint after TERM still need their files.
    (trap '' TERM INT HUP; exec "$program" -f -o ro "$1" "$2") >/dev/null 2>&1 </dev/null &
    echo $! >"$2.pid"
    for _ in {1..250}; do
      ! mountpoint -q "$2" || return 0
      kill -0 $! 2>/dev/null || break
      sleep 0.02
    done
  done
  # A kernel lets root mount it, and users if the administrators configured that.
  rm -f "$2.pid"
  ! mount -t squashfs -o loop,ro "$1" "$2" 2>/dev/null || return 0
  rmdir "$2" "${2%/*}" 2>/dev/null
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

# As a program, on each node: keep KIB; or the end of an attempt; with copies, also of what is kept.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  if [ "${1:-}" = keep ]; then keep_copies "$2"; exit; fi
  for each in "${TMPDIR:-/tmp}/cookbook-$(id -u)/images/$SLURM_JOB_ID".*; do release_images "$each"; done
  if [ "${1:-}" = copies ]; then remove_copies; fi
fi
