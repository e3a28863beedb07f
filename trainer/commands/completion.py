"""`logitmix --completion bash|zsh`: a script with which the shell completes commands, recipes, datasets and flags."""

import importlib
from collections.abc import Mapping, Sequence

from logitmix.common.plugins import TRUST
from logitmix.trainer.commands.recipe_help import ALL, sections_of
from logitmix.trainer.commands.words import flags_of
from logitmix.trainer.config import Config, recipe_names
from logitmix.trainer.prepare.registry import SOURCES

# `values`: what the word before may be followed by; where there is nothing to choose from, files are completed.
BASH = """\
_logitmix() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
  local flags="" values=""
  case $command in
{flags}
  esac
  case "$COMP_CWORD $command $before" in
    "1 "*) values="{first}" ;;
{values}
  esac
  [[ $word == -* && $COMP_CWORD -gt 1 ]] && values=$flags
  COMPREPLY=($(compgen -W "$values" -- "$word"))
}}
complete -o default -F _logitmix logitmix
"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def completion(shell: str, commands: Sequence[str], others: Sequence[str]) -> str:
    """The script for a shell, bash or zsh, with the `others` beside the commands. ValueError for another shell."""
    if shell not in ("bash", "zsh"):
        raise ValueError(f"--completion is {shell or 'empty'}; it must be bash or zsh: logitmix --completion bash")
    recipes, sections = recipe_names(), (*sections_of(Config()), ALL)
    named: Mapping[str, Sequence[str]] = {"train": recipes, "plan": recipes, "prepare": list(SOURCES)}
    flags, values = [], []
    for command in commands:
        known = flags_of(importlib.import_module(f"logitmix.trainer.commands.{command.replace('-', '_')}").Arguments)
        known |= {"--import": (), TRUST: (), "--help": sections if command in ("train", "plan") else ()}
        flags.append(f'    {command}) flags="{" ".join(known)}" ;;')
        values += [f'    *" {command} {flag}") values="{" ".join(of)}" ;;' for flag, of in known.items() if of]
        if command in named:
            values.append(f'    "2 {command} "*) values="{" ".join(named[command])}" ;;')
    script = BASH.format(flags="\n".join(flags), values="\n".join(values), first=" ".join([*commands, *others]))
    return script if shell == "bash" else ZSH + script
