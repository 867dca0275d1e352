"""The fault centre: from what nodes and others publish to what is wrong with each job, and what schedulers shall see.

Pure. `centre` puts it together; each processor of the pipeline is a module of its own.
"""
