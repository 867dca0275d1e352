"""Numbers and words of TaskD's wire. They are the original's; other software knows them."""

from __future__ import annotations

from enum import IntEnum

# Roles, and how high each stands in the tree.
MANAGER, PROXY, AGENT, WORKER = "Mgr", "Proxy", "Agent", "Worker"
LEVELS = {MANAGER: 3, PROXY: 2, AGENT: 1, WORKER: 1}
HAS_PROCESS = frozenset({WORKER})
"""Roles of which a node has several, told apart by their process rank."""
ALL = "All"
NO_PROCESS = "-1"

MANAGER_PORT, PROXY_PORT, CLUSTERD_PORT = 9601, 9602, 8899
LOCAL_HOST = "127.0.0.1"
STRESS_SILENCE = 30.0
"""Seconds without a sign of life after which a worker that was ordered a stress test is given up."""


class AckCode(IntEnum):
    OK = 0
    NIL_MESSAGE = 4000
    NIL_HEADER = 4001
    NIL_POSITION = 4002
    DST_ROLE_ILLEGAL = 4003
    DST_SERVER_RANK_ILLEGAL = 4004
    DST_PROCESS_RANK_ILLEGAL = 4005
    DST_TYPE_ILLEGAL = 4006
    CLIENT_ERROR = 4999
    NO_BUFFER = 5000
    BUFFER_BUSY = 5001
    NO_ROUTE = 5002
    TOO_MANY_REGISTERED = 5003
    SERVER_ERROR = 5999
    SEND_LOST = 6000
    ACK_LOST = 6001
    NO_STREAM = 6002
    NET_ERROR = 6999


# What a body is about.
REGISTER, STATUS, ACTION, KEEP_ALIVE = "REGISTER", "STATUS", "ACTION", "KEEP_ALIVE"


class Code(IntEnum):
    """Of a message's body. What each carries is in the reference of the wire, docs/taskd-wire.md."""

    AGENT_REGISTER = 0
    WORKER_REGISTER = 101
    FAULT_RECOVER = 102
    RESTART_TIMES = 201
    FAULT_RANKS = 202
    EXIT_AGENT = 203
    SWITCH_NIC = 204
    STRESS_TEST = 205
    RECOVER_SIGNAL = 206
    SIGNAL_KEEP_ALIVE = 207
    RESTART_AGENT = 208
    RESTART_WORKERS = 209
    START_AGENT = 210
    REPLY_TO_CLUSTERD = 211
    HOT_SWITCH = 212
    STOP_WORKERS = 213


PROFILING_ORDERS = range(700, 712)
"""700 + 10 if the default domain is on + 1 if the communication domain is."""
PROFILING_RESULTS = range(1400, 1423)
"""1400 + 10 * default + communication, each 0 off, 1 on, 2 failed."""
