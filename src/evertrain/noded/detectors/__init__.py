"""What looks at a part of the machine each. A detector reads; what it has read is judged by functions without I/O.

A detector tells all faults that it sees whenever that changes. One that finds nothing to look at (no such hardware, no
permission) ends, which is no failure; what it was refused is in the log.
"""
