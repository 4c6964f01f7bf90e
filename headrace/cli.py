"""The command line: which words there are, and which module answers each.

Theory: the parser knows every argument, the commands know what to do. A command's module is imported only when it is the
one that was asked for, so `headrace version` never loads a resolver. Data goes to stdout, talk to stderr.
Rules for editing: 1. a command is a function here and a module in `headrace/commands/` with `run(args) -> int`;
2. exit codes come from `headrace/exits.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from headrace import exits
from headrace.console import Failure, say

DESCRIPTION = "A resolver and reverse proxy on your workstation that make LLM services answer sooner."
EPILOG = """\
headrace COMMAND --help says more of one.
exit codes: 0 ok, 1 problem found, 2 usage or configuration, 3 not running, 4 needs privilege, 130 interrupted
Without --config: $HEADRACE_CONFIG, $XDG_CONFIG_HOME/headrace/headrace.toml, /etc/headrace/headrace.toml, else defaults.
"""


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {_with_offer(message)}\nTry: {self.prog} --help")
        sys.exit(exits.USAGE)


_INVALID_CHOICE = re.compile(r"argument \S+: invalid choice: '(.*)' \(choose from (.*)\)")


def _with_offer(message: str) -> str:
    """What argparse says, with the nearest word in place of a list that is quoted differently by each Python."""
    found = _INVALID_CHOICE.fullmatch(message)
    if found is None:
        return message
    from config.reading import did_you_mean

    known = re.findall(r"[\w-]+", found[2])
    near = did_you_mean(found[1], known)
    return f'no "{found[1]}" here; ' + (f"did you mean {near}?" if near else f"known: {', '.join(known)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    parser = _build_parser(words[0] if words else "")
    args = parser.parse_args(words)
    if args.show_version:
        args.command, args.json = "version", False
    if not args.command:
        parser.print_help(sys.stderr)
        return exits.USAGE
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = _module_of(args.command).run(args)
        sys.stdout.flush()
    except Failure as exc:
        say(f"headrace: {exc}")
        return exc.code
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.OK
    return code


def _module_of(command: str) -> ModuleType:
    """The command's module. No garbage is looked for meanwhile: imports leave next to none, and looking took 8 % of them."""
    gc.disable()
    try:
        return import_module(f"headrace.commands.{command}")
    finally:
        gc.enable()


def _build_parser(word: str) -> ArgumentParser:
    """One that knows the command `word`; all of them when there is no such one, for the help and the nearest word.

    A command's parser takes half a millisecond, and `run` waits for none but its own.
    """
    parser = ArgumentParser(
        prog="headrace",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", dest="show_version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=ArgumentParser)
    for name in [word] if word in COMMANDS else COMMANDS:
        text, add = COMMANDS[name]
        add(commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + "."))
    return parser


def _run_arguments(parser: ArgumentParser) -> None:
    _add_common(parser, config=True)


def _check_arguments(parser: ArgumentParser) -> None:
    _add_common(parser, json=True)
    parser.add_argument("file", nargs="?", help="the file; without it, the one that `run` would load")


def _config_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="show", parser_class=ArgumentParser)
    show = actions.add_parser("show", help="every effective value as TOML, secrets hidden")
    show.add_argument("--origin", action="store_true", help="add where each value came from")
    _add_common(show, config=True, json=True)


def _demo_arguments(parser: ArgumentParser) -> None:
    _add_common(parser, json=True)
    parser.add_argument("--keep", action="store_true", help="leave it running and print lines to try")


def _version_arguments(parser: ArgumentParser) -> None:
    _add_common(parser, json=True)


def _query_arguments(parser: ArgumentParser) -> None:
    _lookup_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="say what each step of the way decided")


def _trace_arguments(parser: ArgumentParser) -> None:
    _lookup_arguments(parser)
    parser.add_argument("--root", metavar="ADDRESS", help="begin at this server instead of the root servers")
    parser.add_argument("--port", type=int, default=53, help="the port of all servers on the way (default: 53)")


def _lookup_arguments(parser: ArgumentParser) -> None:
    _asking_arguments(parser)
    parser.add_argument("name", help="the domain name")
    parser.add_argument("type", nargs="?", default="A", help="the record type (default: A)")


def _cache_arguments(parser: ArgumentParser) -> None:
    _asking_arguments(parser)
    parser.add_argument("action", nargs="?", choices=("stats", "dump", "flush"), default="stats")
    parser.add_argument("name", nargs="?", help="dump, flush: this name and all below it")
    parser.add_argument("--all", action="store_true", help="flush: everything")
    parser.add_argument("--limit", type=int, default=1000, metavar="N", help="dump: at most N entries (default: 1000)")


def _edges_arguments(parser: ArgumentParser) -> None:
    _asking_arguments(parser)
    parser.add_argument(
        "--watch", nargs="?", const=2.0, type=_seconds, metavar="SECONDS", help="show it again every 2 (or SECONDS) s"
    )


def _requests_arguments(parser: ArgumentParser) -> None:
    _asking_arguments(parser)
    parser.add_argument("-n", "--last", type=int, default=20, metavar="N", help="how many (default: 20)")


def _env_arguments(parser: ArgumentParser) -> None:
    _add_common(parser, config=True)
    parser.add_argument("shell", nargs="?", choices=("bash", "fish", "dotenv"), help="the form (default: by $SHELL)")
    parser.add_argument(
        "--undo", action="store_true", help="take back what an earlier `headrace env` set in this shell"
    )


def _tickets_arguments(parser: ArgumentParser) -> None:
    _asking_arguments(parser)
    parser.add_argument("action", nargs="?", choices=("show", "rotate"), default="show")


def _asking_arguments(parser: ArgumentParser) -> None:
    _add_common(parser, config=True, json=True)


def _add_common(parser: ArgumentParser, *, config: bool = False, json: bool = False) -> None:
    if config:
        parser.add_argument("--config", metavar="FILE", help="the configuration file")
    if json:
        parser.add_argument("--json", action="store_true", help="machine-readable, with a version field")


COMMANDS: dict[str, tuple[str, Callable[[ArgumentParser], None]]] = {
    "run": ("serve until SIGTERM; SIGHUP loads the configuration again", _run_arguments),
    "check": ("find every problem of a configuration, offline", _check_arguments),
    "config": ("show the effective configuration", _config_arguments),
    "demo": ("show what headrace does, on this machine alone", _demo_arguments),
    "version": ("print the version", _version_arguments),
    "query": ("resolve a name as headrace does: answer, source, TTL, time", _query_arguments),
    "trace": ("follow a name from the root servers down, hop by hop", _trace_arguments),
    "cache": ("show what the DNS cache is good for and holds, or make it forget", _cache_arguments),
    "status": ("show what runs, where it listens, who can be reached and what goes through", _asking_arguments),
    "edges": ("show each edge: protocol, RTT, load, weight, state and why", _edges_arguments),
    "requests": ("show the last requests and where their time went", _requests_arguments),
    "env": ("print the variables that point SDKs and tools here", _env_arguments),
    "tickets": ("show the TLS ticket keys, or rotate them", _tickets_arguments),
    "reload": ("load the configuration again without breaking a stream", _asking_arguments),
}
"""Each command: what it does, and who adds its arguments."""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
