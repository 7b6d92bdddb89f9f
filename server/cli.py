"""The command line: `dataserve VERB ...`, or `python -m dataserve.server.cli VERB ...`.

A verb is a row of the table in one of the command_*.py modules; nothing heavy is imported before it runs. A user's mistake is
a sentence or two on stderr, never a traceback. Exit status: 0 ok, 1 failed, 2 usage, 3 no daemon, 4 bad samples.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

try:
    from dataserve.protocol.errors import DataserveError, MachineError
    from dataserve.protocol.messages import printable

    from . import (
        command_info,
        command_list,
        command_prepare,
        command_preview,
        command_remove,
        command_start,
        command_status,
        command_verify,
    )
    from .builders import BAD_SAMPLE_CODES
    from .command import EXIT_BAD_SAMPLES, EXIT_FAILED, EXIT_NO_DAEMON, EXIT_USAGE, Command
    from .fingerprint import installed
    from .spec import nearest
except KeyboardInterrupt:  # Ctrl-C before `main` is reached: no traceback for that either
    raise SystemExit(130) from None

COMMANDS: tuple[Command, ...] = (
    *command_start.COMMANDS,
    *command_prepare.COMMANDS,
    *command_status.COMMANDS,
    *command_list.COMMANDS,
    *command_info.COMMANDS,
    *command_verify.COMMANDS,
    *command_preview.COMMANDS,
    *command_remove.COMMANDS,
)

#: What other programs call a verb of ours.
_OTHER_WORDS = {
    **dict.fromkeys(("serve", "run", "up"), "start"),
    **dict.fromkeys(("build", "make", "convert"), "prepare"),
    **dict.fromkeys(("ps", "top", "jobs"), "status"),
    **dict.fromkeys(("kill", "end", "quit", "down"), "stop"),
    **dict.fromkeys(("ls", "stores"), "list"),
    **dict.fromkeys(("show", "describe", "inspect"), "info"),
    **dict.fromkeys(("check", "fsck"), "verify"),
    **dict.fromkeys(("sheet", "view"), "preview"),
    **dict.fromkeys(("rm", "delete", "clear"), "remove"),
}

_STATUS = {
    **dict.fromkeys(("bad_option", "bad_config", "bad_name", "bad_address", "bad_source"), EXIT_USAGE),
    **dict.fromkeys(("no_daemon", "silent_daemon"), EXIT_NO_DAEMON),
    **dict.fromkeys(BAD_SAMPLE_CODES, EXIT_BAD_SAMPLES),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say (`sys.argv` unless given); returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may be no UTF-8, a terminal no Unicode
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parsed(arguments)
    try:
        if not sys.platform.startswith("linux"):
            raise MachineError("not_linux", f"dataserve needs Linux; this is {sys.platform}.", "Run it in a container.")
        status: int = args.run(args)
        sys.stdout.flush()
    except DataserveError as error:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        print(f"dataserve: {printable(f'{error.text} {error.remedy}'.strip())} [{error.code}]", file=sys.stderr)
        return _STATUS.get(error.code, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `dataserve list | head`
        _drop_output()
        return EXIT_FAILED
    except OSError as error:  # `dataserve list > file` on a full file system
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        _drop_output()
        print(
            f"dataserve: The output cannot be written: {error.strerror}. Make room for it. [no_space]", file=sys.stderr
        )
        return EXIT_FAILED
    return status


def _drop_output() -> None:
    """Or Python's last flush would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs. Exits with 2 and a sentence on a wrong usage."""
    top = argparse.ArgumentParser(
        prog="dataserve",
        description="Prepare a data set once, serve it to any number of jobs.",
        epilog="dataserve VERB --help tells more of each.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"dataserve {installed('dataserve') or 'unknown'}")
    verbs = top.add_subparsers(metavar="VERB", required=True)
    for command in COMMANDS:
        sub = verbs.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog="example:\n" + textwrap.indent(command.example.strip(), "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add(sub)
        sub.set_defaults(run=command.run, usage=sub.format_usage(), verb=command.name)
    return top


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The parsed arguments; for a word that is no verb or no option the nearest that is one."""
    names = [command.name for command in COMMANDS]
    word = next((word for word in arguments if not word.startswith("-")), names[0])
    if word not in names:
        known = f"Did you mean {other!r}?" if (other := _OTHER_WORDS.get(word)) else nearest(word, names)
        _refuse("dataserve", f"There is no verb {word!r}. {known}", "dataserve --help")
    args, unknown = parser().parse_known_args(arguments, argparse.Namespace(argv=arguments))
    if unknown:
        flag = unknown[0].partition("=")[0]
        what = f"There is no option {flag!r}." if flag.startswith("-") else f"{flag!r} is one word too many."
        options = re.findall(r"--[a-z][a-z-]*", args.usage)
        near = f" {nearest(flag, options)}" if flag.startswith("-") else ""
        _refuse(f"dataserve {args.verb}", what + near, f"dataserve {args.verb} --help")
    return args


def _refuse(prog: str, text: str, more: str) -> NoReturn:
    print(f"{prog}: {printable(text)} See {more}.", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


if __name__ == "__main__":
    sys.exit(main())
