"""The exceptions meant for the user's eyes; the CLI prints their sentence and exits."""


class D3DError(Exception):
    """What the user can mend: one clear sentence on what was wrong and what to change."""

    exit_status = 2


class StoppedError(D3DError):
    """Work that a signal ended in good order: what was done is saved, and can be continued."""

    def __init__(self, sentence: str, signal_number: int):
        super().__init__(sentence)
        self.exit_status = 128 + signal_number


class LostProcessError(D3DError):
    """Another process of the same run is gone: nothing that waits for it may be called any more.

    It ends with the status that says to try again (EX_TEMPFAIL of sysexits.h).
    """

    exit_status = 75
