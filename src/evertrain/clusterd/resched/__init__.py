"""Rescheduling: pods that faults have hit are replaced, nodes and chips with faults get no pods until they are well."""
