"""Tool that runs Python code in a sandbox."""

import signal

from retrain.environments.arguments import validated
from retrain.environments.tools import ToolError
from retrain.sandbox.inside import FLOOD
from retrain.sandbox.sandbox import Sandbox, SandboxLimits, SandboxOutcome

ANEW = "[The interpreter was started anew: nothing of earlier calls is left.]\n"


class Python:
    """Python for one episode, in a sandbox: standard library only, no network, no files but its own.

    With ``keep_state``, variables and files persist between calls, and all processes are suspended in between;
    otherwise each call starts with a fresh interpreter and empty directories.

    Limits: ``timeout_s`` wall-clock seconds for a call; ``memory_mb`` MiB for each process and for all together;
    ``processes`` simultaneous processes and threads; ``file_mb`` MiB for each file, for /tmp and for /dev/shm. Output
    of more than ``output_characters`` is cut in the middle.

    The answer is the output to stdout and stderr. A last line that is an expression prints its ``repr``, unless it is
    None, as at Python's prompt. An error gives the last lines of its traceback. Raises MissingExtra if bubblewrap is
    not installed, UsageError if it cannot isolate or a limit is invalid; a call raises SandboxFailed when the machine
    cannot start another sandbox.
    """

    exact = False  # time-outs, and random numbers without a seed

    def __init__(
        self,
        keep_state: bool = False,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        output_characters: int = 4000,
        processes: int = 32,
        file_mb: int = 16,
    ):
        limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "output_characters": output_characters}
        limits |= {"processes": processes, "file_mb": file_mb}
        self.limits, self.keep_state = validated(SandboxLimits, limits, "tool python"), keep_state
        self._sandbox = Sandbox(self.limits, keep_state)
        self._called = False

    def __call__(self, code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: The program, of the standard library only. A last line that is an expression shows its value too.
        """
        if not isinstance(code, str):
            raise ToolError(f"code must be a text, not {type(code).__name__}")
        outcome = self._sandbox.run(code)
        anew = ANEW if self.keep_state and self._called and outcome.fresh else ""
        self._called = True
        return anew + self._described(outcome)

    def close(self) -> None:
        self._sandbox.close()

    def _described(self, outcome: SandboxOutcome) -> str:
        output = outcome.output.replace("\0", "\N{REPLACEMENT CHARACTER}")
        ending = {
            "time": f"it took longer than {self.limits.timeout_s:g} s",
            "memory": f"it used more than {self.limits.memory_mb} MiB of memory",
            "output": f"it printed more than {FLOOD} characters",
            "lost": "it ended the interpreter, or took longer than "
            f"{self.limits.timeout_s:g} s, or used more than {self.limits.memory_mb} MiB of memory",
        }.get(outcome.ended)
        if ending:
            note = f"[The code was stopped: {ending}.]"
        elif outcome.status < 0:
            number = -outcome.status
            name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
            note = f"[The interpreter was ended by {name}.]"
        elif outcome.status > 1 or (outcome.status == 1 and not output):
            note = f"[Exit status {outcome.status}]"
        else:
            return output or "[No output]"
        return f"{output}\n{note}" if output and not output.endswith("\n") else output + note
