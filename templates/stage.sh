# A node's copy of the environment. The batch host wrote the values above, and runs
# `bash stage.sh look` (does the node need the file?) and `unpack` on each node; they report on stdout.
# node.sh sources this: `clusterrun_python` becomes the copy's interpreter.

clusterrun_stage_copy=$clusterrun_stage_root/$clusterrun_stage_key
clusterrun_stage_tar=$clusterrun_stage_copy.$SLURM_JOB_ID.tar

clusterrun_stage_fail() {
  local node=${SLURMD_NODENAME:-$HOSTNAME}
  if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    printf 'unfit: %s: %s\n' "$node" "$1"
  else
    printf 'clusterrun: %s: uses the environment on the shared file system: %s\n' "$node" "$1" >&2
  fi
  return 1
}

# What identifies the files of a copy, without those that Python writes when it imports.
clusterrun_stage_print() {
  (set -o pipefail && cd -- "$1/env" && find . -name __pycache__ -prune -o -type f -printf '%P %s %T@\n' \
    -o -type l -printf '%P %l\n' | LC_ALL=C sort | sha256sum)
}

clusterrun_stage_is_whole() {
  [[ -s $1/whole && $(< "$1/whole") == "$(clusterrun_stage_print "$1")" ]]
}

# Remove a directory unless a job uses it: each job holds a shared lock on its copy.
clusterrun_stage_remove() {
  local fd
  [[ -d $1 ]] || return 0
  { exec {fd}< "$1"; } 2> /dev/null || return
  flock -n -x "$fd" && rm -rf -- "$1"
  local code=$?
  exec {fd}<&-
  return "$code"
}

# Remove all other copies but the newest $1.
clusterrun_stage_clear() {
  local name left=$1
  while read -r name; do
    [[ $name == "$clusterrun_stage_key/" ]] || ((left-- > 0)) ||
      clusterrun_stage_remove "$clusterrun_stage_root/$name"
  done < <(cd -- "$clusterrun_stage_root" && ls -td -- */ 2> /dev/null)
}

clusterrun_stage_has_room() {
  local free
  free=$(df -Pk -- "$clusterrun_stage_root" | awk 'NR == 2 {print $4}')
  ((free >= clusterrun_stage_kib))
}

# Take the lock of all copies; close the descriptor `lock` to release it.
clusterrun_stage_lock() {
  [[ -O $clusterrun_stage_root && ! -L $clusterrun_stage_root ]] &&
    { exec {lock}< "$clusterrun_stage_root"; } 2> /dev/null && flock -w 600 "$lock" ||
    clusterrun_stage_fail "cannot lock $clusterrun_stage_root"
}

# Print "lacks" if this node needs the file.
clusterrun_stage_look() {
  local tool lock
  for tool in flock tar sha256sum find awk; do
    type -P "$tool" > /dev/null || { clusterrun_stage_fail "there is no command $tool"; return; }
  done
  mkdir -p -m 700 -- "$clusterrun_stage_root" 2> /dev/null
  clusterrun_stage_lock || return
  find "$clusterrun_stage_root" -maxdepth 1 -name '*.tar' -mtime +0 -delete  # of dead jobs
  rm -rf -- "$clusterrun_stage_root/.new"
  ! clusterrun_stage_is_whole "$clusterrun_stage_copy" || return 0
  clusterrun_stage_has_room || clusterrun_stage_clear 0
  clusterrun_stage_has_room && echo lacks ||
    clusterrun_stage_fail "$clusterrun_stage_root has no room for $((clusterrun_stage_kib / 1024)) MiB"
}

clusterrun_stage_unpack() {
  local lock
  clusterrun_stage_lock || return
  clusterrun_stage_is_whole "$clusterrun_stage_copy" || clusterrun_stage_make
  rm -rf -- "$clusterrun_stage_tar" "$clusterrun_stage_root/.new"
  touch -c -- "$clusterrun_stage_copy"  # the newest are kept
  clusterrun_stage_clear 1
}

clusterrun_stage_make() {
  local sum new=$clusterrun_stage_root/.new
  clusterrun_stage_remove "$clusterrun_stage_copy" ||
    { clusterrun_stage_fail "the copy on this node is damaged and in use"; return; }
  [[ -f $clusterrun_stage_tar ]] || { clusterrun_stage_fail "the packed environment did not arrive"; return; }
  rm -rf -- "$new" && mkdir -m 700 -- "$new" || { clusterrun_stage_fail "cannot create $new"; return; }
  sum=$(
    set -o pipefail
    { tee /dev/fd/3 < "$clusterrun_stage_tar" | tar -xf - --no-same-owner -C "$new" > /dev/null 2>&1; } \
      3>&1 | sha256sum
  ) || { clusterrun_stage_fail "cannot unpack the copy; check the space in $clusterrun_stage_root"; return; }
  [[ $sum == "$clusterrun_stage_sha "* ]] || { clusterrun_stage_fail "the copy on this node is damaged"; return; }
  "$new/env/$clusterrun_stage_inside" -Ic 'import sys; sys.exit(sys.prefix != sys.argv[1])' "$new/env" ||
    { clusterrun_stage_fail "the interpreter of the copy does not start"; return; }
  clusterrun_stage_print "$new" > "$new/whole" && mv -T -- "$new" "$clusterrun_stage_copy" ||
    clusterrun_stage_fail "cannot write to $clusterrun_stage_root"
}

clusterrun_stage_use() {
  local lock
  [[ $(type -P -- "$clusterrun_python") == "$clusterrun_stage_python" ]] ||
    { clusterrun_stage_fail "the interpreter on this node is not $clusterrun_stage_python"; return; }
  clusterrun_stage_lock || return
  if clusterrun_stage_is_whole "$clusterrun_stage_copy"; then
    touch -- "$clusterrun_stage_copy"
    # The agent holds this lock until it exits.
    exec {clusterrun_stage_used}< "$clusterrun_stage_copy"
    flock -s -n "$clusterrun_stage_used"
    clusterrun_python=$clusterrun_stage_copy/env/$clusterrun_stage_inside
  else
    clusterrun_stage_fail "there is no undamaged copy in $clusterrun_stage_copy"
  fi
  exec {lock}<&-
}

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then clusterrun_stage_use; else "clusterrun_stage_$1"; exit 0; fi
