# Rendered by clusterrun VERSION: sourced by the batch script and on every node.

# The environment that the job was given: a job submitted from inside this one also gets it.
declare -A clusterrun_given=()
if [[ -z ${CLUSTERRUN_GIVEN:-} ]]; then
  for clusterrun_name in $(compgen -e); do
    clusterrun_given[$clusterrun_name]=${!clusterrun_name}
  done
  export CLUSTERRUN_GIVEN="${!clusterrun_given[*]}"
fi

# Variables of another launcher, or of the step around us, would change the ranks' identity.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK
unset ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT MPI_LOCALRANKID MPI_LOCALNRANKS
unset "${!PET_@}" "${!TORCHELASTIC_@}" "${!PMI_@}" "${!PMIX_@}" "${!OMPI_COMM_@}" "${!MV2_COMM_@}"
unset CLUSTERRUN_STARTED "${!ACCELERATE_@}" "${!FSDP_@}" "${!PARALLELISM_CONFIG_@}" "${!MEGATRON_LM_@}"

# Setup lines, as configured.
clusterrun_say() {
  printf 'clusterrun: %s: %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$1" >&2
  return 1
}

# Environments by name. Their own scripts may break under `set -u`.
clusterrun_venv() {
  set +u
  source "$1/bin/activate" ||
    clusterrun_say "there is no virtual environment $1 on this node; put it where all nodes can read it"
}
clusterrun_conda() {
  local clusterrun_exe
  set +u
  if [[ $(type -t conda) != function ]]; then
    for clusterrun_exe in "${CONDA_EXE:-}" "$(type -P conda)" \
      ~/{miniforge3,miniconda3,mambaforge,anaconda3}/bin/conda /opt/conda/bin/conda; do
      [[ ! -x $clusterrun_exe ]] || break
    done
    [[ -x $clusterrun_exe ]] ||
      { clusterrun_say "there is no conda on this node; put it on PATH in an earlier setup line"; return; }
    eval "$("$clusterrun_exe" shell.bash hook)"
  fi
  conda activate "$1" ||
    clusterrun_say "conda can't activate $1 on this node; list its environments with 'conda env list'"
}
clusterrun_modules() {
  local clusterrun_init
  set +u
  for clusterrun_init in "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh \
    /usr/share/{lmod/lmod,modules,Modules}/init/bash; do
    [[ $(type -t module) != function ]] || break
    [[ ! -r $clusterrun_init ]] || source "$clusterrun_init"
  done
  [[ -n $(type -t module) ]] ||
    { clusterrun_say "there is no module command on this node; define it in an earlier setup line"; return; }
  module load "$@" ||
    clusterrun_say "cannot load these modules on this node: $*; list those available with 'module avail'"
}

clusterrun_setup_failed() {
  local hint=
  # Only login shells define such commands, and SBATCH_EXPORT=NONE keeps them out of a job.
  case $2:$3 in
    *:*'conda activate'*) hint="; a job's shell has no 'conda activate': write setup: {conda: NAME}" ;;
    127:module\ * | 127:ml\ *) hint="; a job's shell has no 'module': write setup: {modules: [NAME]}" ;;
    127:*) hint="; if login shells define the command, add 'source /etc/profile' before it" ;;
  esac
  clusterrun_say "setup line $1 failed with status $2: $3$hint"
}

clusterrun_modules cuda/12 nccl || return 122
clusterrun_conda $'it\'s mine' || return 122
eval $'source \'my env/bin/activate\'' ||
  { clusterrun_setup_failed 3 "$?" $'source \'my env/bin/activate\''; return 122; }
# Undo shell options that those lines have set.
set +e +u +o pipefail

# stacks at SIGSEGV, SIGABRT and SIGBUS
export PYTHONFAULTHANDLER=1
# flight recorder: the last collectives of each rank, dumped when one times out
export TORCH_FR_BUFFER_SIZE=2000
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
# --network infiniband: fail if a node has none, rather than fall back to TCP
export NCCL_NET=IB
# yours (env)
export GREETING=$'it\'s $HOME\n#PBS -N evil'
export NCCL_DEBUG=INFO

# Passed by name from the submitting shell; the values are never written to a file.
if [[ -n ${HF_TOKEN+set} ]]; then
  export HF_TOKEN
else
  printf 'clusterrun: %s: %s is not set in the environment of the job; export it where you submit\n' \
    "${SLURMD_NODENAME:-$HOSTNAME}" HF_TOKEN >&2
fi

# Keep the original values of changed variables, except secrets.
for clusterrun_name in "${!clusterrun_given[@]}"; do
  [[ ${!clusterrun_name-} == "${clusterrun_given[$clusterrun_name]}" ||
    $clusterrun_name =~ ^(_|PWD|OLDPWD|SHLVL)$|KEY|TOKEN|SECRET|PASS ]] ||
    export "CLUSTERRUN_WAS_$clusterrun_name=${clusterrun_given[$clusterrun_name]}"
done

return 0
