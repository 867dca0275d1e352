"""MindIO's core: one controller for a job, one processor in every training process.

The controller agrees with all processors on a step, stops them, has them rebuild their process groups, plans who
sends whose state to whom, and lets them go on. It knows nothing of tensors or of any framework; `evertrain.torch` is
one framework adaptor on top of it.
"""
