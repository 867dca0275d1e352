"""One pure state machine per job for every flow of a recovery."""
