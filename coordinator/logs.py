"""Log lines on stderr: text for people, JSON lines for machines.

The law of this file: only the loggers `wavekeeper` and `uvicorn` are touched, never the root, so that a process which
embeds the coordinator keeps its own logging. One record is one line, whatever it holds; a traceback follows its line in
text and stands inside of it in JSON. Facts belong into fields: `log.info("formed", extra={"fields": {"epoch": 3}})`.
"""

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from .config import LogFormat, LogLevel, one_line

LOGGERS = ("wavekeeper", "uvicorn")
"""uvicorn must be started with `log_config=None`, or it puts its own handlers in place of ours."""

_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")
_encoder = msgspec.json.Encoder(enc_hook=repr)


def configure(level: LogLevel, format: LogFormat) -> None:
    """Send the lines of our loggers to stderr. Doing it again replaces what was there."""
    is_text = format is LogFormat.TEXT or (format is LogFormat.AUTO and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False  # the root may belong to somebody else, who would print each line again


class TextFormatter(logging.Formatter):
    """`2026-12-01 03:26:00.123 INFO wavekeeper.service: formed epoch=3`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with the traceback below it if there is one."""
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        fields = "".join(f" {key}={_word(value)}" for key, value in _fields(record).items())
        line = f"{time} {record.levelname} {record.name}: {one_line(record.getMessage())}{fields}"
        trace = _traceback(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts` (RFC 3339, UTC, milliseconds), `level`, `logger`, `msg`, `exc`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. A field with the name of a key that is already there gets a `_` behind it."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "ts": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if trace := _traceback(self, record):
            line["exc"] = trace
        for key, value in _fields(record).items():
            line[f"{key}_" if key in line else key] = value
        try:
            return _encoder.encode(line).decode()
        except (TypeError, ValueError, RecursionError):  # a lone surrogate from a file name, a key that is no text
            return _encoder.encode({str(key): ascii(value) for key, value in line.items()}).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _word(value: Any) -> str:
    text = str(value)
    # Quoted like JSON, so that a value with a space in it is still one value and one line.
    return text if _PLAIN.fullmatch(text) else msgspec.json.encode(text.encode(errors="replace").decode()).decode()


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    return "\n".join(parts + ([formatter.formatStack(record.stack_info)] if record.stack_info else []))
