"""Keys of configurations, and shapes of messages. They live in `evertrain.taskd.shapes`."""

from evertrain.taskd.shapes import (
    CONFIG_FRAMEWORK_KEY,
    CONFIG_LISTENIP_KEY,
    CONFIG_LISTENPORT_KEY,
    CONFIG_SERVERRANK_KEY,
    CONFIG_UPSTREAMIP_KEY,
    CONFIG_UPSTREAMPORT_KEY,
    LOCAL_HOST,
    AgentReportInfo,
    MessageInfo,
    MsgBody,
    NetworkConfig,
    Position,
)

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
