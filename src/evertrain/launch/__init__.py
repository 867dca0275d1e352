"""The launcher: starts a job's processes on one node, watches them, and replaces the ones that fail.

It decides nothing about training. It is the agent of the controller, to which it speaks over the wire like every
training process does: it reports what it sees of its processes and carries out what it is told. It never imports
torch, so it starts in a moment and no fault of a training library reaches it.
"""
