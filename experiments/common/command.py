"""Runs an experiment as a command: wrong flags and data end in one line."""

import re
from collections.abc import Callable

from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the flags and calls `main`, as `absl.app.run` does.

    Errors that name a flag in their first words, and files that are missing, end the
    process with one line; all other errors show where they come from.
    """

    def guarded(arguments: list[str]) -> None:
        if len(arguments) > 1:
            unknown = " ".join(arguments[1:])
            raise SystemExit(
                f"Unknown arguments: {unknown}. Flags begin with --; --help lists them."
            )
        logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
        try:
            main(arguments)
        except ValueError as error:
            named = re.match(r"`(\w+)`", str(error))
            if not (named and named.group(1) in FLAGS):
                raise
            # Flags as they are written on the command line.
            message = re.sub(
                r"`(\w+)`", lambda m: f"--{m[1]}" if m[1] in FLAGS else m[0], str(error)
            )
            raise SystemExit(" ".join(message.split())) from None
        except FileNotFoundError as error:
            raise SystemExit(f"{error.strerror}: {error.filename}") from None

    app.run(guarded)
