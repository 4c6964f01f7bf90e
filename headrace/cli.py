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
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn, TypeAlias

from headrace import exits
from headrace.console import Failure, say

DESCRIPTION = "A resolver and reverse proxy on your workstation that make LLM services answer sooner."
EPILOG = """\
headrace COMMAND --help says more of one.
exit codes: 0 ok, 1 problem found, 2 usage or configuration, 3 not running, 4 needs privilege, 130 interrupted
Without --config: $HEADRACE_CONFIG, $XDG_CONFIG_HOME/headrace/headrace.toml, /etc/headrace/headrace.toml, else defaults.
"""


class _Parser(argparse.ArgumentParser):
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
    parser = _build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
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


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="headrace",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", dest="show_version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_program(commands)
    _add_looking(commands)
    _add_changing(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _add_program(commands: _Commands) -> None:
    _command(commands, "run", "serve until SIGTERM; SIGHUP loads the configuration again")
    check = _command(commands, "check", "find every problem of a configuration, offline", config=False, json=True)
    check.add_argument("file", nargs="?", help="the file; without it, the one that `run` would load")
    config = _command(commands, "config", "show the effective configuration", config=False)
    actions = config.add_subparsers(dest="action", required=True, metavar="show", parser_class=_Parser)
    show = actions.add_parser("show", help="every effective value as TOML, secrets hidden")
    show.add_argument("--origin", action="store_true", help="add where each value came from")
    _add_common(show, config=True, json=True)
    demo = _command(commands, "demo", "show what headrace does, on this machine alone", config=False, json=True)
    demo.add_argument("--keep", action="store_true", help="leave it running and print lines to try")
    _command(commands, "version", "print the version", config=False, json=True)


def _add_looking(commands: _Commands) -> None:
    for name, text in (
        ("query", "resolve a name as headrace does: answer, source, TTL, time"),
        ("trace", "follow a name from the root servers down, hop by hop"),
    ):
        lookup = _command(commands, name, text, json=True)
        lookup.add_argument("name", help="the domain name")
        lookup.add_argument("type", nargs="?", default="A", help="the record type (default: A)")
        if name == "query":
            lookup.add_argument("--explain", action="store_true", help="say what each step of the way decided")
        else:
            lookup.add_argument("--root", metavar="ADDRESS", help="begin at this server instead of the root servers")
            lookup.add_argument("--port", type=int, default=53, help="the port of all servers on the way (default: 53)")
    cache = _command(commands, "cache", "show what the DNS cache is good for and holds, or make it forget", json=True)
    cache.add_argument("action", nargs="?", choices=("stats", "dump", "flush"), default="stats")
    cache.add_argument("name", nargs="?", help="dump, flush: this name and all below it")
    cache.add_argument("--all", action="store_true", help="flush: everything")
    cache.add_argument("--limit", type=int, default=1000, metavar="N", help="dump: at most N entries (default: 1000)")
    _command(
        commands, "status", "show what runs, where it listens, who can be reached and what goes through", json=True
    )
    edges = _command(commands, "edges", "show each edge: protocol, RTT, load, weight, state and why", json=True)
    edges.add_argument(
        "--watch", nargs="?", const=2.0, type=_seconds, metavar="SECONDS", help="show it again every 2 (or SECONDS) s"
    )
    requests = _command(commands, "requests", "show the last requests and where their time went", json=True)
    requests.add_argument("-n", "--last", type=int, default=20, metavar="N", help="how many (default: 20)")
    env = _command(commands, "env", "print the variables that point SDKs and tools here")
    env.add_argument("shell", nargs="?", choices=("bash", "fish", "dotenv"), help="the form (default: by $SHELL)")
    env.add_argument("--undo", action="store_true", help="take back what an earlier `headrace env` set in this shell")


def _add_changing(commands: _Commands) -> None:
    tickets = _command(commands, "tickets", "show the TLS ticket keys, or rotate them", json=True)
    tickets.add_argument("action", nargs="?", choices=("show", "rotate"), default="show")
    _command(commands, "reload", "load the configuration again without breaking a stream", json=True)


def _command(commands: _Commands, name: str, text: str, *, config: bool = True, json: bool = False) -> _Parser:
    parser: _Parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    _add_common(parser, config=config, json=json)
    return parser


def _add_common(parser: argparse.ArgumentParser, *, config: bool, json: bool) -> None:
    if config:
        parser.add_argument("--config", metavar="FILE", help="the configuration file")
    if json:
        parser.add_argument("--json", action="store_true", help="machine-readable, with a version field")


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
