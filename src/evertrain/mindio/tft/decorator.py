"""`tft_exception_handler`: the training function is called again after every recovery.

Nothing of a failed call may be held while others repair this rank's state: its frames hold tensors. So the exception is
judged where it is caught, and everything else happens after it is gone.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from evertrain.mindio.tft import device, environment, faults, garbage, hosting
from evertrain.mindio.tft.faults import Fault
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.numbers import Action, ReportState
from evertrain.mindio.tft.processor import Processor
from evertrain.mindio.tft.runtime import give_up, runtime

_F = TypeVar("_F", bound=Callable[..., Any])


def tft_exception_handler(func: _F) -> _F:
    if not callable(func):
        raise TypeError(f"tft_exception_handler decorates a function, not {type(func).__name__}")

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Callbacks may replace items of the list: a rebuilt model, a new data iterator.
        arguments: list[Any] | tuple = args if runtime.framework_type else list(args)
        runtime.callbacks.args = arguments
        if runtime.processor is not None:
            garbage.begin()
        while True:
            processor = runtime.processor
            if processor is not None:
                processor.main.enter()
            try:
                result = func(*arguments, **kwargs)
            except RuntimeError as error:
                if processor is None or processor.unprotected:
                    raise
                fault = _judge(error, processor)
            except Exception as error:
                if processor is not None and not processor.unprotected:
                    _report_unknown(error, processor)
                _empty("exception")
                raise
            else:
                _leave(processor)
                _empty("end")
                return result
            _recover(fault, processor)

    return wrapper  # type: ignore[return-value]


def _judge(error: RuntimeError, processor: Processor) -> Fault:
    fault = faults.classify(str(error), processor.settings.uce)
    text = "".join(traceback.format_exception(error))
    if fault.name == faults.OTHER:
        # The process may be ended from outside before anybody else could show this.
        print(text, file=sys.stderr, flush=True)
    logger.warning("the training function was left (%s, %s): %s", fault.name, fault.state.name, text)
    processor.report(fault.state, fault.error_code, _line(error) if fault.name == faults.OTHER else "")
    return fault


def _line(error: Exception) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())


def _report_unknown(error: Exception, processor: Processor) -> None:
    """The others may still need this process, for the controller in it if nothing else. Then it ends by its error.

    A checkpoint may take longer than any other action: its own, or those that the controller in it waits for.
    """
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    processor.report(ReportState.RS_UNKNOWN, error=_line(error))
    while not processor.main.wait_exit(environment.action_limit()) and (processor.saving or hosting.leading()):
        logger.info("this process has failed and still waits for the end of a checkpoint or a recovery")


def _recover(fault: Fault, processor: Processor) -> None:
    if fault.waits_for_clean and processor.main.wait_cleaned() != Action.RETRY:
        give_up("the recovery was given up")
    _empty("repair")
    if processor.main.wait_resumed() != Action.RETRY:
        give_up("the recovery was given up")
    _empty("normal", collect=False)


def _leave(processor: Processor | None) -> None:
    if processor is None:
        return
    if processor.settings.rank == 0 and not environment.under_platform():
        hosting.destroy_controller()
    runtime.destroy_processor()


def _empty(stage: str, collect: bool = True) -> None:
    if collect:
        garbage.collect()
    port = device.port()
    port.empty_cache()
    logger.info("memory at stage %s: %s", stage, port.memory() or "not known")
