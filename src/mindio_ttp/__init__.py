"""The names under which training frameworks import MindIO's fault tolerance. Everything is in `evertrain.mindio`."""
