"""The manager of a job: hears ClusterD, agents, workers and the MindIO controller, and tells each what to do."""
