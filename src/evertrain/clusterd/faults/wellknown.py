"""Codes that get a treatment of their own. Matched as parts of a code, as the original does. Pure."""

from __future__ import annotations

MEMORY_ERROR = "80E01801"
"""An error of the chip's memory that the step may survive if it is run again (UCE)."""
ACCOMPANYING = ("80C98009", "80CB8009")
"""What a chip reports together with it, without being a fault of its own."""
RETRY_FAILED = "8C1F860B"
"""Communication was tried again in vain (HCCL)."""
LINK_DOWN, SWITCH_LINK_DOWN = "81078603", "[0x08520003,na,L2,na]"
COMMUNICATION_ERRORS = ("8C1F8608", "4C1F8608")
"""Errors in the completion queue, of the chip and of the host (CQE)."""
STRESS_TEST = ("80818C05", "80818C06")
"""What a stress test makes a chip report."""


def is_any(code: str, of: tuple[str, ...]) -> bool:
    return any(each in code for each in of)
