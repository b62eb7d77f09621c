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

# stacks at SIGSEGV, SIGABRT and SIGBUS
export PYTHONFAULTHANDLER=1
# the node's CPUs divided by its ranks; launchers default to 1
export OMP_NUM_THREADS=1
# on the CPU, even if a node has GPUs
export CUDA_VISIBLE_DEVICES=''
# accelerate's device for ZeRO
export ACCELERATE_TORCH_DEVICE=cpu
# DeepSpeed's device
export DS_ACCELERATOR=cpu
# --timeout, in minutes
export DEEPSPEED_TIMEOUT=30

# Keep the original values of changed variables, except secrets.
for clusterrun_name in "${!clusterrun_given[@]}"; do
  [[ ${!clusterrun_name-} == "${clusterrun_given[$clusterrun_name]}" ||
    $clusterrun_name =~ ^(_|PWD|OLDPWD|SHLVL)$|KEY|TOKEN|SECRET|PASS ]] ||
    export "CLUSTERRUN_WAS_$clusterrun_name=${clusterrun_given[$clusterrun_name]}"
done

return 0
