"""The requests to Slurm: directives, sbatch's other options, and the options of srun."""

from __future__ import annotations

from typing import Any

import pytest

from clusterrun.config.choices import GpuRequest, OnInterrupt, Stage
from clusterrun.errors import UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import render_bundle
from tests.launch.samples import here, lines, on_slurm


def test_a_plain_job_asks_for_little() -> None:
    assert lines(on_slurm(nodes=2, gpus_per_node=4)) == {
        "job-name": "train",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "requeue": None,
        "signal": "B:USR2@120",
        "open-mode": "append",
        "ignore-pbs": None,
    }


def test_every_option_of_slurm_reaches_its_directive() -> None:
    asked = {
        "partition": "gpu",
        "account": "nlp",
        "qos": "high",
        "constraint": "a100|h100",
        "nodelist": "n[1-2]",
        "exclude": "n3",
        "reservation": "r",
        "dependency": "afterok:1",
        "begin": "now+1hour",
        "deadline": "2030-01-01",
        "switches": "1@5",
        "clusters": "c1",
        "comment": "it's 100% #1",
        "mail_type": "END",
        "mail_user": "ada@example.org",
        "signal": "B:USR2@300",
    }
    found = lines(on_slurm(exclusive=True, hold=True, **asked))
    assert {name.replace("_", "-"): value for name, value in asked.items()}.items() <= found.items()
    assert (found["exclusive"], found["hold"]) == (None, None)


def test_gpus_are_asked_for_in_one_dialect() -> None:
    gres, none = GpuRequest.GRES, GpuRequest.NONE
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {"gpus-per-node": "4"}),
        ({"gpu_type": "a100"}, {"gpus-per-node": "a100:4"}),
        ({"gpu_request": gres}, {"gres": "gpu:4"}),
        ({"gpu_request": gres, "gpu_type": "h100"}, {"gres": "gpu:h100:4"}),
        ({"gpu_request": none}, {}),  # the site adds them itself
    ]
    for asked, dialect in cases:
        found = lines(on_slurm(gpus_per_node=4, **asked))
        dialects = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
        assert {key: found[key] for key in dialects if key in found} == dialect


def test_srun_repeats_the_cpus_of_the_task() -> None:
    plan = on_slurm(cpus_per_task=16, nproc_per_node=4)
    assert lines(plan)["cpus-per-task"] == "16"
    assert "--cpus-per-task=16" in plan.srun_args
    assert plan.threads_per_process == 4
    plan = on_slurm(gpus_per_node=4, cpus_per_gpu=8)
    assert (lines(plan)["cpus-per-task"], plan.threads_per_process) == ("32", 8)
    assert "cpus-per-gpu" not in lines(plan)
    # Without a request, the site decides with GPUs; else each rank gets one.
    assert "cpus-per-task" not in lines(on_slurm(gpus_per_node=4))
    assert "cpus-per-task" not in lines(on_slurm(nproc_per_node=4, exclusive=True))
    assert lines(on_slurm(nproc_per_node=4))["cpus-per-task"] == "4"


def test_memory_is_asked_for_only_if_it_is_given() -> None:
    assert not [name for name in lines(on_slurm()) if name.startswith("mem")]
    assert lines(on_slurm(mem="0", exclusive=True))["mem"] == "0"
    assert lines(on_slurm(mem_per_gpu="1G")).get("mem-per-gpu") is None


def test_time_is_whole_minutes_and_requeue_is_explicit_either_way() -> None:
    plan = on_slurm(time_minutes=2160, time_min_minutes=60)
    assert (lines(plan)["time"], lines(plan)["time-min"], plan.time_minutes) == ("2160", "60", 2160)
    assert "requeue" in lines(plan)
    found = lines(on_slurm(requeue=False))
    assert ("no-requeue" in found, "requeue" in found) == (True, False)


def test_the_batch_shell_is_warned_in_time_even_where_a_person_has_the_run_go_on() -> None:
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({}, "B:USR2@120", 120),
        ({"time_minutes": 1}, "B:USR2@30", 30),
        ({"time_minutes": 20}, "B:USR2@120", 120),
        ({"time_minutes": 6000}, "B:USR2@300", 300),
        ({"signal": "USR2@90"}, "B:USR2@90", 90),
        ({"signal": "B:USR1"}, "B:USR1", 60),
        ({"signal": "R:SIGUSR2@90"}, "BR:SIGUSR2@90", 90),
        ({"signal": "b:10@90"}, "b:10@90", 90),
        ({"on_interrupt": OnInterrupt.STOP}, "B:USR2@120", 120),
        ({"requeue": False}, "B:USR2@120", 120),
    ]
    for asked, signal, warning_s in cases:
        plan = on_slurm(**asked)
        assert (lines(plan)["signal"], plan.warning_s) == (signal, warning_s), asked


def test_spare_nodes_are_asked_for_and_left_out_of_the_step() -> None:
    plan = on_slurm(nodes=4, spare_nodes=2)
    assert "no-kill" in lines(plan)
    assert lines(plan)["nodes"] == "6"
    assert "--nodes=4" in plan.srun_args
    assert plan.world_size == 4


def test_a_step_outlives_a_node_where_it_can_go_on() -> None:
    stop = {"max_restarts": 0, "on_interrupt": OnInterrupt.STOP}
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"nodes": 2}, True),
        ({"nodes": 1}, False),
        ({"nodes": 1, "spare_nodes": 1}, True),
        ({"nodes": 2, "max_restarts": 0}, True),
        ({"nodes": 2, **stop}, False),
    ]
    for asked, outlives in cases:
        plan = on_slurm(**asked)
        assert ("--no-kill" in plan.srun_args) is outlives
        assert ("--kill-on-bad-exit=1" in plan.srun_args) is not outlives


def test_one_task_a_node_and_all_end_together() -> None:
    words = "--nodes=3 --ntasks=3 --ntasks-per-node=1 --export=ALL --no-kill --wait=0 --unbuffered"
    assert on_slurm(nodes=3, gpus_per_node=8).srun_args == (*words.split(), "--input=none")


def test_sbatch_options_that_clusterrun_owns_are_refused_with_a_hint() -> None:
    args = (
        "--ntasks=4 -n4 --ntasks-per-node=8 --tasks-per-node=8 -N2 --nodes=2 --wrap=hostname "
        "--array=0-9 --arr=0-9 -a0-9 --output=x --outp=x -ox --error=x "
        "--export=NONE --wait -W --test-only --chdir=/tmp -D/tmp -Mtux --cpus-per-gpu=2 "
        "--no-requeue --open-mode=truncate --job-name=x --container-image=x.sqsh "
        "--no-container-mount-home -Jx --requeue --requeue=expedite --help -V"
    )
    assert unrefused("sbatch_args", args) == []
    with pytest.raises(UsageError) as refused:
        on_slurm(sbatch_args=("--requeue",))
    assert "would hold every job that fails" in refused.value.hints[0]
    assert "requeue_delay" in refused.value.hints[0]


def test_what_is_no_option_is_refused() -> None:
    for arg in ("100", "nice=100", "", "-", "--"):
        with pytest.raises(UsageError, match="is not an option of sbatch"):
            on_slurm(sbatch_args=(arg,))
    with pytest.raises(UsageError, match="--srun-arg 'image' is not an option of srun"):
        on_slurm(srun_args=("image",))


def test_any_other_option_is_taken_verbatim() -> None:
    of_sbatch = (
        "--nice=100 -k --hint=nomultithread --gres=nvme:1 --wckey=x --licenses=a:1 --verbose "
        "--wait-all-nodes=1 --use-min-nodes --tmp=10G --time=10 -pdebug"
    )
    taken = [on_slurm(sbatch_args=(arg,)).sbatch_args[-1] for arg in of_sbatch.split()]
    assert taken == of_sbatch.split()
    of_srun, ours = (
        "--container-image=nvcr.io#nvidia/pytorch:26.01-py3 --no-container-mount-home "
        "--container=/images/bundle --cpu-bind=none --mpi=none -v",
        on_slurm().srun_args,
    )
    for arg in of_srun.split():
        assert on_slurm(srun_args=(arg,)).srun_args == (*ours, arg)


def test_options_of_srun_that_make_the_step_are_refused_with_a_hint() -> None:
    args = (
        "-N2 --nodes=2 -n4 --ntasks=4 --ntasks-per-node=4 -c8 --exclude=n1 -wn1 "
        "--export=NONE --output=x --input=y --label -l --wait=5 -W5 --kill-on-bad-exit=0 -K0 "
        "--no-kill --overlap --pty --chdir=/tmp --het-group=0 --multi-prog -I60 --jobid=7"
    )
    assert unrefused("srun_args", args) == []


def unrefused(setting: str, args: str) -> list[str]:
    """Return the options that are not refused by their name and with a hint."""
    left = []
    for arg in args.split():
        try:
            on_slurm(**{setting: (arg,)})
        except UsageError as error:
            if arg in error.message and error.hints:
                continue
        left.append(arg)
    return left


def test_one_request_is_not_said_twice() -> None:
    for asked, arg in [
        ({"time_minutes": 5}, "--time=10"),
        ({"partition": "gpu"}, "-pdebug"),
        ({"mem": "1G"}, "--mem-per-cpu=1G"),
        ({"mem_per_cpu": "1G"}, "--mem=1G"),
        # sbatch takes beginnings of its options, too.
        ({"time_minutes": 5}, "--tim=10"),
        ({"partition": "gpu"}, "--part=debug"),
        ({"mem": "1G"}, "--mem-per-c=1G"),
        ({"time_min_minutes": 5}, "--time-m=10"),
    ]:
        with pytest.raises(UsageError, match="duplicates clusterrun's own"):
            on_slurm(sbatch_args=(arg,), **asked)  # type: ignore[arg-type]  # a table of kinds


def test_options_that_share_a_beginning_are_told_apart() -> None:
    assert lines(on_slurm(time_min_minutes=5, sbatch_args=("--time=10",)))["time-min"] == "5"
    args = ("--mem-bind=local", "--gres-flags=enforce-binding", "--gres=nvme:1")
    assert on_slurm(mem="1G", gpus_per_node=1, sbatch_args=args).sbatch_args == args


def test_contradictions_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cpus_per_task": 4, "cpus_per_gpu": 2, "gpus_per_node": 1}, "cannot be combined"),
        ({"gpu_type": "a100"}, "no GPUs are requested"),
        ({"requeue": False, "on_interrupt": OnInterrupt.REQUEUE}, "contradict each other"),
        *(
            ({"signal": signal}, f"slurm.signal {signal} is neither USR1 nor USR2")
            for signal in ("B:TERM@90", "INT", "B:URG@60", "USR2 90")
        ),
    ]
    for asked, message in wrong:
        with pytest.raises(UsageError, match=message):
            on_slurm(**asked)


def test_one_node_stages_only_if_asked() -> None:
    for nodes, asked, decided in [
        (2, Stage.OFF, Stage.OFF),
        (2, Stage.AUTO, Stage.AUTO),
        (1, Stage.AUTO, Stage.OFF),
        (1, Stage.TAR, Stage.TAR),
    ]:
        plan = on_slurm(nodes=nodes, stage=asked)
        assert plan.stage is decided
        stages = "stage.sh" in render_bundle(plan, resolved_yaml="").files["node.sh"]
        assert stages == (decided is not Stage.OFF)
        assert here(stage=asked).stage is Stage.OFF
        assert Plan.from_json(plan.to_json()).stage is decided
