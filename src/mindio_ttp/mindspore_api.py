"""The two calls that MindSpore's C++ side makes around an optimizer update. The original is a C library."""

from evertrain.mindio.tft.mindspore import set_finished, set_updating

__all__ = ["set_finished", "set_updating"]
