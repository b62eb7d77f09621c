"""The environment of the ranks: what is set, why, and what is never set."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from clusterrun.config.choices import Device, Network, Strategy
from clusterrun.errors import UsageError
from tests.checkout import ROOT
from tests.launch.samples import here, on_slurm, slurm_facts, variables

# practice learnt the hard way: each hides a fault, or was tuned for another machine
NEVER = re.compile(
    r"NCCL_(IB_GID_INDEX|IB_DISABLE|P2P_DISABLE|SHM_DISABLE|NVLS_ENABLE|IB_TIMEOUT|IB_RETRY_CNT"
    r"|ALGO|PROTO|BUFFSIZE|MIN_NCHANNELS|TIMEOUT|SOCKET_IFNAME)|CUDA_LAUNCH_BLOCKING|RDMAV_.*"
    r"|FI_EFA_USE_DEVICE_RDMA|FI_PROVIDER|PYTORCH_CUDA_ALLOC_CONF|(TORCH_)?NCCL_BLOCKING_WAIT"
    r"|(TORCH_)?NCCL_ASYNC_ERROR_HANDLING|TORCH_NCCL_ENABLE_MONITORING|TORCH_DISTRIBUTED_DEBUG"
    r"|(HF|WANDB|PET|TORCHELASTIC|SLURM)_.*|MASTER_.*"
)


def test_a_job_gets_this_environment_and_no_more() -> None:
    assert variables(on_slurm(gpus_per_node=4)) == {
        "PYTHONFAULTHANDLER": "1",
        "NCCL_DEBUG": "WARN",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert variables(on_slurm(nproc_per_node=2)) == {
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }


def test_no_preset_sets_what_hides_faults() -> None:
    for network, strategy in product(Network, (Strategy.DDP, Strategy.FSDP, Strategy.ZERO3)):
        asked: dict[str, Any] = {"network": network, "strategy": strategy, "timeout_s": 3600}
        plan = on_slurm(nodes=2, gpus_per_node=4, **asked)
        assert [name for name in variables(plan) if NEVER.fullmatch(name)] == []


def test_a_preset_adds_one_variable_and_every_variable_has_a_reason() -> None:
    plan = on_slurm(gpus_per_node=1, network=Network.EFA, env={"A": "b"}, timeout_s=60)
    assert all(len(variable.why) > 5 for variable in plan.env)
    plain = variables(on_slurm(gpus_per_node=1))
    for network, added in {
        Network.ETHERNET: {"NCCL_NET": "Socket"},
        Network.INFINIBAND: {"NCCL_NET": "IB"},
        Network.EFA: {"FI_EFA_USE_HUGE_PAGE": "0"},
    }.items():
        assert variables(on_slurm(gpus_per_node=1, network=network)) == {**plain, **added}


def test_the_flight_recorder_is_spelled_as_the_installed_torch_reads_it() -> None:
    new, old = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    for torch, names in {
        "2.13.0": {new},
        "2.9.1+cu128": {new},
        "2.8.0": {old},
        "": {new, old},
    }.items():
        found = variables(on_slurm(slurm_facts(packages={"torch": torch}), gpus_per_node=1))
        assert {name for name in found if name.endswith("BUFFER_SIZE")} == names, torch
    found = variables(on_slurm(gpus_per_node=1, env={old: "50"}))
    sizes = [value for name, value in found.items() if "BUFFER_SIZE" in name]
    assert sizes == ["50"], "the user's size wins in either spelling"


def test_the_users_variables_beat_ours_and_env_beats_network_env() -> None:
    plan = on_slurm(
        gpus_per_node=1,
        cpus_per_task=8,
        network_env={"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"},
        env={"OMP_NUM_THREADS": "3", "NCCL_IB_DISABLE": "0"},
    )
    found = variables(plan)
    assert len(found) == len(plan.env)
    wanted = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "NCCL_IB_DISABLE": "0"}
    assert wanted.items() <= found.items()


def test_p6b_deepspeeds_own_timeout_is_in_minutes_rounded_up() -> None:
    plan = on_slurm(gpus_per_node=2, strategy=Strategy.ZERO2, timeout_s=1801)
    assert variables(plan)["DEEPSPEED_TIMEOUT"] == "31"
    assert "DEEPSPEED_TIMEOUT" not in variables(on_slurm(gpus_per_node=2, timeout_s=1801))


def test_who_a_rank_is_cannot_be_set() -> None:
    names = (
        "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT PET_RDZV_ID SLURM_NODEID "
        "SLURM_JOB_NODELIST TORCHELASTIC_RUN_ID CUDA_VISIBLE_DEVICES CLUSTERRUN_SPOOL"
    )
    for name in names.split():
        for asked in ({"env": {name: "0"}}, {"network_env": {name: "0"}}, {"pass_env": (name,)}):
            with pytest.raises(UsageError, match="clusterrun sets") as refused:
                on_slurm(**asked)
            assert refused.value.hints


def test_what_is_unset_on_the_nodes_is_given_with_its_value_and_not_passed_on_by_name() -> None:
    text = (ROOT / "templates" / "env.sh.j2").read_text()
    words = " ".join(re.findall(r"^unset (.*)$", text, re.MULTILINE)).split()
    assert "RANK" in words
    for name in (re.sub(r'"\$\{!(\w+)@\}"', r"\1X", word) for word in words):  # one of each kind
        with pytest.raises(UsageError, match=name) as refused:
            on_slurm(pass_env=(name,))
        assert refused.value.hints
    with pytest.raises(UsageError, match="unset on the nodes") as refused:
        on_slurm(pass_env=("ACCELERATE_LOG_LEVEL",))
    assert refused.value.hints == ("keep it with --env ACCELERATE_LOG_LEVEL=VALUE",)
    plan = on_slurm(env={"ACCELERATE_LOG_LEVEL": "info"})
    assert variables(plan)["ACCELERATE_LOG_LEVEL"] == "info"


def test_a_secret_is_taken_by_name_only() -> None:
    plan = on_slurm(pass_env=("HF_TOKEN", "HF_TOKEN"))
    assert plan.pass_env == ("HF_TOKEN",)
    assert "HF_TOKEN" not in variables(plan)
    for name in ("MAX_TOKENS", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH"):  # no secrets
        assert variables(on_slurm(env={name: "x"}))[name] == "x"


def test_harmful_settings_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"env": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}}, "hang of all"),
        ({"env": {"UID": "7"}}, "bash does not let UID be set"),
        ({"network_env": {"NCCL_ASYNC_ERROR_HANDLING": "0"}}, "hang of all"),
        ({"network_env": {"NCCL_SOCKET_IFNAME": "^docker0"}}, "exclude the loopback interface"),
        ({"pass_env": ("A=1",)}, "is not a variable name"),
        ({"pass_env": ("A",), "env": {"A": "1"}}, "both set and passed"),
    ]
    for asked, message in wrong:
        with pytest.raises(UsageError, match=message):
            on_slurm(**asked)
    taken = {"NCCL_SOCKET_IFNAME": "^lo,docker0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert taken.items() <= variables(on_slurm(network_env=taken)).items()
    assert on_slurm(network_interface="ib0").network_interface == "ib0"


def test_threads_are_exported_where_they_are_known() -> None:
    assert variables(on_slurm(threads_per_process=6))["OMP_NUM_THREADS"] == "6"
    assert "OMP_NUM_THREADS" not in variables(on_slurm(gpus_per_node=2))
    assert variables(here(nproc_per_node=4, device=Device.CPU))["OMP_NUM_THREADS"] == "2"


def test_what_was_planned_is_handed_to_the_ranks() -> None:
    found = variables(on_slurm(planned=True, micro_batch=4, accumulation=8, grad_ckpt=True))
    assert found["CLUSTERRUN_MICRO_BATCH"] == "4"
    assert found["CLUSTERRUN_ACCUMULATION"] == "8"
    assert found["CLUSTERRUN_GRAD_CKPT"] == "1"
    assert found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "8"
    told = on_slurm(micro_batch=4, accumulation=8, grad_ckpt=True)
    assert variables(told) == variables(on_slurm())  # facts alone change no training
