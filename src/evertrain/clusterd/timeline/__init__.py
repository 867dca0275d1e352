"""Every incident of every job: what failed, what was decided and why, where the time went, how it ended."""
