"""The operator: AscendJob to pods, service, PodGroup, rank table and status."""
