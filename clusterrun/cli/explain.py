"""`explain`: print the page of what diagnose, doctor, the preflight or check names."""

from __future__ import annotations

import click

from clusterrun.cli.shared.explanations import explain


@click.command()
@click.argument("name", metavar="ID")
def command(name: str) -> None:
    """Explain a cause, a check or a rule.

    ID is what diagnose, doctor, the preflight or check printed. 'all', or a beginning such as gpu,
    lists ids.

    \b
    clusterrun explain cuda_oom
    clusterrun explain node.shm
    clusterrun explain gpu
    """
    explain(name)
