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

export PYTHONFAULTHANDLER=1  # stacks at SIGSEGV, SIGABRT and SIGBUS
export OMP_NUM_THREADS=1  # the node's CPUs divided by its ranks; launchers default to 1
export CUDA_VISIBLE_DEVICES=''  # on the CPU, even if a node has GPUs
export ACCELERATE_TORCH_DEVICE=cpu  # accelerate's device for ZeRO
export DS_ACCELERATOR=cpu  # DeepSpeed's device
export DEEPSPEED_TIMEOUT=30  # --timeout, in minutes

# Enter the working directory, or its copy $1, and find the interpreter.
clusterrun_workdir=/home/ada/project clusterrun_python=/usr/bin/python3
clusterrun_enter() {
  cd -- "${1:-$clusterrun_workdir}" ||
    clusterrun_fail 122 'cannot enter the working directory; put it on a file system that all nodes share'
  command -v -- "$clusterrun_python" > /dev/null ||
    clusterrun_fail 122 "there is no $clusterrun_python here; set --python to an interpreter that all nodes have"
  trap - EXIT; trap '' USR1 USR2  # ignore Slurm's warnings until Python handles them
}
return 0
