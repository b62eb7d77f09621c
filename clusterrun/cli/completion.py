"""`completion`: print the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from clusterrun.cli.shared import complete, output


@click.command()
@click.argument("shell", type=click.Choice(complete.SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a completion script for a shell.

    To install it, add one line to the shell's startup file and open a new shell:

    \b
    bash  ~/.bashrc                    eval "$(clusterrun completion bash)"
    zsh   ~/.zshrc, after compinit     eval "$(clusterrun completion zsh)"
    fish  ~/.config/fish/config.fish   clusterrun completion fish | source

    TAB then completes commands, options, jobs, profiles, configuration keys, GPUs and models.
    Completion reads files only and never asks Slurm.
    """
    found = get_completion_class(shell)
    assert found is not None  # every choice has one
    shell_script = found(ctx.find_root().command, {}, "clusterrun", "_CLUSTERRUN_COMPLETE").source()
    output.answer(shell_script, wraps=False)
