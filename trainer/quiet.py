"""What torch and torchrec say to their own developers, kept from those who run logitmix."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("torchrec", "torch.fx", "torch.distributed", "torch.onnx", "torch.__trace", "fbgemm_gpu", "root")
UNLOADED = "Could not load the library"
"""So begins what FBGEMM logs before it raises the same as an error."""


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings within, and of these libraries' logs only errors that are not raised, too. OSErrors in threads
    are not shown: TensorBoard raises that of its thread again in the next call."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
            logger.addFilter(_is_no_exception)
        hook, threading.excepthook = threading.excepthook, _not_of_files
        try:
            yield
        finally:
            threading.excepthook = hook
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
                logger.removeFilter(_is_no_exception)


def _is_no_exception(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(UNLOADED)


def _not_of_files(arguments: threading.ExceptHookArgs) -> None:
    if not isinstance(arguments.exc_value, OSError):
        threading.__excepthook__(arguments)
