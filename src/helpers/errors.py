"""Errors that a user can act on.

A `UserError` says in one sentence what is wrong, with which value, and what is allowed. The command line prints that
sentence and exits with `exit_code`; Jupyter prints it in place of a traceback, because IPython asks an exception for
`_render_traceback_`. The runner knows a user error that came out of a kernel by this: its traceback is its sentence.
"""


class UserError(Exception):
    """One sentence for the user; exit code 2 means bad input, 1 a failed run."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        return [str(self)]
