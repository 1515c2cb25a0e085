"""The one exception meant for the user's eyes; the CLI prints its sentence and exits 2."""


class D3DError(Exception):
    """What the user can mend: one clear sentence on what was wrong and what to change."""
