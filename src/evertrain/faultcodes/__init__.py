"""Fault codes: how bad each is, and the rules by which faults that come often or stay long become worse. Pure.

noded publishes faults with these levels, ClusterD reads them.
"""
