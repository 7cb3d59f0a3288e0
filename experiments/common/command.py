"""Runs an example as a command: what is wrong with a flag or its data ends in one line."""

from __future__ import annotations

import re
from collections.abc import Callable

from absl import app, flags

#: Packages of the extra `examples`, by the name they are imported under.
_PACKAGES = ("importlib_resources", "matplotlib", "PIL", "sklearn", "tensorflow_datasets")


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the flags and calls `main`, as `absl.app.run` does.

    Errors that name a flag in their first words, files that are missing, and packages of
    the extra `examples` that are not installed end the process with one line; all other
    errors are the example's own, and show where they come from.
    """
    app.run(lambda arguments: guarded(main, arguments))


def guarded(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Calls `main`; ends the process with one line for what its caller got wrong.

    Raises:
        SystemExit: For errors of flags and data.
    """
    if len(arguments) > 1:
        raise SystemExit(
            f"Unknown arguments: {' '.join(arguments[1:])}. Flags begin with --; --help "
            "lists them."
        )
    try:
        main(arguments)
    except ValueError as error:
        if not _names_a_flag(str(error)):
            raise
        raise SystemExit(_with_flags(str(error))) from None
    except FileNotFoundError as error:
        raise SystemExit(f"{error.strerror}: {error.filename}") from None
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise SystemExit(
            f"This example needs {error.name}. Install the extra `examples`, from a clone "
            "with: pip install '.[examples]'"
        ) from None


def _names_a_flag(message: str) -> bool:
    found = re.match(r"`(\w+)`", message)
    return bool(found) and found.group(1) in flags.FLAGS


def _with_flags(message: str) -> str:
    """The message on one line, with flags as they are written on the command line."""

    def written(found: re.Match) -> str:
        name = found.group(1)
        return f"--{name}" if name in flags.FLAGS else found.group(0)

    return " ".join(re.sub(r"`(\w+)`", written, message).split())
