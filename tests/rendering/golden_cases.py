"""The plans whose files are kept whole under golden/, and how to write them anew on purpose.

`python -m tests.rendering.golden_cases` writes; a test never does.
"""

from __future__ import annotations

from pathlib import Path

from clusterrun import __version__
from clusterrun.config.choices import Device, GpuRequest, MixedPrecision, Network, Strategy
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import Bundle, render_bundle
from tests.launch.samples import on_slurm, slurm_facts

GOLDEN = Path(__file__).parent / "golden"
RESOLVED = "# clusterrun 0\nslurm:\n  nodes: 2  # command line (-N)\n"


def two_nodes_of_gpus() -> Plan:
    """Plan what most people ask for."""
    return on_slurm(
        nodes=2,
        gpus_per_node=4,
        cpus_per_gpu=8,
        time_minutes=1440,
        partition="gpu",
        account="nlp",
        args=("--lr", "1e-4"),
    )


def everything_said() -> Plan:
    """Plan with setup lines, names to hand on, awkward texts, and a site's dialect."""
    return on_slurm(
        slurm_facts(workdir="/home/ada/my project", runs_dir="/scratch/ada's/runs"),
        name="run #1 of 100%",
        nodes=2,
        gpus_per_node=8,
        gpu_type="h100",
        gpu_request=GpuRequest.GRES,
        exclusive=True,
        strategy=Strategy.FSDP_HYBRID,
        mixed_precision=MixedPrecision.BF16,
        network=Network.INFINIBAND,
        comment="back\\slash",
        sbatch_args=("--nice=100", "--licenses=a b:1"),
        setup=("modules: cuda/12 nccl", "conda: it's mine", "source 'my env/bin/activate'"),
        env={"GREETING": "it's $HOME\n#PBS -N evil", "NCCL_DEBUG": "INFO"},
        pass_env=("HF_TOKEN",),
        args=("--prompt", "a\nb"),
        requeue=False,
    )


def own_json_on_cpus() -> Plan:
    """Plan a DeepSpeed JSON of the user's on CPUs."""
    text = '{\n  "zero_optimization": {"stage": 2},\n  "train_batch_size": "auto"\n}'
    return on_slurm(
        slurm_facts(deepspeed_config_text=text),
        deepspeed_config="ds.json",
        nodes=2,
        nproc_per_node=2,
        device=Device.CPU,
        timeout_s=1800,
    )


SCRIPTS = {
    "two_nodes_of_gpus": two_nodes_of_gpus,
    "everything_said": everything_said,
    "own_json_on_cpus": own_json_on_cpus,
}


def bundle_of(case: str) -> Bundle:
    """Render a case."""
    return render_bundle(SCRIPTS[case](), resolved_yaml=RESOLVED)


def configurations() -> dict[str, str]:
    """Render accelerate's configuration of every strategy, on GPUs and, where it can be, CPUs."""
    plans = {
        strategy.value: on_slurm(
            nodes=1 if strategy is Strategy.NONE else 2,
            gpus_per_node=1 if strategy is Strategy.NONE else 4,
            strategy=strategy,
            mixed_precision=MixedPrecision.BF16,
        )
        for strategy in Strategy
    }
    plans["ddp-on-cpus"] = on_slurm(nodes=2)
    plans["zero2-on-cpus"] = on_slurm(nodes=2, strategy=Strategy.ZERO2)
    plans["ddp-head-decides"] = on_slurm(nodes=2, gpus_per_node=1)
    return {
        name: render_bundle(plan, resolved_yaml="").files["accelerate.yaml"]
        for name, plan in plans.items()
    }


def versionless(text: str) -> str:
    """Take the version out, so that a release changes no golden file."""
    return text.replace(f"clusterrun {__version__}", "clusterrun VERSION")


def golden_files() -> dict[Path, str]:
    """Name every golden file and its text as rendered now: one script whole, parts of others."""
    whole = "two_nodes_of_gpus"
    scripts = {GOLDEN / f"{whole}.sbatch": bundle_of(whole).script}
    for case in SCRIPTS.keys() - {whole}:
        scripts[GOLDEN / f"{case}.directives"] = bundle_of(case).script.partition("\n\n")[0] + "\n"
        scripts[GOLDEN / f"{case}.env.sh"] = bundle_of(case).files["env.sh"]
    yamls = {GOLDEN / "accelerate" / f"{name}.yaml": t for name, t in configurations().items()}
    return {path: versionless(text) for path, text in {**scripts, **yamls}.items()}


if __name__ == "__main__":
    for path, text in golden_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
