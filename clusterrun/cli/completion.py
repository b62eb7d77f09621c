"""`completion`: print the script that teaches a shell to complete clusterrun's command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from clusterrun.cli.shared import output


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print completion for a shell.

    \b
    bash:  eval "$(clusterrun completion bash)"              in ~/.bashrc
    zsh:   eval "$(clusterrun completion zsh)"               in ~/.zshrc
    fish:  clusterrun completion fish | source               in config.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None  # click knows each of the choices
    script = complete(ctx.find_root().command, {}, "clusterrun", "_CLUSTERRUN_COMPLETE")
    output.answer(script.source())
