"""The side of the cluster that lives in the training containers: manager, proxies, agents and workers of a job."""
