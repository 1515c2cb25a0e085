"""A run's metrics as TensorBoard reads them, one file for each time the run was continued.

Written at once, without the queue of tensorboardX's own writer: where the disk is full, a thread
that has died would let the run wait for it for ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Curves:
    """Scalars by step.

    Args:
      start: the first step that will be added; later ones of earlier files are void.
    """

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        self._event = Event
        self._file = EventsWriter(str(folder / "events"), f".from-{start}")
        begin = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(session_log=begin, step=start))

    def add(self, record: dict[str, Any]) -> None:
        """A step's numbers; those of a list by their place, from 1.

        Raises:
          OSError: the file cannot be written.
        """
        from tensorboardX.summary import scalar

        step = record["step"]
        for name, value in record.items():
            for tag, number in _numbers(name, value):
                self._file.write_event(self._event(summary=scalar(tag, number), step=step))
        self._file.flush()


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, list):
        return [(f"{name}/{place}", number) for place, number in enumerate(value, start=1)]
    return [] if name == "step" else [(name, value)]
