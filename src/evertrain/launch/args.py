"""The command line of `evertrain launch`: from flags, variables and a file to one `LaunchConfig`.

A value is taken from the first place that has it: flag, environment variable, configuration file, default; where it
came from is kept, so that `--print-config` can say it. Everything that can be wrong is found here, before any process
is started.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from evertrain.launch import options
from evertrain.launch.config import ConfigError, LaunchConfig, build
from evertrain.launch.options import BY_NAME, OPTIONS, Option

_DESCRIPTION = """\
Start a training script on all processes of this machine and keep it running through faults.

Takes torchrun's command line. A rank that dies, freezes or hangs is replaced by a warm spare and the step is done
again with the state of its peers; a rank that raises is retried in place; nothing else is restarted.
"""

_EPILOG = """\
examples:
  four ranks, as with torchrun
      evertrain launch --nproc-per-node 4 train.py --lr 0.1
  see a recovery: kill rank 1 in step 12, then read what happened
      evertrain launch --nproc-per-node 4 --ft-fault kill@step=12,rank=1 --ft-events run.jsonl train.py
      evertrain timeline run.jsonl
  a stricter detection bound, checkpoints for the day when nothing else helps
      evertrain launch --nproc-per-node 4 --ft-bound 1 --ft-checkpoint-dir ckpt train.py
  what would be used, and where each value came from
      evertrain launch --ft-config site.yaml --print-config

every torchrun option can be set by a variable PET_NAME, every --ft- option by EVERTRAIN_NAME, and any of them in the
file of --ft-config; a flag wins over a variable, a variable over the file.

exit codes: 0 success, 1 the script failed, 2 wrong usage, 3 gave up after --max-restarts, 143 and 130 ended by SIGTERM
and SIGINT, 70 internal error.
"""


class _ScriptMissing(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message == "the following arguments are required: training_script, ...":
            raise _ScriptMissing
        if message.startswith("unrecognized arguments:"):
            message += _meant(message.split()[2:])
        super().error(message)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for; two spellings of one option are no ambiguity."""
        found: dict[int, Any] = {}
        for candidate in super()._get_option_tuples(option_string):
            found.setdefault(id(candidate[0]), candidate)
        return list(found.values())


def _meant(unknown: Sequence[str]) -> str:
    spellings = [spelling for option in OPTIONS for spelling in option.spellings()]
    for text in unknown:
        if text.startswith("--") and (close := difflib.get_close_matches(text.partition("=")[0], spellings, 1)):
            return f"; did you mean {close[0]}?"
    return ""


def misplaced(script_args: Sequence[str]) -> list[str]:
    """Options of the launcher that stand behind the script, and so are the script's."""
    ours = {spelling for option in OPTIONS for spelling in option.spellings() if spelling.startswith("--")}
    names = [text.partition("=")[0] for text in script_args]
    return [name for name in names if name in ours or name.startswith("--ft-")]


def make_parser(prog: str = "evertrain launch", with_script: bool = True) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [options] [-m] script [script arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        # Values stay text until all sources are known: the same conversion and the same errors for each of them.
        extra: dict[str, Any] = {"action": "store_true"}
        if not option.switch:
            extra = {"action": "append" if option.repeatable else "store", "metavar": option.metavar}
            if option.choices:
                extra = {"action": "store", "choices": option.choices}
        groups[option.group].add_argument(*option.spellings(), dest=option.name, help=option.help, **extra)
    groups[options.RECOVERY].add_argument(
        "--print-config",
        action="store_true",
        help="print every value and where it came from, derived timeouts included, and exit",
    )
    if with_script:
        parser.add_argument("training_script", help="the script, module (-m) or program (--no-python) to run")
        parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def parse(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, prog: str = "evertrain launch"
) -> LaunchConfig:
    """Read the command line. Exits with status 2 and a message, as argparse does, if anything is wrong."""
    environ = os.environ if environ is None else environ
    parser = make_parser(prog)
    try:
        namespace = parser.parse_args(argv)
    except _ScriptMissing:
        if "--print-config" not in argv:
            argparse.ArgumentParser.error(parser, "the script to run is missing")
        namespace = make_parser(prog, with_script=False).parse_args(argv)
    given = vars(namespace)
    try:
        values, sources = resolve(given, environ)
        return build(
            values,
            sources,
            script=given.get("training_script", ""),
            script_args=list(given.get("training_script_args", [])),
            print_config=given.get("print_config", False),
            environ=environ,
        )
    except ConfigError as error:
        parser.error(str(error))


def resolve(given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge flags, variables, file and defaults into values and their sources."""
    config = BY_NAME["config"]
    path = given.get("config") or environ.get(config.variable())
    file = _read_file(path) if path else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        value, source = _pick(option, given, environ, file, path or "")
        problem = option.check(value) if value is not None else None
        if problem:
            raise ConfigError(f"{source}: {problem}")
        values[option.name], sources[option.name] = value, source
    return values, sources


def _pick(
    option: Option, given: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any], path: str
) -> tuple[Any, str]:
    if option.name in given:
        flag = next(spelling for spelling in option.spellings() if spelling.startswith("--"))
        return _from_flag(option, given[option.name], flag), flag
    variable = option.variable()
    # torchrun takes an empty variable as given, for us it is one that somebody wanted to unset.
    if environ.get(variable):
        return _from_text(option, environ[variable], variable), variable
    if option.name in file:
        where = f"{path}: {option.name}"
        return _from_file(option, file[option.name], where), where
    return option.default if not option.switch else False, "default"


def _from_flag(option: Option, value: Any, flag: str) -> Any:
    if option.switch or not option.repeatable:
        return value if option.switch else _from_text(option, value, flag)
    parts = [_from_text(option, text, flag) for text in value]
    if parts and isinstance(parts[0], dict):
        return {name: seconds for part in parts for name, seconds in part.items()}
    return [item for part in parts for item in part]


def _from_text(option: Option, text: str, where: str) -> Any:
    if option.switch:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{where}: expected 1 or 0, got {text!r}")
    if option.choices and text not in option.choices:
        raise ConfigError(f"{where}: expected one of {', '.join(option.choices)}, got {text!r}")
    try:
        return option.convert(text)
    except (TypeError, ValueError) as error:
        reason = str(error) if "expected" in str(error) else f"{text!r} is not a valid {option.metavar or option.name}"
        raise ConfigError(f"{where}: {reason}") from None


def _from_file(option: Option, value: Any, where: str) -> Any:
    """A YAML value: already typed, so it is checked against the default's type; text is read like a flag's."""
    if isinstance(value, bool) and option.switch:
        return value
    if isinstance(value, list) and (option.repeatable or isinstance(option.default, list)):
        return [str(item) for item in value] if not isinstance(option.default, dict) else _bad(where, value)
    if isinstance(value, dict) and isinstance(option.default, dict):
        seconds = BY_NAME["bound"]
        return {str(name).replace("-", "_"): _from_text(seconds, str(part), where) for name, part in value.items()}
    if value is None or isinstance(value, bool | list | dict):
        return _bad(where, value)
    return _from_text(option, str(value), where)


def _bad(where: str, value: Any) -> NoReturn:
    raise ConfigError(f"{where}: {value!r} is not what is expected here")


def _read_file(path: str) -> dict[str, Any]:
    # Costs 10 ms; most runs have no such file.
    import yaml

    try:
        with open(path, encoding="utf-8") as stream:
            content = yaml.safe_load(stream)
    except OSError as error:
        raise ConfigError(f"--ft-config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ft-config: {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--ft-config: {path} must be a mapping of option names to values")
    known = {option.name for option in OPTIONS if option.file}
    cleaned: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"--ft-config: unknown key {key!r} in {path}; known keys are {', '.join(sorted(known))}")
        cleaned[name] = value
    return cleaned
