"""The shapes of messages and configurations that the original's Python code passes around, for code that imports them.

Ours are `frames` and `net.routing`; the fields are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from evertrain.taskd.codes import LOCAL_HOST

CONFIG_FRAMEWORK_KEY = "Framework"
CONFIG_SERVERRANK_KEY = "ServerRank"
CONFIG_UPSTREAMIP_KEY, CONFIG_UPSTREAMPORT_KEY = "UpstreamAddr", "UpstreamPort"
CONFIG_LISTENIP_KEY, CONFIG_LISTENPORT_KEY = "ListenAddr", "ListenPort"

__all__ = [
    "CONFIG_FRAMEWORK_KEY",
    "CONFIG_LISTENIP_KEY",
    "CONFIG_LISTENPORT_KEY",
    "CONFIG_SERVERRANK_KEY",
    "CONFIG_UPSTREAMIP_KEY",
    "CONFIG_UPSTREAMPORT_KEY",
    "LOCAL_HOST",
    "AgentReportInfo",
    "MessageInfo",
    "MsgBody",
    "NetworkConfig",
    "Position",
]


@dataclass
class Position:
    role: str
    server_rank: str
    process_rank: str


@dataclass
class MsgBody:
    msg_type: str
    code: int
    message: str
    extension: dict[str, str]


@dataclass
class MessageInfo:
    uuid: str
    biz_type: str
    src: Position
    dst: Position
    body: str


@dataclass
class AgentReportInfo:
    fault_ranks: list[int] = field(default_factory=list)
    restart_times: int = -1


@dataclass
class NetworkConfig:
    pos: Position
    upstream_addr: str
    listen_addr: str
    enable_tls: bool = False
    tls_conf: dict[str, str] | None = None
