"""Prints a script that completes commands, flags, configs and keys in a shell.

  eval "$(asgd completion bash)"     in ~/.bashrc
  eval "$(asgd completion zsh)"      in ~/.zshrc, after compinit
"""

from pathlib import Path

from . import command_line
from .command_flags import COMMANDS

# The functions of the shells: @COMMANDS@ and @CASES@ are replaced by `script`.
SHELLS = "bash", "zsh"
_BASH = """_asgd() {
  local line=${COMP_LINE:0:COMP_POINT} command=${COMP_WORDS[1]} word choices
  word=${line##* }
  choices="@COMMANDS@ --help --list --version"
  if ((COMP_CWORD > 1)); then
    case $command in
@CASES@
      *) choices= ;;
    esac
  fi
  COMPREPLY=()
  local each
  for each in $choices; do
    # bash replaces the part of a word after its last "=" only.
    [[ $each == "$word"* ]] && COMPREPLY+=("${each#"${word%"${word##*=}"}"}")
  done
  if [[ ${COMPREPLY[0]} == *= || ${COMPREPLY[0]} == *. ]]; then
    compopt -o nospace 2>/dev/null
  fi
  ((${#COMPREPLY[@]})) || compopt -o default 2>/dev/null
}
"""
_REGISTER_IN_BASH = "complete -F _asgd asgd\n"
_ZSH = """_asgd() {
  local -a choices
  choices=(@COMMANDS@ --help --list --version)
  if ((CURRENT > 2)); then
    case ${words[2]} in
@CASES@
      *) choices=() ;;
    esac
    compadd -S '' -- $choices || _files
    return
  fi
  compadd -- $choices
}
compdef _asgd asgd
"""


def _configs_folder() -> Path:
  """Returns the folder of the shipped configs, beside that of the commands."""
  return Path(__file__).parents[1] / "configs"  # also of an installed asgd


def _choices(name: str) -> list[str]:
  """Returns the words that may follow a command."""
  command = COMMANDS[name]
  words = [
    # A flag with a value ends in "=", after which no space is added.
    f"--{flag}" + ("" if kind in (bool, "optional") else "=")
    for flag, (kind, _, _) in command.flags.items()
  ]
  for flag, (kind, _, _) in command.flags.items():
    if isinstance(kind, tuple):  # names of an enum
      words += [f"--{flag}={value}" for value in kind]
  if command.config:
    names = sorted(path.stem for path in _configs_folder().glob("*.py"))
    words += [*names, *(f"--config={config}" for config in names)]
    words += [f"--config.{key}=" for key in command_line.catalogue()["keys"]]
  if name == "completion":
    words += SHELLS
  return [*words, "--help"]


def script(shell: str) -> str:
  """Returns the script of a shell, "bash" or "zsh"."""
  # One case of the shell's `case` for each command.
  case_template = '      {}) choices="{}" ;;' if shell == "bash" else (
    "      {}) choices=({}) ;;"
  )
  cases = "\n".join(
    case_template.format(name, " ".join(_choices(name))) for name in COMMANDS
  )
  text = _BASH + _REGISTER_IN_BASH if shell == "bash" else _ZSH
  return text.replace("@COMMANDS@", " ".join(COMMANDS)).replace(
    "@CASES@", cases
  )


def main(*words: str) -> None:
  """Prints the script of the named shell."""
  if len(words) != 1 or words[0] not in SHELLS:
    words_text = " ".join(words) or "nothing"
    command_line.fail(f"asgd completion takes bash or zsh, not {words_text}")
  print(script(words[0]), end="")


if __name__ == "__main__":
  command_line.run(main, "completion")
