"""The text of Slurm's configuration files for a shape; pure."""

from __future__ import annotations

from tests.cluster.shape import Shape

# KillWait is Slurm's default; GraceTime leaves a busy machine time to save a small checkpoint.
SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={head_host}({head_address})
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge/munge.socket
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool/%n
SlurmctldPidFile={state}/run/slurmctld.pid
SlurmdPidFile={state}/run/slurmd-%n.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin={tasks}
SwitchType=switch/none
{newer}
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
DefMemPerCPU=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout}
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
{accounting}
NodeName=DEFAULT CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 \
RealMemory={mem}{gres} State=UNKNOWN
{nodes}
PartitionName=DEFAULT Nodes={node_list} MaxTime=INFINITE State=UP GraceTime=30
PartitionName=low PriorityTier=1
PartitionName=abrupt PriorityTier=1 GraceTime=0
PartitionName=main PriorityTier=10 Default=YES
PartitionName=high PriorityTier=100
"""

CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
ConstrainRAMSpace=yes
"""

SLURMDBD_CONF = """\
DbdHost={head_host}
DbdAddr={head_address}
DbdPort={dbd_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge/munge.socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
PidFile={state}/run/slurmdbd.pid
{newer}
LogFile={state}/log/slurmdbd.log
DebugLevel=info
"""


def slurm_conf(shape: Shape) -> str:
    """Return the text of slurm.conf."""
    return SLURM_CONF.format(
        name=shape.bridge,
        head_host=shape.head_host,
        head_address=shape.head_address,
        ctld_port=shape.ctld_port,
        slurmd_port=shape.slurmd_port,
        slurmd_timeout=shape.slurmd_timeout_s,
        state=shape.state_dir,
        accounting=_accounting(shape),
        newer=_plugins(shape),
        tasks="task/cgroup" if shape.memory_limit == "cgroup" else "task/none",
        cpus=shape.cpus_per_node,
        mem=shape.mem_mib_per_node,
        gres=f" Gres=gpu:h100:{shape.gpus_per_node}" if shape.gpus_per_node else "",
        nodes="\n".join(f"NodeName={n} NodeAddr={shape.address(n)}" for n in shape.node_names),
        node_list=_node_list(shape),
    )


def gres_conf(shape: Shape) -> str:
    """Return the text of gres.conf."""
    if not shape.gpus_per_node:
        return ""
    devices = f"{shape.device_dir}/gpu[0-{shape.gpus_per_node - 1}]"
    return f"NodeName={_node_list(shape)} Name=gpu Type=h100 File={devices}\n"


def cgroup_conf(shape: Shape) -> str:
    """Return the text of cgroup.conf: a newer slurmd looks for cgroups that no plugin needs."""
    if shape.memory_limit == "cgroup":
        return CGROUP_CONF
    return "CgroupPlugin=disabled\n" if shape.newer else ""


def slurmdbd_conf(shape: Shape) -> str:
    """Return the text of slurmdbd.conf."""
    return SLURMDBD_CONF.format(
        head_host=shape.head_host,
        head_address=shape.head_address,
        dbd_port=shape.dbd_port,
        state=shape.state_dir,
        newer=_plugins(shape),
    )


def _accounting(shape: Shape) -> str:
    if not shape.accounting:
        return "AccountingStorageType=accounting_storage/none"
    return "\n".join(
        (
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={shape.head_address}",
            f"AccountingStoragePort={shape.dbd_port}",
            # For connections to slurmdbd, AuthInfo doesn't count but this does.
            f"AccountingStoragePass={shape.state_dir}/munge/munge.socket",
            "AccountingStorageTRES=gres/gpu",
            *(["AccountingStorageEnforce=limits"] if shape.only_associations else ()),
        )
    )


def _plugins(shape: Shape) -> str:
    return f"PluginDir={shape.newer.plugins}" if shape.newer else ""


def _node_list(shape: Shape) -> str:
    prefix = shape.node_names[0][:-1]
    return f"{prefix}[1-{shape.nodes}]"
