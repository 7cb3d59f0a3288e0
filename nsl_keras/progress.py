"""Progress bars on what takes longer than seconds: Keras's own, with its `verbose`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import keras

from nsl_keras import validation

#: Work that is done sooner shows no bar with `verbose="auto"`.
QUIET_SECONDS = 2.0

Item = TypeVar("Item")


class Progress:
    """A progress bar over steps of work.

    Args:
        steps: int, the number of steps; `None` if it is not known.
        verbose: 0 for silence, 1 for a bar, 2 for one line at the end, as in
            `keras.Model.predict`; `"auto"` for a bar where the work takes longer than
            two seconds.

    Raises:
        ValueError: For another `verbose`.
    """

    def __init__(self, steps: int | None, verbose: Any = "auto") -> None:
        self.verbose = validation.one_of(verbose, ("auto", 0, 1, 2), "verbose")
        self._steps, self._done, self._is_shown = steps, 0, self.verbose in (1, 2)
        self._start = time.monotonic()
        self._bar: Any = None
        if self.verbose != 0:
            self._bar = keras.utils.Progbar(
                steps, verbose=1 if self.verbose == "auto" else self.verbose
            )

    def advance(self) -> None:
        """Notes that one more step is done."""
        self._done += 1
        if self.verbose == "auto" and not self._is_shown:
            self._is_shown = time.monotonic() - self._start > QUIET_SECONDS
        if self._bar is not None and self._is_shown:
            self._bar.update(self._done, finalize=self._done == self._steps)

    def close(self) -> None:
        """Ends the line of a bar whose number of steps was not known, or not reached."""
        if self._bar is not None and self._is_shown and self._done != self._steps:
            self._bar.update(self._done, finalize=True)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields items, each of which is a step."""
        for item in items:
            yield item
            self.advance()
        self.close()
