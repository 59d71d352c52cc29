"""Errors that a notebook shows as one message.

IPython asks an exception for `_render_traceback_`; answering with the message alone spares the reader a stack of
library frames that says nothing about their input. Outside IPython these are plain `ValueError` and `RuntimeError`.
"""


class RunConfigError(ValueError):
    """A setting, model, data set or folder that the caller passed cannot be used; the message says what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class RunFailedError(RuntimeError):
    """Training stopped on an error; the message names it and the file that holds the whole traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
