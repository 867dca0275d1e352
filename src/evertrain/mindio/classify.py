"""What kind of fault an exception is, from its text. The texts are those that Ascend's runtime and adaptors raise."""

from __future__ import annotations

_PATTERNS = (
    ("UCE ERROR", "uce"),
    ("HBM MULTI BIT ECC", "uce"),
    ("HCCL OP RETRY FAILED", "hccl"),
    ("SUSPECT REMOTE ERROR", "hccl"),
    ("UB LINK ERROR", "hccl"),
    ("HCCS LINK ERROR", "hccl"),
    ("Connection closed by peer", "link"),
    ("Connection reset by peer", "link"),
    ("Broken pipe", "link"),
)


def classify(error: BaseException) -> str:
    """The fault kind for an exception that left the training function."""
    if isinstance(error, RuntimeError | OSError):
        text = str(error)
        for pattern, kind in _PATTERNS:
            if pattern in text:
                return kind
    return "exception"
