"""Count a model that our table lacks, with the transformers of the job's Python."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clusterrun.backends import interpreters
from clusterrun.backends.machine_facts import interpreter_of
from clusterrun.config.settings import Resolved
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.estimates.inputs import Model
from clusterrun.shared import shell
from clusterrun.shared.files import parse_object, read_json, write_whole
from clusterrun.shared.typed import decoded

DEADLINE_S: Final = 120.0
ANSWER_BYTES: Final = 1 << 16
BY_HAND: Final = (
    "pass --params, and --hidden --layers --heads --kv-heads --ffn --vocab if you know them"
)
SIZE_ALONE: Final = "pass only --params and --active-params: the other options describe no experts"
# Nothing is downloaded, and no GPU is touched.
ENVIRONMENT: Final = {
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "USE_TF": "0", "USE_FLAX": "0"},
}


def counted(
    values: Mapping[str, Any], name: str, resolved: Resolved, *, may_count: bool = True
) -> Model:
    """Count the model of a config.json, as transformers would build it; the answer is cached.

    Without `may_count`, only a cached answer is returned.

    Raises UsageError if the job's Python has no transformers, or transformers can't build it.
    """
    python, config = _python(resolved), json.dumps(values, sort_keys=True)
    program = Path(__file__).with_name("count.py").read_text(encoding="utf-8")
    file = interpreters.cache_file("models", [program, python, config], os.environ)
    known = read_json(file)
    if known is None and not may_count:
        hint = "run clusterrun plan, which counts them"
        raise UsageError(f"the parameters of '{name}' were not counted yet", hint=hint)
    answer = known or _answer([python, "-c", program], config)
    if "missing" in answer:
        raise UsageError(
            f"counting '{name}' needs torch and transformers in the job's Python, {python}",
            cause=str(answer["missing"]),
            hint=(BY_HAND, "or pass --python with an interpreter that has them"),
        )
    try:
        model: Model = decoded(Model, {**answer, "name": name})
    except ValueError as error:
        hint = SIZE_ALONE if "experts" in config else BY_HAND
        cause = " ".join(str(answer.get("wrong", error)).split())
        raise UsageError(
            f"transformers can't build the model of '{name}'", cause=cause[:300], hint=hint
        ) from error
    if known is None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(file, json.dumps(answer))
    return model


def _python(resolved: Resolved) -> str:
    """Return the job's interpreter if it is here and the user chose it; else our own."""
    spec, home, found = resolved.spec, os.environ.get("HOME", ""), ""
    if interpreters.may_run(resolved):
        named = interpreter_of(spec, resolved.cwd, home=home)
        found = interpreters.path_of(named, spec, os.environ)
    return found or sys.executable


def _answer(argv: list[str], config: str) -> dict[str, Any]:
    """Run the program in /, where it cannot import a json.py of the project."""
    try:
        environ = {**os.environ, **ENVIRONMENT}
        done = shell.run_once(argv, DEADLINE_S, environ, config, Path("/"), most=ANSWER_BYTES)
    except ClusterrunError as error:
        return {"wrong": error.cause}
    if done.rc == shell.TIMED_OUT:
        return {"wrong": f"no answer within {DEADLINE_S:.0f} s"}
    last = (done.stdout.splitlines() or [""])[-1]
    said = done.stderr.strip().rpartition("\n")[2] or "no numbers were printed"
    return parse_object(last) or {"wrong": said}
