"""Hydra's launcher `clusterrun`. Hydra imports it at every start: clusterrun is imported later."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from omegaconf import BooleanNode, OmegaConf, open_dict

_target = {"_target_": f"{__name__}.ClusterrunLauncher"}
options = OmegaConf.create({**_target, "wait": BooleanNode(False), "settings": {}})
OmegaConf.set_struct(options.settings, False)  # a command line adds keys without a `+`
ConfigStore.instance().store("clusterrun", options, group="hydra/launcher")


class ClusterrunLauncher(Launcher):  # type: ignore[misc]  # Hydra is not followed
    """Submits one run for each combination of overrides."""

    def __init__(self, **options: Any) -> None: ...

    def setup(self, *, hydra_context: Any, config: Any, **_: Any) -> None:
        """Keep what `launch` needs."""
        self._loader, self._config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Any], initial_job_idx: int) -> list[JobReturn]:
        """Check all runs, then submit them. Raises what Hydra prints without a traceback."""
        from clusterrun.errors import ClusterrunError, describe
        from clusterrun.verbs import job, render, submit

        log, jobs = logging.getLogger(__name__), list[job.Job]()
        try:
            numbered = enumerate(job_overrides, initial_job_idx)
            prepared = [render.prepare(self._load(*each)) for each in numbered]
            for note in dict.fromkeys(note for each in prepared for note in each.notes):
                log.warning("note: %s", note)
            for each in prepared:
                jobs.append(job.Job(submit.submit_prepared(each, argv=sys.argv)))
                log.info("Submitted job %s, %s", jobs[-1].job_id, each.plan.name)
            wait = self._config.hydra.launcher.wait
            return [_returned(*each, wait) for each in zip(job_overrides, jobs, strict=True)]
        except ClusterrunError as error:
            ids = " ".join(each.job_id for each in jobs)
            known = [f"end the jobs that are submitted: clusterrun cancel {ids}"] if ids else []
            text = "\nhint: ".join((describe(error), *error.hints, *known))
            raise CompactHydraException(text) from error

    def _load(self, number: int, overrides: Sequence[str]) -> Any:
        """Return the settings of a combination, whose ranks all write to one directory."""
        from clusterrun.verbs.render import load_spec

        config = self._loader.load_sweep_config(self._config, [*overrides])
        with open_dict(config):
            config.hydra.job.num = config.hydra.job.id = number
        HydraConfig.instance().set_config(config)  # for ${hydra:...}
        job, sweep = config.hydra.job, config.hydra.sweep
        own = {"mode": "RUN", "job.num": number, "job.id": number, "sweep.dir": sweep.dir}
        own |= {"sweep.subdir": sweep.subdir, "run.dir": f"{sweep.dir}/{sweep.subdir}"}
        texts = {key: QuotedString(str(x), Quote.single).with_quotes() for key, x in own.items()}
        typed, _ = get_args_parser().parse_known_args()
        places = {name: getattr(typed, f"config_{name}") for name in ("path", "name", "dir")}
        args = [f"--config-{name}={value}" for name, value in places.items() if value]
        args += [*config.hydra.overrides.hydra, *(f"hydra.{x}={y}" for x, y in texts.items())]
        args += [f"+hydra.callbacks.clusterrun._target_={__name__}.ReportReturn", *overrides]
        spec = sys.modules["__main__"].__spec__  # None: a script
        main = {"module": spec.name.removesuffix(".__main__")} if spec else {"script": sys.argv[0]}
        flags = {"args": args, "name": f"{job.name}-{number}", "pass_env": [*job.env_copy] or None}
        settings = OmegaConf.to_container(config.hydra.launcher.settings, resolve=True)
        # FULL_ERROR: a rank raises its error, which clusterrun then reports.
        return load_spec(main | flags, overrides=["env.HYDRA_FULL_ERROR=1", *_texts(settings)])


class ReportReturn(Callback):  # type: ignore[misc]  # Hydra is not followed
    """Reports the number that the function of rank 0 returned, for a launcher that waits."""

    def on_job_end(self, *, job_return: Any, **_: Any) -> None:
        """Write an event."""
        from clusterrun.rank.emit import emit, number, rank

        if rank() == 0:
            emit("hydra_returned", value=number(job_return._return_value))


def _returned(overrides: Any, job: Any, wait: bool) -> JobReturn:
    """Return what Hydra's sweeper gets: the job, or if it waits, rank 0's number or an error."""
    value, status = job, JobStatus.COMPLETED
    if wait and (error := job.exception()):
        value, status = CompactHydraException(f"{error}\nhint: {error.hint}"), JobStatus.FAILED
    elif wait:
        files = job.record.paths.events_dir.glob("*.jsonl")
        lines = [line for path in files for line in path.open() if '"hydra_returned"' in line]
        events = sorted(map(json.loads, lines), key=lambda event: event["ts"])
        value = events[-1]["value"] if events else None
    return JobReturn(overrides, status=status, _return_value=value)


def _texts(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield each setting as --set takes it."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}"
