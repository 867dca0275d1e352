"""How long a recovery waits for what, in seconds. Each limit has a next step; none is a pause for its own sake."""

from __future__ import annotations

REPORT = 900.0
"""For any report of the client."""
SUBSCRIBER = 60.0
"""For a client, while a recovery needs one. It connects again within seconds; a job that has none is rescheduled."""
RESUMED = 60.0
"""At least this is left of every wait after ClusterD was started again: its client has to come back first."""

TOLD = 1.0
"""After the last word of a recovery, before it is over: a ClusterD that dies in between says it again."""

MENDING = 15.0
"""For a chip's fault to vanish that a restart of its process may mend."""
ROUTES = 3.0
"""From a network fault on, until routes have converged: earlier a repeated step would fail again."""
RETRY_GRACE = 30
"""That the client is told to wait on top, in whole seconds as on the wire."""

RESCHEDULE, RESCHEDULE_LEAST, RESCHEDULE_MOST = 270.0, 30.0, 270.0
"""For the replacements of pods; the annotation `wait-reschedule-timeout` may shorten it."""
ELASTIC_PROBE, ELASTIC_LESS = 20.0, 10.0
"""For a spare node before training goes on smaller; or as long as the client waits, less some seconds."""
ELASTIC_WAIT_LEAST, ELASTIC_WAIT_MOST = 10.0, 3600.0
JOB_RUNNING = 135.0
"""For a job that was rescheduled as a whole to run."""
KILLED = 60.0
"""For the job's pods to be replaced after its manager was told to end."""
PLATFORM = 300.0
"""For each answer of a platform."""

NEW_POD = 60.0
"""For the backup of a hot switch to run."""
OLD_POD = 270.0
"""For the pod that was switched away from to be gone."""
STRESS_PAUSE = 900
"""Seconds, as on the wire, that training may be paused for a stress test."""

POD_SETTLED = 10.0
"""A fault that is told so soon after a pod was replaced may be about the one before, unless training went on since."""
LABEL = 5.0
"""Between attempts to set the label back that says that this job recovers."""

MAX_HOT_PODS = 10
