"""The controller of a job: `machine` decides (pure), `server` talks (asyncio).

There is one controller for a job. It knows every rank's place, hears of every fault, and leads all ranks through the
one flow that start, recovery and restart share: everybody out, agree on a step, build the group, repair, go.
"""
