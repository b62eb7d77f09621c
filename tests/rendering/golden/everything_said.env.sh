# Rendered by clusterrun VERSION: setup and environment, sourced by the batch script and on every node.
# Print why nothing can start here. Record it as a node's status, or as the end of the run.
clusterrun_fail() {
  trap - EXIT
  [[ -z $2 ]] || printf 'clusterrun: %s: %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$2" >&2
  set -C  # an earlier record stays
  [[ -z $clusterrun_attempt ]] || echo "$1" 2> /dev/null > "$clusterrun_dir/attempts/$clusterrun_attempt/status"
  [[ -n $clusterrun_attempt || -z $clusterrun_dir ]] || printf '{"schema": "clusterrun.end/1", "state": "%s", "exit_code": %d, "ended_at": %(%s)T}\n' \
    "${3:-FAILED}" "$1" -1 2> /dev/null > "$clusterrun_dir/end.json"
  exit "$1"
}
clusterrun_cannot() { clusterrun_fail 122 "$1; install clusterrun[train] there, or name another interpreter with --python"; }
[[ -z $clusterrun_why ]] || clusterrun_cannot "$clusterrun_why"
# The environment before setup, for the nodes' own setup and for a job that is submitted from inside this one.
exec {clusterrun_given}< <(env -0)
# Variables of another launcher, or of the step around us, would change the ranks' identity.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
unset MASTER_ADDR MASTER_PORT MPI_LOCALRANKID MPI_LOCALNRANKS CLUSTERRUN_STARTED "${!PET_@}" "${!TORCHELASTIC_@}" "${!PMI_@}"
unset "${!PMIX_@}" "${!OMPI_COMM_@}" "${!MV2_COMM_@}" "${!ACCELERATE_@}" "${!FSDP_@}" "${!PARALLELISM_CONFIG_@}" "${!MEGATRON_LM_@}"
trap 'clusterrun_fail 122 "a setup line exited the shell"' EXIT

# Setup lines, as configured. They run in this shell; the prefix clusterrun_ keeps our variables apart from theirs.
# Environments by name. Their own scripts may break under `set -u`.
clusterrun_conda() {
  local clusterrun_exe; set +u
  if [[ $(type -t conda) != function ]]; then
    clusterrun_exe=$(type -P "${CONDA_EXE:-conda}" conda ~/{miniforge3,miniconda3,mambaforge,anaconda3}/bin/conda /opt/conda/bin/conda | head -n 1)
    [[ -n $clusterrun_exe ]] || clusterrun_fail 122 "there is no conda on this node; put it on PATH in an earlier setup line"
    eval "$("$clusterrun_exe" shell.bash hook)"
  fi
  conda activate "$1" || clusterrun_fail 122 "conda can't activate $1 on this node; list its environments with 'conda env list'"
}
clusterrun_modules() {
  local clusterrun_init; set +u
  for clusterrun_init in "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh \
    /usr/share/{lmod/lmod,modules,Modules}/init/bash; do
    [[ $(type -t module) == function || ! -r $clusterrun_init ]] || source "$clusterrun_init"
  done
  [[ -n $(type -t module) ]] || clusterrun_fail 122 "there is no module command on this node; define it in an earlier setup line"
  module load "$@" || clusterrun_fail 122 "cannot load these modules on this node: $*; list those available with 'module avail'"
}
clusterrun_setup_failed() {
  local hint=
  # Only login shells define such commands, and SBATCH_EXPORT=NONE keeps them out of a job.
  case $2:$3 in
    *:*'conda activate'*) hint="; a job's shell has no 'conda activate': write setup: {conda: NAME}" ;;
    127:module\ * | 127:ml\ *) hint="; a job's shell has no 'module': write setup: {modules: [NAME]}" ;;
    127:*) hint="; if login shells define the command, add 'source /etc/profile' before it" ;;
  esac
  clusterrun_fail 122 "setup line $1 failed with status $2: $3$hint"
}
clusterrun_modules cuda/12 nccl
clusterrun_conda $'it\'s mine'
eval $'source \'my env/bin/activate\'' || clusterrun_setup_failed 3 "$?" $'source \'my env/bin/activate\''
set +e +u +o pipefail  # undo shell options that those lines have set

export PYTHONFAULTHANDLER=1  # stacks at SIGSEGV, SIGABRT and SIGBUS
export TORCH_FR_BUFFER_SIZE=2000  # flight recorder: the last collectives of each rank, dumped when one times out
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export NCCL_NET=IB  # network.preset infiniband: fail if a node has none, rather than fall back to TCP
export GREETING=$'it\'s $HOME\n#PBS -N evil'  # yours (env)
export NCCL_DEBUG=INFO

# Passed by name from the submitting shell; the values are never written to a file.
for clusterrun_name in HF_TOKEN; do
  [[ -n ${!clusterrun_name+set} ]] && export "${clusterrun_name?}" ||
    printf 'clusterrun: %s: %s is not set in the environment of the job; export it where you submit\n' \
      "${SLURMD_NODENAME:-$HOSTNAME}" "$clusterrun_name" >&2
done

# Enter the working directory, or its copy $1, and find the interpreter.
clusterrun_workdir='/home/ada/my project' clusterrun_python=/usr/bin/python3
clusterrun_enter() {
  cd -- "${1:-$clusterrun_workdir}" ||
    clusterrun_fail 122 'cannot enter the working directory; put it on a file system that all nodes share'
  command -v -- "$clusterrun_python" > /dev/null ||
    clusterrun_fail 122 "there is no $clusterrun_python here; set --python to an interpreter that all nodes have"
  trap - EXIT; trap '' USR1 USR2  # ignore Slurm's warnings until Python handles them
}
return 0
