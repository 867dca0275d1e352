"""The proxy's functions. They live in `evertrain.taskd.proxy_api`."""

from evertrain.taskd.proxy_api import destroy_taskd_proxy, init_taskd_proxy

__all__ = ["destroy_taskd_proxy", "init_taskd_proxy"]
